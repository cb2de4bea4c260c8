"""Adds up what the runners of tests/run found and prints the closing line.

usage: tally.py RESULT…    each RESULT is NAME=PATH: a meson testlog.json, or a JUnit XML of pytest
Called by: tests/run.  A unit test counts once for each of its cmocka cases (the binaries print TAP);
one that ended without saying so, by a crash or a sanitizer, counts as one failure more.
Exit code: 0 when something passed and nothing failed, else 1.
"""
import json
import re
import sys
import xml.etree.ElementTree as ElementTree

CASE = re.compile(r"^(not ok|ok) \d+(?: - )?(.*?)(?:\s*# *(skip|todo)\b *(.*))?$", re.I)


def meson_results(path):
    """(verdict, name, why) of every case in a testlog.json, which holds one JSON object a line."""
    with open(path, encoding="utf-8", errors="replace") as f:
        for line in f:
            test = json.loads(line)
            cases = [CASE.match(l) for l in test.get("stdout", "").splitlines()]
            cases = [c for c in cases if c]
            ok = test["result"] in ("OK", "EXPECTEDFAIL")
            failed = 0
            for c in cases:
                name = f"{test['name']}: {c[2]}"
                if c[3]:
                    yield "skipped", name, c[4] or "no reason given"
                elif c[1].lower() == "ok":
                    yield "passed", name, ""
                else:
                    failed += 1
                    yield "failed", name, ""
            if test["result"] == "SKIP":
                yield "skipped", test["name"], "the test said so (exit 77)"
            elif not ok and not failed:
                yield "failed", test["name"], f"ended with {test['result']}, {test.get('returncode')}"
            elif ok and not cases:
                yield "passed", test["name"], ""


def pytest_results(path):
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        bad = [e for e in case if e.tag in ("failure", "error")]
        skip = case.find("skipped")
        if bad:
            yield "failed", name, (bad[0].get("message") or "").splitlines()[0][:200] if bad[0].get("message") else ""
        elif skip is not None:
            yield "skipped", name, skip.get("message") or ""
        else:
            yield "passed", name, ""


def main():
    total = dict(passed=0, failed=0, skipped=0)
    for argument in sys.argv[1:]:
        run, path = argument.split("=", 1)
        mine = dict(passed=0, failed=0, skipped=0)
        lines = []
        try:
            results = list((meson_results if path.endswith(".json") else pytest_results)(path))
        except (OSError, ValueError, ElementTree.ParseError) as e:
            results = [("failed", path, f"no readable results: {e}")]
        for verdict, name, why in results:
            mine[verdict] += 1
            total[verdict] += 1
            if verdict != "passed":
                lines.append(f"  {verdict}: {name}{': ' + why if why else ''}")
        print(f"{run}: {mine['passed']} passed, {mine['failed']} failed, {mine['skipped']} skipped")
        print("\n".join(lines), end="\n" if lines else "")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 0 if total["passed"] and not total["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
