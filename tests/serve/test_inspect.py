"""`octavo inspect`, `octavo version` and help: what they print, and the sentence when they cannot."""
import subprocess

from gguf import GGUFReader
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


def test_check_finds_damaged_scales_and_says_where(tmp_path):
    whole = (SOURCE / "tests/models/tiny.gguf").read_bytes()
    file = tmp_path / "model.gguf"
    file.write_bytes(whole)
    code, out, err = octavo("inspect", "--check", file)
    assert (code, err) == (0, "") and out.startswith("checked 130 tensors, 26984000 bytes in 1 file: 0 blocks"), (code, out, err)

    tensors = {t.name: t for t in GGUFReader(SOURCE / "tests/models/tiny.gguf").tensors}
    damaged = bytearray(whole)
    for name, row in (("blk.1.ffn_down_exps.weight", 3), ("output_norm.weight", 0)):
        t = tensors[name]
        row_bytes = int(t.n_bytes) // (int(t.n_elements) // int(t.shape[0]))
        at = int(t.data_offset) + row * row_bytes
        damaged[at:at + 4] = b"\xff" * 4 if row == 0 else b"\x00\xfc" + damaged[at + 2:at + 4]
    file.write_bytes(damaged)
    code, out, err = octavo("inspect", "--check", file)
    assert (code, err) == (2, "") and len(out.splitlines()) == 3, (code, out, err)
    assert "expected finite scales, found 1 of" in out and "the first in row 3 of" in out and out.endswith(": 2 blocks with a scale that is not finite\n"), out

    file.write_bytes(whole[:-100])
    code, out, err = octavo("inspect", "--check", file)
    assert code == 2 and not out and "bytes of data at offset" in err and str(file) in err, (code, out, err)


def test_help_and_version_end_with_0_and_no_command_with_2():
    assert octavo("version")[0] == octavo("--version")[0] == octavo("--help")[0] == 0
    assert "serve" in octavo("--help")[1]
    assert octavo()[0] == 2
