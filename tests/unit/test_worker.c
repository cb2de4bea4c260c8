/* tests/unit/test_worker.c: what the worker refuses to load, and the worker as a process: this test
 * is its coordinator.
 */
#include <inttypes.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "proto/log.h"
#include "proto/wire.h"
#include "worker/model.h"
#include "worker/process.h"

#define ANSWER_MS 60000 /* a bound for a slow machine, not a measurement */

static char model_path[512], worker_path[512];

static int find_paths(void **state) {
    UNUSED(state);
    const char *source = getenv("OCTAVO_SOURCE_ROOT"), *build = getenv("OCTAVO_BUILD_ROOT");
    snprintf(model_path, sizeof model_path, "%s/tests/models/tiny.gguf", source ? source : ".");
    snprintf(worker_path, sizeof worker_path, "%s/octavo-worker", build ? build : "build");
    return 0;
}

/* ---- what is refused --------------------------------------------------------------------- */

static uint8_t *file_bytes;
static uint64_t file_size;

static void read_model(void) {
    FILE *f = fopen(model_path, "rb");
    if (!f) fail_msg("%s: expected the demonstration model, found none", model_path);
    fseek(f, 0, SEEK_END);
    file_size = (uint64_t)ftell(f);
    rewind(f);
    file_bytes = malloc(file_size);
    assert_int_equal(fread(file_bytes, 1, file_size, f), file_size);
    fclose(f);
}

/* The place of a key's value or name in file_bytes. */
static uint8_t *place_of(const char *key, bool name) {
    struct gguf *g;
    assert_int_equal(gguf_parse(&g, file_bytes, file_size, "tiny.gguf", NULL), OK);
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) fail_msg("%s: expected the key in the demonstration model, found none", key);
    uint8_t *at = file_bytes + ((name ? (const uint8_t *)kv->key.p : kv->data) - file_bytes);
    gguf_close(g);
    return at;
}

static void expect_refusal(const char *what, const char *sentence) {
    struct gguf *g;
    struct hparams hp;
    struct err_text err = {0};
    assert_int_equal(gguf_parse(&g, file_bytes, file_size, "tiny.gguf", &err), OK);
    int rc = model_read_hparams(&hp, g, &err);
    gguf_close(g);
    if (rc != ERR_FORMAT || !strstr(err.text, sentence) ||
        strncmp(err.text, "tiny.gguf: ", 11) != 0)
        fail_msg("%s: expected a refusal with \"%s\", found %s: %s", what, sentence, err_name(rc),
                 err.text);
}

static void a_number_out_of_range_is_refused_with_key_expected_found(void **state) {
    UNUSED(state);
    const struct {
        const char *key;
        uint32_t value;
        const char *sentence;
    } rows[] = {
        {"block_count", 0, "glm-dsa.block_count: expected a number from 1 to 512, found 0"},
        {"block_count", 513, "found 513"},
        {"nextn_predict_layers", 6, "nextn_predict_layers: expected a number from 0 to 5, found 6"},
        {"leading_dense_block_count", 6,
         "leading_dense_block_count: expected a number from 0 to 5, found 6"},
        {"attention.head_count", 0, "attention.head_count: expected"},
        {"attention.head_count_kv", 0, "attention.head_count_kv: expected"},
        {"attention.layer_norm_rms_epsilon", 0x7fc00000,
         "layer_norm_rms_epsilon: expected a number"},
        {"attention.layer_norm_rms_epsilon", 0, "layer_norm_rms_epsilon: expected a number"},
        {"rope.freq_base", 0x7f800000, "rope.freq_base: expected a number"},
        {"rope.freq_base", 0xbf800000, "rope.freq_base: expected a number"},
        {"rope.dimension_count", 63, "rope.dimension_count: expected an even number, found 63"},
        {"rope.dimension_count", 130, "key_length: expected a number from 642 to 642"},
        {"attention.key_length_mla", 64, "key_length_mla: expected a number from 65"},
        {"attention.key_length", 577,
         "attention.key_length: expected a number from 576 to 576, found 577"},
        {"attention.indexer.top_k", 0, "top_k: expected"},
        {"expert_used_count", 17, "expert_used_count: expected a number from 1 to 16, found 17"},
        {"expert_used_count", 0, "expert_used_count: expected a number from 1 to 16, found 0"},
        {"expert_group_count", 3, "expected groups of equal size"},
        {"expert_group_count", 16, "expected groups of equal size, at least 2"},
        {"expert_group_used_count", 2,
         "expert_group_used_count: expected a number from 0 to 1, found 2"},
        {"expert_gating_func", 4, "expert_gating_func: expected a number from 0 to 2, found 4"},
        {"expert_shared_count", 0, "expert_shared_count: expected"},
        {"embedding_length", 512,
         "token_embd.weight: expected shape [512, 4096, 1], found [256, 4096, 1]"},
        {"vocab_size", 4097, "token_type: expected 4097 elements, found 4096"},
        {"attention.kv_lora_rank", 256,
         "attention.key_length: expected a number from 320 to 320, found 576"},
        {"expert_count", 32,
         "blk.1.ffn_gate_inp.weight: expected shape [256, 32, 1], found [256, 16, 1]"},
        {"expert_feed_forward_length", 128,
         "blk.1.ffn_gate_shexp.weight: expected shape [256, 128, 1]"},
        {"feed_forward_length", 512,
         "blk.0.ffn_gate.weight: expected shape [256, 512, 1], found [256, 1024, 1]"},
    };
    read_model();
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        char key[128];
        uint32_t before;
        snprintf(key, sizeof key, "glm-dsa.%s", rows[i].key);
        uint8_t *at = place_of(key, false);
        memcpy(&before, at, sizeof before);
        memcpy(at, &rows[i].value, sizeof before);
        expect_refusal(key, rows[i].sentence);
        memcpy(at, &before, sizeof before);
    }
    free(file_bytes);
}

static void a_missing_key_is_named(void **state) {
    UNUSED(state);
    const char *const keys[] = {"block_count",
                                "context_length",
                                "embedding_length",
                                "attention.q_lora_rank",
                                "attention.key_length_mla",
                                "attention.indexer.top_k",
                                "expert_shared_count",
                                "attention.layer_norm_rms_epsilon"};
    read_model();
    for (size_t i = 0; i < ARRAY_LEN(keys); i++) {
        char key[128], sentence[192];
        snprintf(key, sizeof key, "glm-dsa.%s", keys[i]);
        snprintf(sentence, sizeof sentence, "%s: expected a number from ", key);
        uint8_t *at = place_of(key, true), before = *at;
        *at = 'X';
        expect_refusal(key, sentence);
        *at = before;
    }
    uint8_t *arch = memmem(file_bytes, file_size, "glm-dsa", 7);
    arch[0] = 'x';
    expect_refusal("general.architecture", "general.architecture: expected glm-dsa, found xlm-dsa");
    free(file_bytes);
}

static void a_missing_tensor_is_named_and_indexer_types_are_checked(void **state) {
    UNUSED(state);
    read_model();
    uint8_t *at = memmem(file_bytes, file_size, "blk.3.attn_kv_a_norm", 20);
    assert_non_null(at);
    *at = 'X';
    expect_refusal("tensor",
                   "blk.3.attn_kv_a_norm.weight: expected a tensor [512, 1, 1], found none");
    *at = 'b';
    uint8_t *types = place_of("glm-dsa.attention.indexer.types", false), before[5];
    memcpy(before, types, sizeof before);
    types[0] = 0;
    expect_refusal("types", "indexer.types: expected layer 0 to have an indexer of its own");
    memcpy(types, before, sizeof before);
    types[2] = 1;
    expect_refusal("types",
                   "blk.2.indexer.attn_q_b.weight: expected a tensor [256, 512, 1], found none");
    free(file_bytes);
}

static void the_demonstration_model_is_read_as_it_is(void **state) {
    UNUSED(state);
    struct gguf *g;
    struct hparams hp;
    struct err_text err = {0};
    assert_int_equal(gguf_open(&g, model_path, &err), OK);
    if (model_read_hparams(&hp, g, &err) < 0) fail_msg("%s", err.text);
    gguf_close(g);
    assert_int_equal(hp.n_layers, 5);
    assert_int_equal(hp.n_mtp, 1);
    assert_int_equal(hp.vocab, 4096);
    assert_int_equal(hp.vocab_used, 4053);
    const bool full[] = {true, true, false, true, false};
    assert_memory_equal(hp.index_full, full, sizeof full);
    assert_int_equal(hp.dims.d_nope, 192);
    assert_true(hp.dims.attn_scale == 0.0625f && hp.dims.weights_scale == 2.5f);
    assert_true(hp.rope_freq[0] == 1);
}

static void a_group_that_does_not_divide_the_model_is_refused(void **state) {
    UNUSED(state);
    struct gguf *g;
    struct err_text err = {0};
    struct model m = {0};
    const struct model_options o = {
        .rank = 0, .world = 3, .max_slots = 1, .max_rows = 1, .max_outs = 1};
    assert_int_equal(gguf_open(&g, model_path, &err), OK);
    assert_int_equal(model_load(&m, g, &o, (struct load_progress){0}, &err), ERR_SETUP);
    assert_non_null(strstr(err.text, "expected attention heads to divide by 3 ranks, found 8"));
    model_unload(&m);
    gguf_close(g);
}

/* ---- the process ------------------------------------------------------------------------- */

struct fleet {
    int world;
    struct wire *wire;
    char endpoint[64];
    pid_t pid[2];
    int shm_fd;
    uint32_t generation;
    struct msg in, out;
    struct msg_loaded loaded[2];
};

static struct fleet fleet; /* large */

static void spawn(int rank, const char *model, uint64_t parent_start, pid_t parent,
                  const char *cpus) {
    char numbers[6][32];
    snprintf(numbers[0], 32, "%d", rank);
    snprintf(numbers[1], 32, "%d", fleet.world);
    snprintf(numbers[2], 32, "%d", (int)parent);
    snprintf(numbers[3], 32, "%" PRIu64, parent_start);
    char *const argv[] = {worker_path,
                          "--rank",
                          numbers[0],
                          "--world",
                          numbers[1],
                          "--model",
                          (char *)(uintptr_t)model,
                          "--device",
                          "cpu",
                          "--context",
                          "1024",
                          "--max-slots",
                          "4",
                          "--max-rows",
                          "64",
                          "--connect",
                          fleet.endpoint,
                          "--incarnation",
                          "9",
                          "--parent-pid",
                          numbers[2],
                          "--parent-start",
                          numbers[3],
                          "--log-level",
                          "error",
                          cpus ? "--cpus" : NULL,
                          (char *)(uintptr_t)cpus,
                          NULL};
    fleet.pid[rank] = fork();
    assert_true(fleet.pid[rank] >= 0);
    if (fleet.pid[rank] == 0) {
        setenv("OCTAVO_COOKIE", "a-cookie", 1);
        execv(worker_path, argv);
        _exit(127);
    }
}

static void fleet_open(int world) {
    static int serial;
    struct err_text err = {0};
    memset(&fleet, 0, sizeof fleet);
    fleet.world = world;
    fleet.shm_fd = -1;
    snprintf(fleet.endpoint, sizeof fleet.endpoint, "ipc://@octavo-test-worker-%d-%d",
             (int)getpid(), serial++);
    if (wire_bind(&fleet.wire, fleet.endpoint, &err) < 0) fail_msg("%s", err.text);
}

static void fleet_close(void) {
    wire_close(fleet.wire);
    if (fleet.shm_fd >= 0) close(fleet.shm_fd);
}

static void expect_exit(int rank, int code) {
    int status;
    assert_int_equal(waitpid(fleet.pid[rank], &status, 0), fleet.pid[rank]);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != code)
        fail_msg("rank %d: expected exit %d, found status %#x", rank, code, (unsigned)status);
}

/* The next message of one of these types (a bit each) from anybody; beats and progress in between
 * are passed over. */
static int await_any(unsigned types) {
    struct wire_peer peer;
    for (;;) {
        int rc = wire_recv(fleet.wire, &peer, &fleet.in, ANSWER_MS);
        if (rc < 0) fail_msg("expected a message of types %#x, found %s", types, err_name(rc));
        if (types & 1u << fleet.in.type) return peer.rank;
        if (fleet.in.type == MSG_FAILED)
            fail_msg("rank %d failed: %s", peer.rank, fleet.in.failed.text);
        assert_true(fleet.in.type == MSG_BEAT || fleet.in.type == MSG_PROGRESS ||
                    (fleet.in.type == MSG_HELLO && fleet.in.hello.device[0])); /* said again */
    }
}

static int await(enum msg_type type) {
    return await_any(1u << type);
}

static void await_all(enum msg_type type) {
    for (unsigned seen = 0; seen != (1u << fleet.world) - 1;) {
        int rank = await(type);
        assert_false(seen & 1u << rank);
        seen |= 1u << rank;
        if (type == MSG_LOADED) fleet.loaded[rank] = fleet.in.loaded;
        if (type == MSG_JOINED) assert_int_equal(fleet.in.joined.generation, fleet.generation);
    }
}

static void say(int rank, char channel) {
    int rc = wire_send(fleet.wire, (struct wire_peer){rank, 9, channel}, &fleet.out);
    if (rc < 0) fail_msg("rank %d: expected to take a message, found %s", rank, err_name(rc));
}

static void say_all(char channel) {
    for (int r = 0; r < fleet.world; r++) say(r, channel);
}

static void join(void) {
    if (fleet.shm_fd >= 0) close(fleet.shm_fd);
    struct msg_join *j = &fleet.out.join;
    fleet.out.type = MSG_JOIN;
    *j = (struct msg_join){.generation = ++fleet.generation,
                           .world = fleet.world,
                           .pages = 16,
                           .shm_bytes = fleet.loaded[0].shm_bytes};
    fleet.shm_fd = memfd_create("octavo-test", MFD_CLOEXEC);
    assert_int_equal(ftruncate(fleet.shm_fd, (off_t)j->shm_bytes), 0);
    snprintf(j->shm_path, sizeof j->shm_path, "/proc/%d/fd/%d", (int)getpid(), fleet.shm_fd);
    say_all('c');
    await_all(MSG_JOINED);
}

static void check_hello(int rank) {
    const struct msg_hello *h = &fleet.in.hello;
    assert_int_equal(h->protocol, MSG_PROTOCOL);
    assert_int_equal(h->limits, limits_digest());
    assert_string_equal(h->cookie, "a-cookie");
    assert_string_equal(h->build, log_build());
    assert_int_equal(h->rank, rank);
    assert_int_equal(h->pid, fleet.pid[rank]);
    assert_int_equal(h->start_time, process_start_time(fleet.pid[rank]));
}

static void start(int world) {
    fleet_open(world);
    for (int r = 0; r < world; r++)
        spawn(r, model_path, process_start_time(getpid()), getpid(), NULL);
    unsigned all = (1u << world) - 1, greeted = 0, named = 0, loaded = 0;
    while (named != all || loaded != all) { /* one may have loaded before another greets */
        int rank = await_any(1u << MSG_HELLO | 1u << MSG_LOADED);
        bool hello = fleet.in.type == MSG_HELLO;
        unsigned *seen = !hello ? &loaded : greeted & 1u << rank ? &named : &greeted;
        assert_false(*seen & 1u << rank);
        *seen |= 1u << rank;
        if (hello) check_hello(rank);
        if (seen == &named) assert_true(fleet.in.hello.device[0] != 0);
        if (!hello) fleet.loaded[rank] = fleet.in.loaded;
        assert_true(greeted & 1u << rank); /* at once, then with the device's name */
        assert_true(named & 1u << rank || !(loaded & 1u << rank));
    }
    join();
}

static void stop(void) {
    fleet.out.type = MSG_STOP;
    say_all('c');
    for (int r = 0; r < fleet.world; r++) expect_exit(r, EXIT_ASKED);
    fleet_close();
}

static void admit(uint32_t slot_generation, int n_prompt) {
    fleet.out.type = MSG_ADMIT;
    fleet.out.admit =
        (struct msg_admit){.slot = 1,
                           .slot_generation = slot_generation,
                           .n_prompt = n_prompt,
                           .sampling = {.top_p = 1, .repetition = 1, .top_logprobs = 2}};
    say_all('s');
}

static void fill_step(uint64_t id, uint32_t slot_generation, int pos, const int32_t *tokens,
                      int count) {
    struct msg_step *s = &fleet.out.step;
    fleet.out.type = MSG_STEP;
    memset(s, 0, sizeof *s);
    s->id = id;
    s->generation = fleet.generation;
    s->n_entries = 1;
    s->entries[0] = (struct msg_entry){.slot = 1,
                                       .slot_generation = slot_generation,
                                       .pos = pos,
                                       .count = count,
                                       .samples = 1,
                                       .token_at = tokens ? 0 : -1,
                                       .n_pages = pos == 0 ? 1 : 0};
    s->n_pages = s->entries[0].n_pages;
    s->pages[0] = 5;
    s->n_tokens = tokens ? count : 0;
    if (tokens) memcpy(s->tokens, tokens, (size_t)count * sizeof *tokens);
}

/* Greedy golden answer of the first case. */
static int32_t prompt[64], answer[64];
static int n_prompt, n_answer;

static void read_golden(void) {
    char path[600];
    const char *source = getenv("OCTAVO_SOURCE_ROOT");
    snprintf(path, sizeof path, "%s/tests/golden/golden.json", source ? source : ".");
    json_t *all = json_load_file(path, JSON_ALLOW_NUL, NULL);
    assert_non_null(all);
    json_t *c = json_array_get(json_object_get(all, "cases"), 0), *ids = json_object_get(c, "ids"),
           *greedy = json_object_get(c, "greedy");
    n_prompt = (int)json_array_size(ids);
    n_answer = (int)json_array_size(greedy);
    assert_true(n_prompt > 0 && n_prompt <= 32 && n_answer > 1 && n_answer <= 32);
    for (int i = 0; i < n_prompt; i++)
        prompt[i] = (int32_t)json_integer_value(json_array_get(ids, (size_t)i));
    for (int i = 0; i < n_answer; i++)
        answer[i] =
            (int32_t)json_integer_value(json_array_get(json_array_get(greedy, (size_t)i), 0));
    json_decref(all);
}

/* All steps are sent before the first is answered: the tokens stay with the workers. */
static void expect_answer(uint64_t first_id, uint32_t slot_generation) {
    admit(slot_generation, n_prompt);
    for (int i = 0; i < n_answer; i++) {
        fill_step(first_id + (uint64_t)i, slot_generation, i == 0 ? 0 : n_prompt + i - 1,
                  i == 0 ? prompt : NULL, i == 0 ? n_prompt : 1);
        say_all('s');
    }
    uint64_t done = 0;
    for (int i = 0; i < n_answer * fleet.world;) {
        struct wire_peer peer;
        int rc = wire_recv(fleet.wire, &peer, &fleet.in, ANSWER_MS);
        if (rc < 0) fail_msg("expected TOKENS or DONE, found %s", err_name(rc));
        if (fleet.in.type == MSG_BEAT) continue;
        i++;
        if (peer.rank == 0) {
            const struct msg_token *t = fleet.in.tokens.tokens;
            assert_int_equal(fleet.in.type, MSG_TOKENS);
            int at = (int)(fleet.in.tokens.step_id - first_id);
            assert_int_equal(fleet.in.tokens.n, 1);
            assert_int_equal(fleet.in.tokens.generation, fleet.generation);
            assert_int_equal(t->token, answer[at]);
            assert_int_equal(t->pos, n_prompt + at);
            assert_int_equal(t->slot_generation, slot_generation);
            assert_int_equal(t->n_top, 2);
            assert_int_equal(t->top_token[0], answer[at]);
        } else {
            assert_int_equal(fleet.in.type, MSG_DONE);
            assert_int_equal(fleet.in.done.step_id, first_id + done++);
        }
    }
}

static void one_rank_answers_as_the_golden_values_say(void **state) {
    UNUSED(state);
    start(1);
    assert_int_equal(fleet.loaded[0].shm_bytes, 0);
    assert_true(fleet.loaded[0].weight_bytes > 20 << 20 && fleet.loaded[0].page_bytes > 0);
    expect_answer(1, 3);
    stop();
}

static void two_ranks_answer_and_ignore_what_a_terminal_sends(void **state) {
    UNUSED(state);
    start(2);
    kill(fleet.pid[0], SIGTERM);
    kill(fleet.pid[1], SIGINT);
    kill(fleet.pid[1], SIGHUP);
    expect_answer(1, 3);
    expect_answer(100, 4);
    stop();
}

static void a_stuck_rank_beats_is_aborted_and_joins_again(void **state) {
    UNUSED(state);
    start(2);
    admit(1, n_prompt);
    fill_step(7, 1, 0, prompt, n_prompt);
    say(0, 's'); /* rank 1 never gets it */
    for (int beats = 0; beats < 2;) {
        int rank = await(MSG_BEAT);
        beats += rank == 0 && fleet.in.beat.state == WORKER_STEPPING;
    }
    fleet.out.type = MSG_ABORT;
    fleet.out.abort.generation = fleet.generation;
    say_all('c');
    await_all(MSG_ABORTED);
    fill_step(8, 1, 0, prompt, n_prompt);
    say_all('s'); /* of the aborted generation: dropped */
    join();
    expect_answer(20, 2);
    stop();
}

static void a_step_that_does_not_fit_ends_the_worker_with_a_sentence(void **state) {
    UNUSED(state);
    start(1);
    admit(1, n_prompt);
    fill_step(7, 2, 0, prompt, n_prompt);
    say(0, 's');
    for (struct wire_peer peer; fleet.in.type != MSG_FAILED;)
        assert_int_equal(wire_recv(fleet.wire, &peer, &fleet.in, ANSWER_MS), OK);
    assert_string_equal(fleet.in.failed.text, "step 7 slot 1: expected generation 2, found 1");
    assert_int_equal(fleet.in.failed.exit_code, EXIT_FAILED);
    expect_exit(0, EXIT_FAILED);
    fleet_close();
}

static void a_wrong_set_up_is_said_and_exits_two(void **state) {
    UNUSED(state);
    fleet_open(1);
    spawn(0, "/nonexistent.gguf", process_start_time(getpid()), getpid(), NULL);
    await(MSG_HELLO);
    for (struct wire_peer peer; fleet.in.type != MSG_FAILED;)
        assert_int_equal(wire_recv(fleet.wire, &peer, &fleet.in, ANSWER_MS), OK);
    assert_non_null(strstr(fleet.in.failed.text, "/nonexistent.gguf"));
    assert_int_equal(fleet.in.failed.exit_code, EXIT_SETUP);
    expect_exit(0, EXIT_SETUP);
    spawn(0, model_path, process_start_time(getpid()), getpid(), "no-list");
    expect_exit(0, EXIT_SETUP);
    fleet_close();
}

static void a_worker_of_another_parent_exits_at_once(void **state) {
    UNUSED(state);
    fleet_open(1);
    spawn(0, model_path, process_start_time(getpid()) + 1, getpid(), NULL);
    expect_exit(0, EXIT_FAILED);
    spawn(0, model_path, process_start_time(getppid()), getppid(), NULL);
    expect_exit(0, EXIT_FAILED);
    fleet_close();
}

static void a_worker_runs_only_on_the_cores_it_was_given(void **state) {
    UNUSED(state);
    cpu_set_t mine, its;
    char list[16];
    int cpu = 0;
    assert_int_equal(sched_getaffinity(0, sizeof mine, &mine), 0);
    for (int i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &mine)) cpu = i;
    snprintf(list, sizeof list, "%d", cpu);
    fleet_open(1);
    spawn(0, model_path, process_start_time(getpid()), getpid(), list);
    await(MSG_HELLO);
    await_all(MSG_LOADED);
    assert_int_equal(sched_getaffinity(fleet.pid[0], sizeof its, &its), 0);
    assert_int_equal(CPU_COUNT(&its), 1);
    assert_true(CPU_ISSET(cpu, &its));
    stop();
}

/* A process between us and the worker is killed; the worker, ours to wait for then, must follow. */
static void a_worker_does_not_survive_its_parent(void **state) {
    UNUSED(state);
    int report[2], status;
    pid_t worker;
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
    assert_int_equal(pipe(report), 0);
    fleet_open(1);
    pid_t between = fork();
    if (between == 0) {
        spawn(0, model_path, process_start_time(getpid()), getpid(), NULL);
        if (write(report[1], &fleet.pid[0], sizeof fleet.pid[0]) < 0) _exit(1);
        for (;;) pause();
    }
    assert_int_equal(read(report[0], &worker, sizeof worker), sizeof worker);
    await(MSG_HELLO);
    await(MSG_LOADED);
    kill(between, SIGKILL);
    assert_int_equal(waitpid(between, &status, 0), between);
    assert_int_equal(waitpid(worker, &status, 0), worker);
    assert_true(WIFSIGNALED(status) || WIFEXITED(status));
    close(report[0]);
    close(report[1]);
    fleet_close();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_demonstration_model_is_read_as_it_is),
        cmocka_unit_test(a_number_out_of_range_is_refused_with_key_expected_found),
        cmocka_unit_test(a_missing_key_is_named),
        cmocka_unit_test(a_missing_tensor_is_named_and_indexer_types_are_checked),
        cmocka_unit_test(a_group_that_does_not_divide_the_model_is_refused),
        cmocka_unit_test(one_rank_answers_as_the_golden_values_say),
        cmocka_unit_test(two_ranks_answer_and_ignore_what_a_terminal_sends),
        cmocka_unit_test(a_stuck_rank_beats_is_aborted_and_joins_again),
        cmocka_unit_test(a_step_that_does_not_fit_ends_the_worker_with_a_sentence),
        cmocka_unit_test(a_wrong_set_up_is_said_and_exits_two),
        cmocka_unit_test(a_worker_of_another_parent_exits_at_once),
        cmocka_unit_test(a_worker_runs_only_on_the_cores_it_was_given),
        cmocka_unit_test(a_worker_does_not_survive_its_parent),
    };
    read_golden();
    return cmocka_run_group_tests(tests, find_paths, NULL);
}
