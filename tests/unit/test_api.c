/* tests/unit/test_api.c: the real HTTP server and API over loopback, in front of a scripted engine:
 * chat, text, and everything that can go wrong between. What only looks is in test_api_look.c.
 *
 *   test_api --serve PORT    serves the script until it is killed, for clients from outside
 */
#include "tests/unit/api_world.h"

/* What the events of a stream say when put together, for one choice index. */
struct told {
    struct http_buf content, reasoning, name, args;
    int n_events, n_finish, n_role, n_done, n_usage, n_error, n_calls, n_logprobs;
    char finish[32];
    char usage[256];
};

static void told_deinit(struct told *t) {
    http_buf_deinit(&t->content);
    http_buf_deinit(&t->reasoning);
    http_buf_deinit(&t->name);
    http_buf_deinit(&t->args);
}

static void add(struct http_buf *b, json_t *v) {
    if (json_is_string(v)) http_buf_puts(b, json_string_value(v));
}

static void hear_choice(struct told *t, json_t *choice) {
    json_t *delta = json_object_get(choice, "delta");
    json_t *finish = json_object_get(choice, "finish_reason");
    assert_int_equal(t->n_finish, 0); /* nothing after the end */
    if (json_object_get(delta, "role")) {
        assert_int_equal(t->content.n + t->reasoning.n, 0);
        t->n_role++;
    }
    add(&t->content, json_object_get(delta, "content"));
    add(&t->content, json_object_get(choice, "text"));
    add(&t->reasoning, json_object_get(delta, "reasoning_content"));
    json_t *call = json_array_get(json_object_get(delta, "tool_calls"), 0);
    json_t *function = json_object_get(call, "function");
    if (json_object_get(call, "id")) t->n_calls++;
    add(&t->name, json_object_get(function, "name"));
    add(&t->args, json_object_get(function, "arguments"));
    json_t *lp = json_object_get(choice, "logprobs");
    t->n_logprobs += (int)json_array_size(json_object_get(lp, "content"));
    t->n_logprobs += (int)json_array_size(json_object_get(lp, "tokens"));
    if (json_is_string(finish)) {
        t->n_finish++;
        snprintf(t->finish, sizeof t->finish, "%s", json_string_value(finish));
    }
}

static void hear_event(struct told *t, int index, json_t *event) {
    json_t *choices = json_object_get(event, "choices");
    json_t *usage = json_object_get(event, "usage");
    assert_int_equal(t->n_done + t->n_error, 0);
    if (json_object_get(event, "error")) {
        t->n_error++;
        return;
    }
    assert_true(json_is_array(choices));
    if (json_is_object(usage)) {
        assert_int_equal(json_array_size(choices), 0);
        t->n_usage++;
        snprintf(t->usage, sizeof t->usage, "%s", str(usage, "completion_tokens"));
    } else {
        assert_int_equal(t->n_usage, 0);
        assert_int_equal(json_array_size(choices), 1);
    }
    json_t *choice = json_array_get(choices, 0);
    if (choice && json_integer_value(json_object_get(choice, "index")) == index)
        hear_choice(t, choice);
}

static void hear(struct told *t, int index, const char *sse) {
    *t = (struct told){0};
    for (const char *end; (end = strstr(sse, "\n\n")); sse = end + 2) {
        assert_memory_equal(sse, "data: ", 6);
        size_t n = (size_t)(end - sse) - 6;
        t->n_events++;
        if (n == 6 && !memcmp(sse + 6, "[DONE]", 6)) {
            t->n_done++;
            continue;
        }
        json_t *event = json_loadb(sse + 6, n, 0, NULL);
        if (!event) fail_msg("expected JSON in an event, found: %.*s", (int)n, sse + 6);
        hear_event(t, index, event);
        json_decref(event);
    }
    assert_int_equal(*sse, 0);
}

static int ask_stream(const char *path, const char *body, int index, struct told *t) {
    struct client c;
    send_new(&c, path, body);
    int status = finish_status(&c);
    char *text = client_body(&c);
    if (status == 200) hear(t, index, text);
    free(text);
    client_close(&c);
    return status;
}

/* ---- chat -------------------------------------------------------------------------------------
 */

static void a_chat_answer_has_every_part(void **state) {
    UNUSED(state);
    json_t *j;
    assert_int_equal(ask(CHAT, "{" HELLO ",\"model\":\"tiny\"}", &j), 200);
    assert_string_equal(str(j, "object"), "chat.completion");
    assert_string_equal(str(j, "model"), "tiny");
    assert_memory_equal(str(j, "id"), "chatcmpl-", 9);
    assert_string_equal(str(j, "choices.0.message.role"), "assistant");
    assert_string_equal(str(j, "choices.0.message.content"), "Paris is the capital.");
    assert_string_equal(str(j, "choices.0.message.reasoning_content"), "Let me think.");
    assert_string_equal(str(j, "choices.0.finish_reason"), "stop");
    char expected[32];
    snprintf(expected, sizeof expected, "%d", engine.n_tokens + 1);
    assert_string_equal(str(j, "usage.completion_tokens"), expected);
    snprintf(expected, sizeof expected, "%d", engine.last_n_prompt);
    assert_string_equal(str(j, "usage.prompt_tokens"), expected);
    assert_string_equal(str(j, "usage.prompt_tokens_details.cached_tokens"), "1");
    assert_string_not_equal(str(j, "usage.completion_tokens_details.reasoning_tokens"), "0");
    json_decref(j);
    assert_int_equal(engine.last_max_tokens, 4096 - engine.last_n_prompt);
}

static void a_chat_stream_says_the_same_as_the_whole_answer(void **state) {
    UNUSED(state);
    struct told t;
    assert_int_equal(ask_stream(CHAT, "{" HELLO ",\"stream\":true}", 0, &t), 200);
    assert_string_equal(t.content.p, "Paris is the capital.");
    assert_string_equal(t.reasoning.p, "Let me think.");
    assert_string_equal(t.finish, "stop");
    assert_int_equal(t.n_role, 1);
    assert_int_equal(t.n_finish, 1);
    assert_int_equal(t.n_done, 1);
    assert_int_equal(t.n_usage, 0);
    told_deinit(&t);
}

static void usage_is_the_last_event_before_done(void **state) {
    UNUSED(state);
    struct told t;
    assert_int_equal(ask_stream(CHAT,
                                "{" HELLO ",\"stream\":true,\"n\":2,"
                                "\"stream_options\":{\"include_usage\":true}}",
                                1, &t),
                     200);
    assert_int_equal(t.n_usage, 1);
    assert_int_equal(t.n_done, 1);
    char expected[32];
    snprintf(expected, sizeof expected, "%d", 2 * (engine.n_tokens + 1));
    assert_string_equal(t.usage, expected);
    told_deinit(&t);
}

static void every_choice_ends_once_and_has_its_own_seed(void **state) {
    UNUSED(state);
    for (int i = 0; i < 3; i++) {
        struct told t;
        assert_int_equal(ask_stream(CHAT, "{" HELLO ",\"stream\":true,\"n\":3,\"seed\":40}", i, &t),
                         200);
        assert_int_equal(t.n_finish, 1);
        assert_int_equal(t.n_role, 1);
        assert_string_equal(t.content.p, "Paris is the capital.");
        told_deinit(&t);
        assert_int_equal(engine.last_sampling.seed, 42);
    }
    json_t *j;
    assert_int_equal(ask(CHAT, "{" HELLO ",\"n\":3}", &j), 200);
    assert_int_equal(json_array_size(json_object_get(j, "choices")), 3);
    assert_string_equal(str(j, "choices.2.index"), "2");
    assert_string_equal(str(j, "choices.2.message.content"), "Paris is the capital.");
    json_decref(j);
}

static void a_stop_string_is_never_shown(void **state) {
    UNUSED(state);
    struct told t;
    assert_int_equal(ask_stream(CHAT, "{" HELLO ",\"stream\":true,\"stop\":[\"the cap\"]}", 0, &t),
                     200);
    assert_string_equal(t.content.p, "Paris is ");
    assert_string_equal(t.finish, "stop");
    told_deinit(&t);
    json_t *j;
    assert_int_equal(ask(CHAT, "{" HELLO ",\"stop\":\"the cap\"}", &j), 200);
    assert_string_equal(str(j, "choices.0.message.content"), "Paris is ");
    json_decref(j);
}

static void the_length_limit_is_told(void **state) {
    UNUSED(state);
    json_t *j;
    assert_int_equal(ask(CHAT, "{" HELLO ",\"max_completion_tokens\":2}", &j), 200);
    assert_string_equal(str(j, "choices.0.finish_reason"), "length");
    assert_string_equal(str(j, "usage.completion_tokens"), "2");
    assert_string_equal(str(j, "choices.0.message.content"), "");
    json_decref(j);
}

#define TOOLS                                                                                      \
    ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"get_weather\",\"parameters\":"    \
    "{\"type\":\"object\",\"properties\":{\"city\":{\"type\":\"string\"},\"days\":"                \
    "{\"type\":\"integer\"}}}}}]"

static void tool_calls_come_out_whole_and_in_pieces(void **state) {
    UNUSED(state);
    say("Need it.</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
        "<tool_call>get_weather</tool_call>");
    json_t *j;
    assert_int_equal(ask(CHAT, "{" HELLO TOOLS "}", &j), 200);
    assert_string_equal(str(j, "choices.0.finish_reason"), "tool_calls");
    assert_string_equal(str(j, "choices.0.message.content"), "(null)");
    assert_string_equal(str(j, "choices.0.message.tool_calls.0.function.name"), "get_weather");
    json_t *args = json_loads(str(j, "choices.0.message.tool_calls.0.function.arguments"), 0, NULL);
    assert_string_equal(str(args, "city"), "Oslo");
    assert_string_equal(str(args, "days"), "3");
    json_decref(args);
    assert_string_equal(str(j, "choices.0.message.tool_calls.1.function.arguments"), "{}");
    assert_memory_equal(str(j, "choices.0.message.tool_calls.1.id"), "call_", 5);
    json_decref(j);

    struct told t;
    assert_int_equal(ask_stream(CHAT, "{" HELLO TOOLS ",\"stream\":true}", 0, &t), 200);
    assert_string_equal(t.finish, "tool_calls");
    assert_int_equal(t.n_calls, 2);
    assert_string_equal(t.name.p, "get_weatherget_weather");
    assert_non_null(strstr(t.args.p, "Oslo"));
    assert_string_equal(t.args.p + t.args.n - 2, "{}");
    told_deinit(&t);

    assert_int_equal(ask(CHAT, "{" HELLO TOOLS ",\"tool_choice\":\"none\"}", &j), 200);
    assert_string_equal(str(j, "choices.0.finish_reason"), "stop");
    json_decref(j);
}

static void log_probabilities_have_the_chat_shape(void **state) {
    UNUSED(state);
    json_t *j;
    assert_int_equal(ask(CHAT, "{" HELLO ",\"logprobs\":true,\"top_logprobs\":5}", &j), 200);
    json_t *list = json_object_get(
        json_object_get(json_array_get(json_object_get(j, "choices"), 0), "logprobs"), "content");
    assert_int_equal(json_array_size(list), engine.n_tokens);
    json_t *first = json_array_get(list, 0);
    assert_string_equal(str(first, "logprob"), "-0.5");
    assert_true(json_is_array(json_object_get(first, "bytes")));
    assert_int_equal(json_array_size(json_object_get(first, "top_logprobs")), 5);
    assert_string_equal(str(first, "top_logprobs.4.logprob"), "-9999");
    json_decref(j);
    assert_int_equal(ask(CHAT, "{" HELLO ",\"logprobs\":true}", &j), 200);
    assert_string_equal(str(j, "choices.0.logprobs.content.0.top_logprobs.0"), "(absent)");
    json_decref(j);
    struct told t;
    assert_int_equal(ask_stream(CHAT, "{" HELLO ",\"logprobs\":true,\"stream\":true}", 0, &t), 200);
    assert_int_equal(t.n_logprobs, engine.n_tokens);
    told_deinit(&t);
}

static void thinking_can_be_switched_off(void **state) {
    UNUSED(state);
    say("Paris.");
    json_t *j;
    assert_int_equal(
        ask(CHAT, "{" HELLO ",\"chat_template_kwargs\":{\"enable_thinking\":false}}", &j), 200);
    assert_string_equal(str(j, "choices.0.message.content"), "Paris.");
    assert_string_equal(str(j, "choices.0.message.reasoning_content"), "(absent)");
    json_decref(j);
}

/* ---- text -------------------------------------------------------------------------------------
 */

static void prompts_times_n_choices_come_in_order(void **state) {
    UNUSED(state);
    say(" world");
    json_t *j;
    assert_int_equal(
        ask("/v1/completions", "{\"prompt\":[\"one\",\"two\"],\"n\":2,\"echo\":true}", &j), 200);
    assert_string_equal(str(j, "object"), "text_completion");
    assert_string_equal(str(j, "choices.1.text"), "one world");
    assert_string_equal(str(j, "choices.2.text"), "two world");
    assert_string_equal(str(j, "choices.3.index"), "3");
    json_decref(j);
    assert_int_equal(engine.last_prompt[0], tok_added(tok, "[gMASK]"));
    assert_int_equal(engine.last_prompt[1], tok_added(tok, "<sop>"));
    int32_t n = engine.last_n_prompt;
    assert_int_equal(ask("/v1/completions", "{\"prompt\":\"[gMASK]<sop>two\"}", NULL), 200);
    assert_int_equal(engine.last_n_prompt, n);
    assert_int_equal(
        ask("/v1/completions", "{\"prompt\":\"two\",\"add_special_tokens\":false}", NULL), 200);
    assert_int_equal(engine.last_n_prompt, n - 2);
    assert_int_equal(ask("/v1/completions", "{\"prompt\":[[5,6],[7,8,9]],\"max_tokens\":1}", &j),
                     200);
    assert_string_equal(str(j, "usage.prompt_tokens"), "5");
    json_decref(j);
    assert_int_equal(engine.last_n_prompt, 3);
}

static void text_log_probabilities_have_the_older_shape(void **state) {
    UNUSED(state);
    json_t *j;
    assert_int_equal(ask("/v1/completions", "{\"prompt\":\"x\",\"logprobs\":2}", &j), 200);
    json_t *lp = json_object_get(json_array_get(json_object_get(j, "choices"), 0), "logprobs");
    static const char *const lists[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};
    for (size_t i = 0; i < ARRAY_LEN(lists); i++)
        assert_int_equal(json_array_size(json_object_get(lp, lists[i])), engine.n_tokens);
    assert_true(json_object_size(json_array_get(json_object_get(lp, "top_logprobs"), 0)) >= 2);
    assert_string_equal(str(lp, "text_offset.0"), "0");
    json_decref(j);
    struct told t;
    assert_int_equal(
        ask_stream("/v1/completions", "{\"prompt\":\"x\",\"logprobs\":1,\"stream\":true}", 0, &t),
        200);
    assert_int_equal(t.n_logprobs, engine.n_tokens);
    assert_int_equal(t.n_finish, 1);
    told_deinit(&t);
}

/* ---- faults -----------------------------------------------------------------------------------
 */

static void bad_requests_name_the_field(void **state) {
    UNUSED(state);
    expect_error(CHAT, "{" HELLO ",\"model\":\"gpt\"}", 404, "model", "model_not_found");
    expect_error(CHAT, "{" HELLO ",\"max_tokens\":0}", 400, "max_tokens", "(null)");
    expect_error(CHAT, "{\"messages\":[]}", 400, "messages", "(null)");
    expect_error(CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":5}]}", 400, "messages",
                 "(null)");
    expect_error(CHAT, "{" HELLO ",\"logit_bias\":{\"99999999\":1}}", 400, "logit_bias", "(null)");
    expect_error(CHAT, "{", 400, "(null)", "(null)");
    expect_error(CHAT, " ", 400, "(null)", "(null)");
    expect_error("/v1/completions", "{}", 400, "prompt", "(null)");
    assert_int_equal(engine.n_submitted, 0);
}

static void a_prompt_too_long_for_the_cache_is_told_the_size_of_the_cache(void **state) {
    UNUSED(state);
    json_t *j;
    engine.submit_rc = ERR_LIMIT;
    assert_int_equal(ask(CHAT, "{" HELLO "}", &j), 400);
    assert_string_equal(str(j, "error.code"), "context_length_exceeded");
    assert_string_equal(str(j, "error.param"), "messages");
    assert_non_null(strstr(str(j, "error.message"), "holds 192 tokens"));
    json_decref(j);
}

/* {"prompt": […n ids…]} */
static char *prompt_of(size_t n) {
    struct http_buf b = {0};
    http_buf_puts(&b, "{\"max_tokens\":1,\"prompt\":[5");
    for (size_t i = 1; i < n; i++) http_buf_puts(&b, ",5");
    http_buf_puts(&b, "]}");
    return b.p;
}

static void a_prompt_that_leaves_no_room_is_refused_with_both_counts(void **state) {
    UNUSED(state);
    char *body = prompt_of(4095);
    assert_int_equal(ask("/v1/completions", body, NULL), 200);
    free(body);
    for (size_t n = 4096; n < 50000; n *= 10) {
        body = prompt_of(n);
        json_t *j;
        assert_int_equal(ask("/v1/completions", body, &j), 400);
        assert_string_equal(str(j, "error.code"), "context_length_exceeded");
        char count[32];
        snprintf(count, sizeof count, "%zu", n);
        assert_non_null(strstr(str(j, "error.message"), count));
        assert_non_null(strstr(str(j, "error.message"), "4096"));
        json_decref(j);
        free(body);
    }
}

static void a_full_queue_says_when_to_come_back(void **state) {
    UNUSED(state);
    engine.submit_rc = ERR_FULL;
    engine.submit_rc_after = 2; /* the third choice is refused, the first two are taken back */
    struct client c;
    send_new(&c, CHAT, "{" HELLO ",\"n\":3}");
    assert_int_equal(finish_status(&c), 503);
    assert_true(client_has(&c, "Retry-After: 7\r\n"));
    assert_int_equal(engine.n_cancelled, 2);
    client_close(&c);
}

static void an_engine_error_is_a_status_before_and_an_event_after_the_first_token(void **state) {
    UNUSED(state);
    engine.error_at = 0;
    expect_error(CHAT, "{" HELLO ",\"stream\":true,\"n\":2}", 500, "(null)", "(null)");
    assert_int_equal(engine.n_cancelled, 1);
    engine.error_at = 3;
    expect_error(CHAT, "{" HELLO "}", 500, "(null)", "(null)");
    struct told t;
    assert_int_equal(ask_stream(CHAT, "{" HELLO ",\"stream\":true,\"n\":2}", 0, &t), 200);
    assert_int_equal(t.n_error, 1);
    assert_int_equal(t.n_done, 0);
    assert_int_equal(t.n_finish, 0);
    told_deinit(&t);
    engine.state = ENGINE_FAILED;
    expect_error(CHAT, "{" HELLO "}", 503, "(null)", "(null)");
}

static void draining_refuses_the_new_and_finishes_the_old(void **state) {
    UNUSED(state);
    struct client c;
    send_new(&c, CHAT, "{" HELLO ",\"stream\":true}");
    CLIENT_WAIT(&c, engine.n_submitted == 1);
    fake_tick(&engine);
    api_drain(api);
    expect_error(CHAT, "{" HELLO "}", 503, "(null)", "draining");
    assert_int_equal(ask("/health/ready", "", NULL), 503);
    assert_int_equal(ask("/health/live", "", NULL), 200);
    assert_int_equal(finish_status(&c), 200);
    char *text = client_body(&c);
    struct told t;
    hear(&t, 0, text);
    assert_int_equal(t.n_done, 1);
    told_deinit(&t);
    free(text);
    CLIENT_WAIT(&c, c.eof);
    client_close(&c);
}

/* A body long enough to be prepared on a pool thread. */
static char *long_chat(bool stream) {
    struct http_buf b = {0};
    http_buf_printf(&b, "{\"stream\":%s,\"n\":2,\"messages\":[{\"role\":\"user\",\"content\":\"",
                    stream ? "true" : "false");
    for (int i = 0; i < 1750; i++) http_buf_puts(&b, "word ");
    http_buf_puts(&b, "\"}]}");
    return b.p;
}

static void a_client_that_leaves_is_cancelled_at_every_stage(void **state) {
    UNUSED(state);
    char *body = long_chat(true);
    for (int stage = 0; stage < 40; stage++) {
        struct client c;
        send_new(&c, CHAT, body);
        for (int i = 0; i < stage; i++) {
            uv_run(&loop, UV_RUN_NOWAIT);
            if (i % 2 && i > 5) fake_tick(&engine);
        }
        stage % 3 ? client_close(&c) : client_reset(&c);
    }
    struct client nobody = {.fd = -1, .loop = &loop, .eof = true};
    CLIENT_WAIT(&nobody, !api_in_progress(api) && !http_connections(api->http));
    assert_int_equal(fake_living(&engine), 0);
    assert_int_equal(engine.n_cancelled + engine.n_finished, engine.n_submitted);
    free(body);
    assert_int_equal(ask(CHAT, "{" HELLO "}", NULL), 200);
}

static void long_prompts_are_prepared_on_the_pool_and_answered(void **state) {
    UNUSED(state);
    char *body = long_chat(false);
    json_t *j;
    assert_int_equal(ask(CHAT, body, &j), 200);
    assert_string_equal(str(j, "choices.1.message.content"), "Paris is the capital.");
    json_decref(j);
    free(body);
}

static void stopping_with_requests_on_the_pool_and_in_the_engine_frees_all(void **state) {
    UNUSED(state);
    struct client c[4];
    char *body = long_chat(true);
    for (int i = 0; i < 4; i++) {
        send_new(&c[i], CHAT, i < 2 ? body : "{" HELLO ",\"stream\":true}");
        CLIENT_WAIT(&c[i], api_in_progress(api) == i + 1);
    }
    fake_tick(&engine);
    free(body);
    for (int i = 0; i < 4; i++) client_close(&c[i]);
    /* the teardown stops the api */
}

static void a_slow_reader_is_cancelled_and_others_go_on(void **state) {
    UNUSED(state);
    struct client slow;
    client_open(&slow, &loop, api_port(api));
    int small = 4096;
    setsockopt(slow.fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    send_to(&slow, "POST", CHAT,
            "{" HELLO ",\"stream\":true,\"ignore_eos\":true,\"logprobs\":true,\"top_logprobs\":20,"
            "\"n\":32}");
    for (int i = 0; i < 4000 && !engine.n_cancelled; i++) {
        uv_run(&loop, UV_RUN_NOWAIT);
        fake_tick(&engine);
    }
    assert_int_equal(engine.n_cancelled, 32);
    assert_int_equal(ask(CHAT, "{" HELLO "}", NULL), 200);
    client_close(&slow);
}

static void a_quiet_stream_says_that_it_lives(void **state) {
    UNUSED(state);
    struct client c;
    send_new(&c, CHAT, "{" HELLO ",\"stream\":true}");
    CLIENT_WAIT(&c, engine.n_submitted == 1);
    api_beat(api);
    uv_run(&loop, UV_RUN_NOWAIT);
    assert_int_equal(c.in.n, 0);
    ((struct api_job *)api->works)->written_ms -= LIMIT_QUIET_SECONDS * 1000;
    api_beat(api);
    CLIENT_WAIT(&c, client_has(&c, "\r\n\r\nb\r\n: waiting\n\n\r\n"));
    engine.error_at = 0; /* a status can no longer say it */
    assert_int_equal(finish_status(&c), 200);
    assert_true(client_has(&c, "data: {\"error\":{\"message\":\"worker/3 died"));
    client_close(&c);
}

/* ---- for clients from outside -----------------------------------------------------------------
 */

static void on_tick(uv_timer_t *t) {
    UNUSED(t);
    fake_tick(&engine);
}

static int serve(int port) {
    uv_timer_t timer;
    if (open_model(NULL) || start_api(port)) return 1;
    uv_timer_init(&loop, &timer);
    uv_timer_start(&timer, on_tick, 1, 1);
    const char *text = getenv("FAKE_SAYS");
    if (text) say(text);
    printf("%d\n", api_port(api));
    fflush(stdout);
    return uv_run(&loop, UV_RUN_DEFAULT);
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "--serve")) return serve(atoi(argv[2]));
    const struct CMUnitTest tests[] = {
        API_TEST(a_chat_answer_has_every_part),
        API_TEST(a_chat_stream_says_the_same_as_the_whole_answer),
        API_TEST(usage_is_the_last_event_before_done),
        API_TEST(every_choice_ends_once_and_has_its_own_seed),
        API_TEST(a_stop_string_is_never_shown),
        API_TEST(the_length_limit_is_told),
        API_TEST(tool_calls_come_out_whole_and_in_pieces),
        API_TEST(log_probabilities_have_the_chat_shape),
        API_TEST(thinking_can_be_switched_off),
        API_TEST(prompts_times_n_choices_come_in_order),
        API_TEST(text_log_probabilities_have_the_older_shape),
        API_TEST(bad_requests_name_the_field),
        API_TEST(a_prompt_too_long_for_the_cache_is_told_the_size_of_the_cache),
        API_TEST(a_prompt_that_leaves_no_room_is_refused_with_both_counts),
        API_TEST(a_full_queue_says_when_to_come_back),
        API_TEST(an_engine_error_is_a_status_before_and_an_event_after_the_first_token),
        API_TEST(draining_refuses_the_new_and_finishes_the_old),
        API_TEST(a_client_that_leaves_is_cancelled_at_every_stage),
        API_TEST(long_prompts_are_prepared_on_the_pool_and_answered),
        API_TEST(stopping_with_requests_on_the_pool_and_in_the_engine_frees_all),
        API_TEST(a_slow_reader_is_cancelled_and_others_go_on),
        API_TEST(a_quiet_stream_says_that_it_lives),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}
