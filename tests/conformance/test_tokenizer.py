"""The tokenizer equals the `tokenizers` package, and streamed decoding equals Python's.

Thousands of random strings (all planes, marks, spaces, digits of many scripts, controls, long words, line ends) go through
tok_tool and through the reference on the same vocabulary. The seed is printed with every failure; OCTAVO_TEST_SEED repeats it.
"""
import json
import os
import random
import sys
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from reference import REFERENCE, ask, known, reference, text  # noqa: E402

SEED = int(os.environ.get("OCTAVO_TEST_SEED", "20260801"))


@pytest.fixture(scope="module")
def strings():
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    return [text(rng) for _ in range(8000)]


def compare(strings, tokenizer, trusted):
    answers = ask([dict(op="encode", text=s, trusted=trusted) for s in strings])
    for s, a in zip(strings, answers):
        expected = tokenizer.encode(s, add_special_tokens=False).ids
        assert a.get("ids") == expected, f"seed {SEED}, trusted {trusted}, text {s!r}\nexpected {expected}\nfound    {a}"


def test_trusted_text_has_the_ids_of_the_reference(strings):
    compare(strings, Tokenizer.from_str(json.dumps(reference(folded=True))), trusted=True)


def test_the_tokenizer_file_as_it_is_agrees_where_no_long_s_stands(strings):
    compare([s for s in strings if "\u017f" not in s], Tokenizer.from_file(str(REFERENCE)), trusted=True)


def test_plain_text_has_the_ids_of_a_reference_without_added_tokens(strings):
    spec = reference(folded=True)
    spec["added_tokens"] = []
    compare(strings, Tokenizer.from_str(json.dumps(spec)), trusted=False)


def test_the_shortcut_for_whole_words_changes_nothing(strings):
    spec = reference(folded=True)
    spec["model"]["ignore_merges"] = True
    compare(strings[:2000], Tokenizer.from_str(json.dumps(spec)), trusted=True)


def test_decoding_gives_the_text_back(strings):
    encoded = ask([dict(op="encode", text=s) for s in strings])
    decoded = ask([dict(op="decode", ids=a["ids"]) for a in encoded])
    for s, a in zip(strings, decoded):
        assert a["text"] == s, f"seed {SEED}\nexpected {s!r}\nfound    {a['text']!r}"


def test_broken_utf8_is_replaced_as_python_replaces_it():
    rng = random.Random(SEED)
    pieces = [b"a", "é".encode(), "日".encode(), "🐱".encode(), b"\x80", b"\xbf", b"\xc0", b"\xc1", b"\xc3", b"\xe0", b"\xe0\x80", b"\xe0\xa0", b"\xed", b"\xed\x9f", b"\xed\xa0\x80", b"\xf0", b"\xf0\x80", b"\xf0\x90", b"\xf0\x9f\x90", b"\xf4\x8f\xbf", b"\xf4\x90", b"\xf5", b"\xff"]
    cases = [b"".join(rng.choice(pieces) if rng.random() < 0.8 else bytes([rng.randrange(256)]) for _ in range(rng.randint(0, 12))) for _ in range(8000)]
    cuts = [sorted(rng.randint(0, len(c)) for _ in range(rng.randint(0, 12))) for c in cases]
    answers = ask([dict(op="scrub", hex=c.hex(), cuts=k) for c, k in zip(cases, cuts)])
    for c, k, a in zip(cases, cuts, answers):
        expected = c.decode("utf-8", errors="replace")
        assert a["text"] == expected, f"seed {SEED}, bytes {c!r}, cut at {k}\nexpected {expected!r}\nfound    {a['text']!r}"


def test_long_words_agree():
    rng = random.Random(SEED)
    tokenizer = Tokenizer.from_file(str(REFERENCE))
    words = ["".join(rng.choice(letters) for _ in range(20000)) for letters in ("ab", "the", "etaoinshrdlu", "aA", "日本語")] + ["a" * 20000, " " * 20000, "\n" * 5000, " \n" * 5000, "9" * 5001, "!" * 20000]
    compare(words, tokenizer, trusted=True)


def test_every_code_point_is_classed_as_the_reference_classes_it():
    """Letter, number, space or neither: a wrong class moves a word border in one of the two probes."""
    tokenizer = Tokenizer.from_str(json.dumps(reference(folded=True)))
    probes = [probe for c in map(chr, range(0x110000)) if known(c) and unicodedata.category(c) != "Co" for probe in ("he" + c + "he", " " + c + "12" + c + " he")]
    assert len(probes) > 100000
    answers = ask([dict(op="encode", text=p) for p in probes])
    for probe, a, e in zip(probes, answers, tokenizer.encode_batch(probes, add_special_tokens=False)):
        assert a["ids"] == e.ids, f"U+{ord(probe[2] if probe[0] == 'h' else probe[1]):04X}: expected {e.ids}, found {a['ids']}"
