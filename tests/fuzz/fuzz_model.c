/* tests/fuzz/fuzz_model.c: the header of any model is read by worker and plan alike: refused with a
 * sentence, or understood the same way.
 *
 * The input is the header; zeros stand behind it for the data of its tensors.
 *
 * Owns: nothing.  Built as a fuzzer with clang, and always as a replay of tests/fuzz/corpus/model
 * (see replay.c).
 */
#include <stdlib.h>
#include <string.h>

#include "coordinator/plan.h"
#include "worker/model.h"

#define HEADER_BYTES (16u << 10)
#define ROOM_BYTES   (1u << 20)

static void plan_for(const struct gguf *g, int ranks, bool cuda, bool read) {
    struct err_text err = {{0}};
    struct plan *p = calloc(1, sizeof *p);
    const struct plan_ask ask = {.ranks = ranks,
                                 .devices = cuda ? ranks : 1,
                                 .cuda = cuda,
                                 .memory_bytes = (uint64_t)1 << 40,
                                 .bytes_per_s = 1e12,
                                 .max_seqs = LIMIT_SLOTS,
                                 .max_rows = LIMIT_STEP_ROWS};
    int rc = plan_make(p, g, &ask, &err);
    if (rc < 0) assert(strstr(err.text, "expected"));
    if (rc < 0 && ranks == 1) assert(!read); /* what the worker reads can be planned */
    if (rc == OK) assert(p->weight_bytes <= 16 * gguf_total_bytes(g) + (1 << 20));
    if (rc == OK) assert(p->batches[0].step_s > 0 && p->batches[PLAN_BATCHES - 1].step_s < 1e30);
    free(p);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static uint8_t *file;
    static struct hparams hp;
    struct gguf *g = NULL;
    struct err_text err = {{0}};
    if (size > HEADER_BYTES) return 0;
    if (!file) file = calloc(1, HEADER_BYTES + ROOM_BYTES);
    memset(file, 0, HEADER_BYTES);
    memcpy(file, bytes, size);
    if (gguf_parse(&g, file, size + ROOM_BYTES, "fuzz.gguf", &err) < 0) return 0;
    int rc = model_read_hparams(&hp, g, &err);
    if (rc < 0) assert(strstr(err.text, "expected"));
    if (rc == OK) assert(hp.n_layers >= 1 && hp.n_layers <= LIMIT_LAYERS && hp.vocab >= 1);
    plan_for(g, 1, false, rc == OK);
    plan_for(g, 8, false, rc == OK);
    plan_for(g, 2, true, rc == OK);
    gguf_close(g);
    return 0;
}
