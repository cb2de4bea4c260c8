/* tests/fuzz/fuzz_openai.c: any body is refused with a reason or becomes a request in range.
 *
 * The first byte of an input says whether it is for chat or for text.
 * Built as a fuzzer with clang, and always as a replay of tests/fuzz/corpus/openai (see replay.c).
 */
#include <math.h>
#include <string.h>

#include "coordinator/openai.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static void check_request(const struct openai_request *r, const struct openai_defaults *d) {
    const struct msg_sampling *s = &r->sampling;
    assert(r->n >= 1 && r->n <= LIMIT_CHOICES);
    assert(r->max_tokens >= 0 && r->max_tokens <= INT32_MAX);
    assert(s->temperature >= 0 && s->temperature <= 2 && s->top_p > 0 && s->top_p <= 1);
    assert(s->min_p >= 0 && s->min_p <= 1 && s->top_k >= 0 && s->top_k <= d->vocab);
    assert(s->repetition > 0 && isfinite(s->presence) && isfinite(s->frequency));
    assert(s->top_logprobs >= 0 && s->top_logprobs <= LIMIT_TOP_LOGPROBS);
    assert(s->n_bias >= 0 && s->n_bias <= LIMIT_BIAS);
    for (int i = 0; i < s->n_bias; i++)
        assert(s->bias_token[i] >= 0 && s->bias_token[i] < d->vocab && isfinite(s->bias_value[i]));
    assert(r->n_stops >= 0 && r->n_stops <= LIMIT_STOP_STRINGS);
    for (int i = 0; i < r->n_stops; i++)
        assert(*r->stops[i] && strlen(r->stops[i]) <= LIMIT_STOP_STRING_BYTES);
    assert(r->n_prompts * r->n <= LIMIT_SEQUENCES);
    for (int i = 0; i < r->n_prompts; i++)
        for (size_t k = 0; k < r->prompts[i].n_ids; k++)
            assert(r->prompts[i].ids[k] >= 0 && r->prompts[i].ids[k] < d->vocab);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static struct openai_request r;
    static const struct openai_defaults d = {
        .model = "tiny", .vocab = 1000, .temperature = 1, .top_p = 1, .repetition = 1};
    if (!size) return 0;
    struct openai_error e;
    enum openai_kind kind = bytes[0] & 1 ? OPENAI_TEXT : OPENAI_CHAT;
    if (openai_parse(&r, kind, (const char *)bytes + 1, size - 1, &d, &e) < 0) {
        assert(e.status >= 400 && e.type && e.message[0]);
        assert(utf8_valid(e.message, strlen(e.message)));
        return 0;
    }
    assert(kind == OPENAI_TEXT ? r.n_prompts > 0 : json_array_size(r.messages) > 0);
    check_request(&r, &d);
    openai_request_deinit(&r);
    return 0;
}
