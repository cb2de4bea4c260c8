"""The demonstration model's golden answers, through HTTP, for every number of ranks.

The golden values were computed independently in float32 on the dequantised weights; see the note in
tests/golden/golden.json. Greedy text must be identical, log-probabilities within TOLERANCE.
"""
import json
import math

import pytest
from octavo import CASES, expected, request_of

TOLERANCE = 2e-3
FEW = ["capital_think", "sum", "tool_call", "long_sparse"]


def answer(server, case, **more):
    with server.client() as client:
        return client.chat.completions.create(**(request_of(case) | more)).choices[0]


def check(server, case):
    reasoning, content, calls = expected(case)
    choice = answer(server, case)
    message = choice.message
    assert (message.content or "") == content
    assert (getattr(message, "reasoning_content", None) or None) == reasoning
    found = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]
    assert found == calls
    assert choice.finish_reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("name", CASES)
def test_greedy_answer_is_the_golden_one(server, name):
    check(server, CASES[name])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fewer_ranks_give_the_golden_answers(launch, tp):
    server = launch(tp=tp).wait_ready()
    assert [w["rank"] for w in server.workers()] == list(range(tp))
    for name in FEW:
        check(server, CASES[name])
    server.stop()


@pytest.mark.smoke
def test_two_ranks_give_golden_answers_and_a_clean_log(launch):
    server = launch(tp=2).wait_ready()
    for name in ("capital", "capital_think", "tool_call"):
        check(server, CASES[name])
    server.stop()


@pytest.mark.parametrize("name", ["capital", "photosynthesis", "sum", "json", "two_turns"])
def test_log_probabilities_are_the_golden_ones(server, name):
    case = CASES[name]
    found = answer(server, case, logprobs=True, top_logprobs=1).logprobs.content
    want = [v for t, v, _ in case["greedy"]]
    # The end token is sampled but is no part of the content.
    assert len(found) in (len(want) - 1, len(want))
    for i, entry in enumerate(found):
        assert math.isclose(entry.logprob, want[i], abs_tol=TOLERANCE), f"token {i} {entry.token!r}: expected {want[i]}, found {entry.logprob}"
        assert entry.top_logprobs[0].token == entry.token


@pytest.mark.parametrize("name", CASES)
def test_prompt_and_answer_are_counted_as_in_the_golden_ids(server, name):
    case = CASES[name]
    with server.client() as client:
        usage = client.chat.completions.create(**request_of(case)).usage
    assert usage.prompt_tokens == len(case["ids"])
    assert usage.completion_tokens == len(case["greedy"])
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("name", CASES)
def test_completions_on_the_golden_ids_give_the_golden_text(server, name):
    """The text endpoint parses nothing: reasoning and calls come as the model writes them."""
    case = CASES[name]
    with server.client() as client:
        choice = client.completions.create(model="tiny.gguf", prompt=case["ids"], temperature=0, max_tokens=200).choices[0]
    reasoning, content, calls = expected(case)
    if content:
        assert choice.text.endswith(content)
    if reasoning:
        assert choice.text.startswith(reasoning)
    assert choice.finish_reason == "stop"


def test_two_servers_give_the_same_bits(server, launch):
    other = launch(tp=server.tp).wait_ready()
    pick = lambda s: [(e.token, e.logprob, [(t.token, t.logprob) for t in e.top_logprobs])
                      for e in answer(s, CASES["photosynthesis"], logprobs=True, top_logprobs=20).logprobs.content]
    assert pick(server) == pick(other)
    other.stop()
