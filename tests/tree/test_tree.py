"""The shape of the tree: who may include whom, the tour of one token, file headers and sizes, what the README promises."""
import re
import subprocess
from pathlib import Path

import pytest
from octavo import BUILD, SOURCE

MAY_INCLUDE = {
    "proto": {"proto"},
    "kernels": {"kernels"},
    "worker": {"proto", "kernels", "worker"},
    "coordinator": {"proto", "coordinator"},
}
TOUR = ["coordinator/http.c", "coordinator/api_chat.c", "coordinator/tok.c", "coordinator/sched.c", "coordinator/fleet.c",
        "proto/msg.h", "worker/main.c", "worker/forward.c", "kernels/cpu/matmul.c"]
LINES_MAX = 900


def tracked():
    names = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=SOURCE, capture_output=True, check=True).stdout
    return [n for n in names.decode().split("\0") if n and (SOURCE / n).is_file()]


FILES = tracked()
C_FILES = [f for f in FILES if Path(f).suffix in (".c", ".h", ".cu", ".cuh")]
SOURCES = [f for f in C_FILES if f.split("/")[0] in MAY_INCLUDE]


def text(name):
    return (SOURCE / name).read_text(errors="replace")


@pytest.mark.parametrize("folder", MAY_INCLUDE)
def test_includes_point_only_where_they_may(folder):
    wrong = []
    mine = [f for f in SOURCES if f.startswith(folder + "/")]
    assert mine, f"expected sources in {folder}/"
    for f in mine:
        for line, name in re.findall(r'^(\s*#\s*include\s*"([^"]+)")', text(f), re.M):
            if name.split("/")[0] not in MAY_INCLUDE[folder] or not (SOURCE / name).is_file():
                wrong.append(f"{f}: {line.strip()}")
    assert not wrong, f"{folder}/ may include {sorted(MAY_INCLUDE[folder])}, from the root:\n" + "\n".join(wrong)


def test_the_tour_of_one_token_has_every_stop_once():
    stops = {}
    for f in FILES:
        if Path(f).suffix in (".c", ".h", ".cu", ".cuh"):
            for n, of in re.findall(r"token path (\d)/(\d)", text(f)):
                stops.setdefault((int(n), int(of)), []).append(f)
    assert stops == {(i + 1, len(TOUR)): [f] for i, f in enumerate(TOUR)}


def test_the_readme_tells_the_tour_in_order():
    readme = text("README.md")
    places = [readme.find(f) for f in TOUR]
    assert -1 not in places, f"README.md does not name {[f for f, p in zip(TOUR, places) if p < 0]}"
    tour = readme[readme.index("token"):]
    numbered = re.findall(r"^\s*(\d)\.\s.*?`([\w/]+\.[ch])`", tour, re.M)
    assert [f for _, f in numbered][:len(TOUR)] == TOUR


def test_the_readme_names_only_files_that_exist():
    names = set(re.findall(r"`((?:proto|kernels|worker|coordinator|deploy|tests|\.ci)/[\w./-]*)`", text("README.md")))
    missing = sorted(n for n in names if not (SOURCE / n).exists())
    assert names and not missing


def test_the_readme_lists_every_option_of_serve():
    shown = subprocess.run([BUILD / "octavo", "serve", "--help"], capture_output=True, text=True, check=True).stdout
    options = set(re.findall(r"^  (--[a-z-]+)", shown, re.M)) - {"--help"}
    assert len(options) >= 9
    missing = sorted(o for o in options if not re.search(f"`{o}[ `]", text("README.md")))
    assert not missing


def test_the_readme_lists_every_route():
    routes = re.findall(r'^    \{"(/[\w/+-]+)"', text("coordinator/api_server.c"), re.M)
    assert len(routes) >= 10
    missing = [r for r in routes if not re.search(re.escape(r).replace(r"\+", "[A-Z]+"), text("README.md"))]
    assert not missing


def test_every_source_opens_with_what_it_is():
    """`/* folder/name: what it does …`, and who owns, calls, fails and tests it."""
    wrong = [f for f in SOURCES if not re.match(r"/\*+\s*(?:\*\s*)?" + re.escape(f), text(f))]
    assert not wrong, "expected a first line with the file's name and what it does:\n" + "\n".join(wrong)


def test_no_file_is_too_long():
    long = {f: n for f in C_FILES + [f for f in FILES if f.endswith(".py")] if (n := text(f).count("\n")) > LINES_MAX}
    assert not long, f"expected at most {LINES_MAX} lines a file, found {long}"


def test_nothing_is_left_to_do_without_a_condition():
    wrong = [f"{f}:{i + 1}: {l.strip()}" for f in C_FILES for i, l in enumerate(text(f).splitlines()) if re.search(r"\b(FIXME|XXX|HACK)\b|\bTODO\b(?!.*\b(when|once|if|until)\b)", l)]
    assert not wrong, "\n".join(wrong)


def test_structs_are_called_structs():
    """No typedef of a struct, but for the vector of simd.h, which is a struct only where there is no vector type."""
    wrong = [f for f in SOURCES if f != "kernels/cpu/simd.h" and re.search(r"\btypedef\s+(?:struct|union|enum)\b", text(f))]
    assert not wrong


def test_ci_runs_the_tests():
    assert "tests/run" in text(".ci/run") and (SOURCE / ".ci/run").stat().st_mode & 0o111
