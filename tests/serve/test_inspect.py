"""`octavo inspect`, `octavo version` and help: what they print, and the sentence when they cannot."""
import subprocess

from octavo import BUILD, SOURCE


def octavo(*arguments):
    p = subprocess.run([BUILD / "octavo", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    return p.returncode, p.stdout, p.stderr


def test_inspect_prints_metadata_types_and_tensors():
    code, out, err = octavo("inspect", SOURCE / "tests/models/tiny.gguf")
    assert code == 0 and not err
    for line in ('general.architecture = "glm-dsa"', "glm-dsa.context_length = 4096", "glm-dsa.attention.indexer.types = [5] 1, 1, 0, 1, 0",
                 "tensors: 130, 26984000 bytes in 1 file", "IQ4_NL"):
        assert line in out, f"expected {line!r}, found:\n{out[:3000]}"
    assert sum(line.startswith(("  blk.", "  token_embd", "  output")) for line in out.splitlines()) == 130


def test_inspect_refuses_what_is_no_model_with_a_sentence(tmp_path):
    (tmp_path / "poem.gguf").write_text("Tyger Tyger, burning bright")
    for arguments in (["inspect"], ["inspect", tmp_path / "poem.gguf"], ["inspect", tmp_path / "none.gguf"], ["inspect", "--x"]):
        code, out, err = octavo(*arguments)
        assert code == 2 and not out and len(err.splitlines()) == 1, (arguments, code, out, err)


def test_help_and_version_end_with_0_and_no_command_with_2():
    assert octavo("version")[0] == octavo("--version")[0] == octavo("--help")[0] == 0
    assert "serve" in octavo("--help")[1]
    assert octavo()[0] == 2
