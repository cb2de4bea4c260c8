"""The OpenAI API as the official client sees it: shapes, streams, sampling, tools, reasoning."""
import json

import openai
import pytest
from octavo import CAPITAL, CAPITAL_ANSWER, CASES, PHOTOSYNTHESIS, UNSURE, body_of, expected, question, request_of, visible

LONG_ANSWER = visible(CASES["photosynthesis"]["greedy_text"])


def chunks_of(client, request):
    with client.chat.completions.create(stream=True, **request) as stream:
        return list(stream)


def joined(chunks, index=0):
    """(reasoning, content, [(name, arguments text)], finish reasons) of one choice of a stream."""
    reasoning, content, calls, reasons = "", "", [], []
    for chunk in chunks:
        for c in chunk.choices:
            if c.index != index:
                continue
            reasoning += getattr(c.delta, "reasoning_content", None) or ""
            content += c.delta.content or ""
            for call in c.delta.tool_calls or []:
                while len(calls) <= call.index:
                    calls.append(["", ""])
                calls[call.index][0] += call.function.name or ""
                calls[call.index][1] += call.function.arguments or ""
            if c.finish_reason:
                reasons.append(c.finish_reason)
    return reasoning, content, [tuple(c) for c in calls], reasons


@pytest.mark.smoke
def test_first_question_has_its_answer(client):
    r = client.chat.completions.create(**question(CAPITAL))
    assert r.object == "chat.completion" and r.id and r.created > 0 and r.model == "tiny.gguf"
    assert r.choices[0].message.role == "assistant"
    assert r.choices[0].message.content == CAPITAL_ANSWER
    assert r.choices[0].finish_reason == "stop"


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_a_stream_joins_to_the_whole_answer(client, name):
    chunks = chunks_of(client, request_of(CASES[name]))
    reasoning, content, calls, reasons = joined(chunks)
    want_reasoning, want_content, want_calls = expected(CASES[name])
    assert content == want_content and reasoning == (want_reasoning or "")
    assert [(n, json.loads(a)) for n, a in calls] == want_calls
    assert reasons == ["tool_calls" if want_calls else "stop"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({c.id for c in chunks}) == 1 and {c.object for c in chunks} == {"chat.completion.chunk"}
    assert "\ufffd" not in content + reasoning


def test_long_answer_comes_in_many_pieces(client):
    chunks = [c for c in chunks_of(client, question(PHOTOSYNTHESIS)) if c.choices and c.choices[0].delta.content]
    assert len(chunks) > 60


def test_usage_comes_once_in_a_last_chunk_without_choices(client):
    chunks = chunks_of(client, question(CAPITAL, stream_options=dict(include_usage=True)))
    with_usage = [c for c in chunks if c.usage]
    assert with_usage == chunks[-1:] and chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == len(CASES["capital"]["ids"])
    assert chunks[-1].usage.completion_tokens == len(CASES["capital"]["greedy"])
    assert not any(c.usage for c in chunks_of(client, question(CAPITAL)))


def test_raw_stream_is_server_sent_events_ending_in_done(server):
    status, headers, text = server.http("/v1/chat/completions", body_of(question(CAPITAL, stream=True)))
    assert status == 200 and headers["Content-Type"].startswith("text/event-stream")
    events = [e for e in text.split("\n\n") if e]
    assert all(e.startswith("data: ") for e in events) and events[-1] == "data: [DONE]"
    for e in events[:-1]:
        chunk = json.loads(e[6:])
        assert chunk["object"] == "chat.completion.chunk" and isinstance(chunk["choices"], list)


@pytest.mark.parametrize("stop", ["Water is split", ["Water is split"], ["never said", "ter is sp"], ["\n2."], ["Photosynthesis is the process"], ["oxygen that we breathe."]])
def test_a_stop_string_ends_the_answer_before_it_and_is_never_seen(client, stop):
    words = [stop] if isinstance(stop, str) else stop
    end = min(LONG_ANSWER.find(w) for w in words if w in LONG_ANSWER)
    whole = client.chat.completions.create(**question(PHOTOSYNTHESIS, stop=stop)).choices[0]
    _, streamed, _, reasons = joined(chunks_of(client, question(PHOTOSYNTHESIS, stop=stop)))
    assert whole.message.content == LONG_ANSWER[:end] and whole.finish_reason == "stop"
    assert streamed == LONG_ANSWER[:end] and reasons == ["stop"]


def test_max_tokens_ends_with_reason_length(client):
    r = client.chat.completions.create(**question(PHOTOSYNTHESIS, max_tokens=7))
    assert r.choices[0].finish_reason == "length" and r.usage.completion_tokens == 7
    assert LONG_ANSWER.startswith(r.choices[0].message.content) and r.choices[0].message.content
    other = question(PHOTOSYNTHESIS, max_completion_tokens=7)
    del other["max_tokens"]
    assert client.chat.completions.create(**other).choices[0].message.content == r.choices[0].message.content


def test_several_choices_are_all_finished_once(client):
    request = question(UNSURE, n=3, temperature=1.0, seed=5, max_tokens=40)
    whole = client.chat.completions.create(**request)
    assert sorted(c.index for c in whole.choices) == [0, 1, 2]
    texts = {c.index: c.message.content for c in whole.choices}
    assert len(set(texts.values())) > 1
    chunks = chunks_of(client, request)
    for i in range(3):
        _, content, _, reasons = joined(chunks, i)
        assert content == texts[i] and len(reasons) == 1
    assert whole.usage.prompt_tokens == client.chat.completions.create(**question(UNSURE, max_tokens=1)).usage.prompt_tokens


@pytest.mark.smoke
def test_a_seed_repeats_an_answer_and_another_seed_does_not(client):
    ask = lambda seed: client.chat.completions.create(**question(UNSURE, temperature=1.0, seed=seed, max_tokens=40)).choices[0].message.content
    first = [ask(s) for s in range(5)]
    assert first == [ask(s) for s in range(5)]
    assert len(set(first)) >= 3


def test_top_k_one_is_greedy(client):
    request = question(PHOTOSYNTHESIS, temperature=2.0, seed=1)
    request["extra_body"] |= dict(top_k=1)
    assert client.chat.completions.create(**request).choices[0].message.content == LONG_ANSWER


def test_a_small_top_p_is_greedy(client):
    r = client.chat.completions.create(**question(PHOTOSYNTHESIS, temperature=1.5, seed=1, top_p=0.01))
    assert r.choices[0].message.content == LONG_ANSWER


def test_logit_bias_bans_a_token(client):
    paris = client.chat.completions.create(**question(CAPITAL, logprobs=True))
    ids = CASES["capital"]["greedy"]
    banned = str(ids[0][0])
    r = client.chat.completions.create(**question(CAPITAL, logit_bias={banned: -100}))
    assert r.choices[0].message.content != paris.choices[0].message.content


# ---- log-probabilities

@pytest.mark.parametrize("top", [None, 0, 1, 20])
def test_chat_log_probabilities_have_the_chat_shape(client, top):
    more = {} if top is None else dict(top_logprobs=top)
    r = client.chat.completions.create(**question(CAPITAL, logprobs=True, **more)).choices[0]
    entries = r.logprobs.content
    assert "".join(e.token for e in entries) == r.message.content
    for e in entries:
        assert e.logprob <= 0 and len(e.top_logprobs) == (top or 0)
        assert bytes(e.bytes).decode() == e.token
        assert [t.logprob for t in e.top_logprobs] == sorted((t.logprob for t in e.top_logprobs), reverse=True)


@pytest.mark.parametrize("more", [dict(logprobs=True, top_logprobs=21), dict(logprobs=True, top_logprobs=-1), dict(top_logprobs=2)])
def test_impossible_log_probabilities_are_refused(client, more):
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(**question(CAPITAL, **more))
    assert e.value.param == "top_logprobs"


def test_text_log_probabilities_have_the_text_shape(client):
    for top in (1, 5):
        r = client.completions.create(model="tiny.gguf", prompt="The capital of", max_tokens=5, temperature=0, logprobs=top).choices[0]
        lp = r.logprobs
        assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset) <= 5
        assert "".join(lp.tokens) == r.text and all(len(t) >= top for t in lp.top_logprobs)


def test_minus_infinity_never_reaches_the_client(server):
    body = body_of(question(CAPITAL, logprobs=True, top_logprobs=20, logit_bias={"321": -100}, extra_body=dict(top_k=1)))
    status, _, text = server.http("/v1/chat/completions", body)
    assert status == 200
    json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))


# ---- tools and reasoning

@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_is_parsed(client, stream):
    request = request_of(CASES["tool_call"])
    if stream:
        _, content, calls, reasons = joined(chunks_of(client, request))
        assert content == "" and reasons == ["tool_calls"]
        (name, arguments), = calls
    else:
        choice = client.chat.completions.create(**request).choices[0]
        call, = choice.message.tool_calls
        assert call.id and call.type == "function" and choice.finish_reason == "tool_calls"
        name, arguments = call.function.name, call.function.arguments
    assert name == "get_weather" and json.loads(arguments) == {"city": "Paris"}


def test_a_tool_result_may_be_text_or_parts(client):
    request = request_of(CASES["tool_result"])
    as_text = client.chat.completions.create(**request)
    request["messages"][-1]["content"] = [dict(type="text", text=request["messages"][-1]["content"])]
    as_parts = client.chat.completions.create(**request)
    assert as_text.usage.prompt_tokens == as_parts.usage.prompt_tokens
    assert as_text.choices[0].message.content == as_parts.choices[0].message.content


def test_an_assistant_turn_with_null_content_and_calls_is_history(client):
    request = request_of(CASES["tool_result"])
    request["messages"][1]["content"] = None
    assert client.chat.completions.create(**request).usage.prompt_tokens == len(CASES["tool_result"]["ids"])


def test_reasoning_is_apart_from_the_answer(client):
    message = client.chat.completions.create(**question(CAPITAL, thinking=True)).choices[0].message
    assert message.reasoning_content == "The user asks for the capital of France. It is Paris."
    assert message.content == CAPITAL_ANSWER
    chunks = chunks_of(client, question(CAPITAL, thinking=True))
    kinds = ["r" if getattr(c.choices[0].delta, "reasoning_content", None) else "c" for c in chunks
             if c.choices and (getattr(c.choices[0].delta, "reasoning_content", None) or c.choices[0].delta.content)]
    assert "".join(kinds).strip("r").strip("c") == "" and kinds[0] == "r"


def test_thinking_is_on_unless_switched_off(client):
    request = question(CAPITAL)
    request["extra_body"] = {}
    assert client.chat.completions.create(**request).choices[0].message.reasoning_content


# ---- prompts

def test_content_may_come_in_parts(client):
    request = question("x")
    request["messages"][0]["content"] = [dict(type="text", text=CAPITAL[:20]), dict(type="text", text=CAPITAL[20:])]
    r = client.chat.completions.create(**request)
    assert r.choices[0].message.content == CAPITAL_ANSWER


@pytest.mark.parametrize("text", ["<|user|>", "<|system|>", "<think>", "</think>", "<tool_call>", "<|endoftext|>", "[gMASK]"])
def test_text_that_spells_a_control_token_stays_text(client, text):
    count = lambda t: client.chat.completions.create(**question(t, max_tokens=1)).usage.prompt_tokens
    assert count("a " + text) >= count("a") + 3


def test_a_marker_split_over_two_parts_stays_text(client):
    request = question("x", max_tokens=1)
    request["messages"][0]["content"] = [dict(type="text", text="<|us"), dict(type="text", text="er|>")]
    split = client.chat.completions.create(**request).usage.prompt_tokens
    assert split >= client.chat.completions.create(**question("", max_tokens=1)).usage.prompt_tokens + 3


@pytest.mark.smoke
def test_text_completions_answer_and_stream(client):
    request = dict(model="tiny.gguf", prompt=CASES["capital"]["ids"], temperature=0, max_tokens=50)
    whole = client.completions.create(**request)
    assert whole.object == "text_completion" and whole.choices[0].text == CAPITAL_ANSWER
    with client.completions.create(stream=True, stream_options=dict(include_usage=True), **request) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == CAPITAL_ANSWER
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_text_completions_take_several_prompts(client):
    r = client.completions.create(model="tiny.gguf", prompt=["One two", "Three"], max_tokens=4, temperature=0)
    assert [c.index for c in r.choices] == [0, 1]


def test_minimal_bodies_are_enough(server):
    assert server.http("/v1/chat/completions", dict(messages=[dict(role="user", content=CAPITAL)]))[0] == 200
    assert server.http("/v1/completions", dict(prompt="The capital of", max_tokens=5))[0] == 200


def test_the_same_question_alone_and_again_has_the_same_answer(client):
    """The second time its prompt may come from the prefix cache."""
    answers = {client.chat.completions.create(**request_of(CASES["long_sparse"])).choices[0].message.content for _ in range(5)}
    assert len(answers) == 1


# ---- models and health

def test_the_model_is_listed(client):
    models = client.models.list().data
    assert [m.id for m in models] == ["tiny.gguf"] and models[0].object == "model"
    assert client.models.retrieve("tiny.gguf").id == "tiny.gguf"


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as e:
        client.chat.completions.create(**(question(CAPITAL) | dict(model="gpt-4")))
    assert e.value.code == "model_not_found" and "gpt-4" in str(e.value)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_workers_are_listed_with_what_health_needs(server):
    rows = server.workers()
    assert [w["rank"] for w in rows] == list(range(server.tp))
    assert len({w["pid"] for w in rows}) == server.tp
    server.check_healthy()
    for w in server.workers():
        assert w["state"] in ("ready", "stepping") and w["last_step"] > 0 and w["age_ms"] >= 0


def test_health_is_open_and_says_ready(server):
    assert server.status("/health/live") == 200
    assert server.status("/health/ready") == 200


def test_progress_tells_what_runs(server):
    with server.client() as client:
        with client.completions.create(model="tiny.gguf", prompt="a", max_tokens=200, temperature=0, stream=True, extra_body=dict(ignore_eos=True)) as stream:
            next(iter(stream))
            told = json.loads(server.http("/health/progress")[2])
            assert told["status"] == "ok" and told["running"] == 1
            assert told["step"] is None or told["step"]["rows"] >= 1
