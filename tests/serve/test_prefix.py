"""What was computed before is found again, and no answer shows it: the prefix cache through HTTP."""
import json
import re
import socket

import pytest
from octavo import PHOTOSYNTHESIS, Server, Stream, eventually, question, stream_all

WORDS = "The capital of France is Paris. What is 12 + 30? Explain how photosynthesis works, count from one to ten. "


def prompt_ids(server, n):
    """n token ids of plain text."""
    ids = json.loads(server.http("/tokenize", dict(content=WORDS * (n // 16 + 1)))[2])["tokens"]
    assert len(ids) >= n
    return ids[:n]


def complete(server, prompt, max_tokens=12, **more):
    """(text, log-probabilities, cached tokens) of a greedy completion."""
    body = dict(model="tiny.gguf", prompt=prompt, max_tokens=max_tokens, temperature=0, logprobs=2, ignore_eos=True) | more
    status, _, text = server.http("/v1/completions", body)
    assert status == 200, text
    answer = json.loads(text)
    choice = answer["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    """A server that finds nothing."""
    server = Server(tmp_path_factory.mktemp("cold"), "--prefix-cache", "off", tp=1).wait_ready()
    yield server
    server.stop()
    server.destroy()


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("warm"), tp=1).wait_ready()
    yield server
    server.stop()
    server.destroy()


def test_a_prompt_again_its_prefix_and_one_token_less_say_what_they_say_cold(cold, warm):
    """Bit by bit: every log-probability is equal, not close."""
    for penalty in ({}, dict(repetition_penalty=1.3, frequency_penalty=0.4)):
        ids = prompt_ids(warm, 400)[10 * len(penalty):]
        n = len(ids)
        more = dict(cache_salt=f"salt {penalty}") | penalty
        for length, cached in ((n, 0), (n, (n - 1) // 64 * 64), (n, (n - 1) // 64 * 64), (320, 256), (321, 320), (319, 256), (64, 0)):
            expected = complete(cold, ids[:length], **penalty)
            found = complete(warm, ids[:length], **more)
            assert expected[2] == 0
            assert found[:2] == expected[:2], f"{penalty} {length} tokens"
            assert found[2] == cached, f"{length} tokens: expected {cached} cached, found {found[2]}"


@pytest.mark.smoke
def test_the_next_turn_of_a_chat_finds_the_turns_before_and_a_salt_does_not(server):
    messages = [dict(role="user", content=PHOTOSYNTHESIS)]
    request = question("", max_tokens=150, extra_body=dict(cache_salt="turns"))
    with server.client() as client:
        first = client.chat.completions.create(**request | dict(messages=messages))
        messages += [dict(role="assistant", content=first.choices[0].message.content), dict(role="user", content="Once more, please.")]
        second = client.chat.completions.create(**request | dict(messages=messages))
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert first.usage.prompt_tokens - 64 <= cached, f"{first.usage} {second.usage}"
        request["extra_body"] = request["extra_body"] | dict(cache_salt="another")
        third = client.chat.completions.create(**request | dict(messages=messages))
        assert third.usage.prompt_tokens_details.cached_tokens == 0
        assert third.choices[0].message.content == second.choices[0].message.content


def test_a_salt_that_is_none_is_refused(server):
    for salt in ("", 5, [], "x" * 2000, "a\0b"):
        status, _, text = server.http("/v1/completions", dict(model="tiny.gguf", prompt="Hi", max_tokens=1, cache_salt=salt))
        assert status == 400 and json.loads(text)["error"]["param"] == "cache_salt", text


@pytest.mark.smoke
def test_many_answers_to_one_prompt_share_it(server):
    ids = prompt_ids(server, 1000)
    before = prompt_rows(server)
    body = dict(model="tiny.gguf", prompt=ids, max_tokens=4, temperature=0, n=8, cache_salt="many")
    answer = json.loads(server.http("/v1/completions", body)[2])
    assert len({c["text"] for c in answer["choices"]}) == 1
    assert answer["usage"]["prompt_tokens"] == 1000 and answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert prompt_rows(server) - before == 1000 + 7 * (1000 - 960)


def count(server, name):
    return int(re.search(rf"^octavo_{name} (\d+)", server.http("/metrics")[2], re.M)[1])


def prompt_rows(server):
    """Prompt tokens that were not found but computed."""
    return count(server, "prompt_tokens_total") - count(server, "cached_tokens_total")


def test_a_client_that_asks_again_and_again_costs_one_prefill(warm):
    """It leaves while its prompt is computed; what is there already is not computed again."""
    ids = prompt_ids(warm, 2000)
    body = dict(model="tiny.gguf", prompt=ids, max_tokens=1, stream=True, cache_salt="again")
    data = json.dumps(body).encode()
    for _ in range(3):
        steps = count(warm, "steps_total")
        with socket.create_connection(("127.0.0.1", warm.port)) as s:
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            eventually(lambda: count(warm, "steps_total") > steps, 10, "a part of the prompt is computed", warm)
    eventually(lambda: warm.running() == 0, 10, "nothing is computed for who has left", warm)
    eventually(lambda: count(warm, "pages_used") == 0, 5, "all pages given back", warm)
    found = complete(warm, ids, 1, cache_salt="again")
    assert found[2] >= 512, "what was computed for those who left is found"


def test_foreign_words_never_appear_among_many_with_the_same_beginning(cold, warm):
    """Sixteen at once share all but their last words, some leave; all is found in a second round."""
    texts = [WORDS * 4 + f"What is {a} + {b}?" for a in (3, 12) for b in range(8)]
    alone = [Stream(cold, question(t, max_tokens=8)) for t in texts]
    stream_all(alone)
    for leaves in (3, 0):
        streams = [Stream(warm, question(t, max_tokens=8), leave_after=leaves if leaves and i % 5 == 0 else None) for i, t in enumerate(texts)]
        stream_all(streams)
        for s, a in zip(streams, alone):
            assert s.left or (s.error is None and s.text == a.text), f"expected {a.text!r}, found {s.text!r} {s.error!r}"
