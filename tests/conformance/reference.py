"""What the tokenizer and chat tests share: tok_tool, random text, and the reference tokenizer."""
import json
import os
import subprocess
import unicodedata
from pathlib import Path

ROOT = Path(os.environ.get("OCTAVO_SOURCE_ROOT", Path(__file__).resolve().parents[2]))
BUILD = Path(os.environ.get("OCTAVO_BUILD_ROOT", ROOT / "build"))
MODEL = ROOT / "tests/models/tiny.gguf"
REFERENCE = ROOT / "tests/golden/tokenizer.json"
# The published expression folds case, and so knows the long s; the tokenizer.json at hand spells its contractions out.
SPELLED = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
FOLDED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"

SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u180e" + "".join(map(chr, range(0x2000, 0x2010))) + "\u2028\u2029\u202f\u205f\u2060\u3000\ufeff"
DIGITS = "0123456789٠٣٤०१२１２３𝟘𝟙²½ⅷⅢ㊿〇三𐄇"
MARKS = "\u0301\u0308\u0327\u20dd\u0e31\u093e\ufe0f\u200d\u1ab0"
CONTRACTIONS = ["'s", "'S", "'\u017f", "'t", "'re", "'RE", "'vE", "'m", "'ll", "'Ll", "'d", "\u2019s", "''s", "'\u212a", "'x"]
WORDS = ["the", "capital", "France", "Photosynthesis", "ﬁ", "ǅ", "straße", "ŉ", "你好", "世界", "こんにちは", "안녕", "مرحبا", "שלום", "नमस्ते", "สวัสดี", "🐱", "🏠", "👨‍👩‍👧", "🇫🇷", "é", "e\u0301",
         "x=1;", "//", "{\"a\":", "<|user|>", "<think>", "[gMASK]", "/nothink", "\x00", "\x7f", "\ufffd", "\ue000", "\U0010fffd", "_foo", "don't"]


def ask(requests):
    lines = "\n".join(json.dumps(r) for r in requests) + "\n"
    done = subprocess.run([BUILD / "tok_tool", MODEL], input=lines.encode(), capture_output=True, timeout=300)
    assert done.returncode == 0, f"tok_tool ended with {done.returncode}: {done.stderr.decode()[-500:]}"
    answers = [json.loads(line) for line in done.stdout.split(b"\n") if line]
    assert len(answers) == len(requests)
    return answers


def known(c):
    """Code points whose category both libraries know: assigned long ago enough."""
    return unicodedata.category(c) not in ("Cn", "Cs") and unicodedata.ucd_3_2_0.category(c) != "Cn"


def character(rng):
    while True:
        c = chr(rng.choice([rng.randrange(0x80), rng.randrange(0x800), rng.randrange(0x10000), rng.randrange(0x110000), rng.randrange(0x10000, 0x30000)]))
        if known(c):
            return c


def text(rng):
    kinds = [lambda: character(rng), lambda: rng.choice(WORDS), lambda: rng.choice(SPACES) * rng.choice([1, 1, 1, 2, 5]), lambda: "".join(rng.choices(DIGITS, k=rng.randint(1, 7))), lambda: rng.choice(MARKS),
             lambda: rng.choice(["\r\n", "\n", "\r", "\n\n", " \r\n ", "\n\r", " \n", "\t\n\t"]), lambda: rng.choice(CONTRACTIONS), lambda: " ", lambda: chr(rng.randrange(32)), lambda: rng.choice("!?.,;:'\"()-#*_<>|/\\"),
             lambda: "".join(chr(rng.randrange(97, 123)) for _ in range(rng.randint(1, 12)))]
    if rng.random() < 0.02:
        return "".join(rng.choice(["ab", "the", "e", "é", "日", "zq"]) for _ in range(rng.randint(200, 2000)))
    weights = [rng.random() ** 2 for _ in kinds]
    return "".join(rng.choices(kinds, weights)[0]() for _ in range(rng.randint(1, 40)))


def reference(folded):
    spec = json.loads(REFERENCE.read_text())
    if folded:
        split = spec["pre_tokenizer"]["pretokenizers"][0]["pattern"]
        assert SPELLED in split["Regex"]
        split["Regex"] = split["Regex"].replace(SPELLED, FOLDED)
    return spec
