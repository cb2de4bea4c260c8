"""A bad request dies alone: each is answered with a 4xx and an error object, and the server goes on."""
import json

import pytest
from octavo import CAPITAL, question

MESSAGES = [dict(role="user", content=CAPITAL)]


def chat(server, **body):
    return server.http("/v1/chat/completions", body, timeout=60)


def check_error(answer, status=400, param=None):
    """One shape for every refusal."""
    code, headers, text = answer
    assert code == status, f"expected status {status}, found {code}: {text[:300]}"
    error = json.loads(text)["error"]
    assert set(error) >= {"message", "type", "param", "code"} and error["message"], error
    if param:
        assert error["param"] and error["param"].startswith(param), error
    return error


@pytest.fixture(autouse=True)
def server_goes_on(server):
    yield
    server.check_healthy()


@pytest.mark.smoke
@pytest.mark.parametrize("value", [None, 0, 1, -1, 2**31, 2**63, 1e3, "8", 1.5, [], {}, True], ids=repr)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_odd_max_tokens_are_answered_or_refused(server, path, value):
    body = dict(messages=MESSAGES) if path.startswith("chat") else dict(prompt="The capital of")
    answer = server.http(f"/v1/{path}", body | dict(max_tokens=value, temperature=0), timeout=60)
    usable = value is None or value == 1 and value is not True or value == 1e3
    if usable:
        assert answer[0] == 200, answer
    elif answer[0] != 200 or isinstance(value, (str, list, dict, bool)) or value in (-1, 1.5):
        # 2^63 is no number that the JSON reader holds: the refusal is about the body.
        check_error(answer, 400, None if value == 2**63 else "max_tokens")


@pytest.mark.parametrize("messages", [[], None, {}, "hi", [None], [[]], [1], 5], ids=repr)
def test_messages_that_are_none_are_refused(server, messages):
    check_error(chat(server, messages=messages), 400, "messages")


def test_missing_messages_and_prompt_are_refused(server):
    check_error(chat(server), 400, "messages")
    check_error(server.http("/v1/completions", {}), 400, "prompt")


@pytest.mark.parametrize("message", [
    dict(role="user"), dict(role="user", content=5), dict(role="user", content=[{}]), dict(role="user", content=[dict(type="text")]),
    dict(role="user", content=[dict(type="image_url", image_url=dict(url="data:,"))]), dict(content="hi"), dict(role="king", content="hi"),
    dict(role=5, content="hi"), dict(role="user", content=[5]), dict(role="user", content={}),
    dict(role="assistant", content="", tool_calls=5), dict(role="assistant", content="", tool_calls=[{}])], ids=json.dumps)
def test_malformed_messages_are_refused(server, message):
    check_error(chat(server, messages=[message]), 400, "messages")


@pytest.mark.parametrize("bias", [{"-1": 1}, {"4096": 1}, {"4097": 1}, {str(2**31): 1}, {"abc": 1}, {"": 1}, {"5": 1e9}, {"5": None}, {"5": "x"}, [], 5], ids=json.dumps)
def test_bias_outside_the_vocabulary_or_range_is_refused(server, bias):
    check_error(chat(server, messages=MESSAGES, logit_bias=bias), 400, "logit_bias")


@pytest.mark.smoke
@pytest.mark.parametrize("name,value", [
    ("temperature", -1), ("temperature", "hot"), ("temperature", 1e9), ("top_p", -0.1), ("top_p", 1.1), ("top_p", []), ("min_p", -0.1), ("min_p", 2),
    ("top_k", -5), ("top_k", 1.5), ("n", 0), ("n", 1000), ("n", "2"), ("seed", "x"), ("stop", 5), ("stop", [5]), ("stop", ["x"] * 100),
    ("stop", "x" * 5000), ("presence_penalty", 3), ("frequency_penalty", "x"), ("logprobs", "yes"), ("stream", "yes"), ("stream_options", 5),
    ("tools", 5), ("tools", [5]), ("tools", [dict(type="function")]), ("model", 5), ("chat_template_kwargs", 5)], ids=repr)
def test_parameters_out_of_range_or_of_the_wrong_kind_are_refused(server, name, value):
    check_error(chat(server, **(dict(messages=MESSAGES, max_tokens=4) | {name: value})), 400, name)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"5", b'"x"', b'{"messages":}', b"\xff\xfe", b'{"messages":[{"role":"user","content":"\xff"}]}',
                                  b'{"a":1}{"b":2}', b"\x00" * 10, b'{"messages":[{"role":"user","content":"\\ud800"}]}'], ids=repr)
def test_bodies_that_are_no_json_object_are_refused(server, body):
    check_error(server.http("/v1/chat/completions", body, method="POST"), 400)


@pytest.mark.smoke
@pytest.mark.parametrize("depth", [100, 1000, 10_000, 1_000_000])
@pytest.mark.parametrize("field", ["tools", "unknown", "metadata", "messages"])
def test_deep_nesting_is_refused_and_harmless(server, field, depth):
    body = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,"%s":%s%s}' % (field.encode(), b"[" * depth, b"]" * depth)
    answer = server.http("/v1/chat/completions", body, timeout=60)
    if depth > 128:
        check_error(answer, 400)
    else:
        assert answer[0] in (200, 400)


def test_another_path_and_another_method_are_refused(server):
    check_error(server.http("/v1/nothing"), 404)
    check_error(server.http("/v1/chat/completions"), 405)
    check_error(server.http("/v1/models", {}), 405)


# ---- the context

@pytest.fixture(scope="module")
def limit(server):
    return 4096


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [0, 1, 4096 * 9])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(server, limit, more, stream):
    n = limit + more
    error = check_error(server.http("/v1/completions", dict(prompt=[321] * n, stream=stream, max_tokens=4)), 400)
    assert error["code"] == "context_length_exceeded"
    assert str(n) in error["message"] and str(limit) in error["message"], error["message"]


def test_a_prompt_one_below_the_context_gets_one_token(server, limit):
    status, _, text = server.http("/v1/completions", dict(prompt=[321] * (limit - 1), max_tokens=4, ignore_eos=True), timeout=120)
    assert status == 200
    answer = json.loads(text)
    assert answer["usage"]["completion_tokens"] == 1 and answer["choices"][0]["finish_reason"] == "length"


def test_a_long_conversation_is_refused_the_same_way(server):
    error = check_error(chat(server, messages=[dict(role="user", content="capital " * 5000)]), 400, "messages")
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("prompt", [[5, -1], [5, 4096], [5, 2**31], [5, "x"], [5, 1.5], [], [[]], 5, {}, [None]], ids=repr)
def test_prompts_of_no_tokens_or_wrong_tokens_are_refused(server, prompt):
    check_error(server.http("/v1/completions", dict(prompt=prompt, max_tokens=2)), 400, "prompt")
