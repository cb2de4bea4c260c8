"""Starting as the operator sees it: the shard cache, and devices that are not there."""
import os
import re
import subprocess
from pathlib import Path

import pytest
from octavo import BUILD, PATIENCE

GPUS = Path("/proc/driver/nvidia/gpus")
no_gpu = pytest.mark.skipif(GPUS.exists() or Path("/dev/nvidia0").exists(), reason="this host has a GPU")


def refusal(*options):
    p = subprocess.run([BUILD / "octavo", "serve", "--port", "0", *options], capture_output=True, text=True,
                       timeout=60 * PATIENCE, stdin=subprocess.DEVNULL)
    assert p.returncode == 2, p.stderr
    return p.stderr


def sources(server):
    return re.findall(r"loaded .*source=(\w+)", server.log())


def test_a_second_start_takes_the_shards_and_answers_alike(launch, tmp_path):
    cache = tmp_path / "shards"
    for expected in ("file", "shard"):
        server = launch("--shard-cache", cache, tp=2).wait_ready()
        server.check_healthy()
        assert sources(server) == [expected] * 2
        server.stop()
        assert len(list(cache.iterdir())) == 2


def test_a_shard_with_one_wrong_byte_is_made_again(launch, tmp_path):
    cache = tmp_path / "shards"
    launch("--shard-cache", cache, tp=2).wait_ready().stop()
    victim = sorted(cache.iterdir())[0]
    with open(victim, "r+b") as f:
        f.seek(os.path.getsize(victim) // 2)
        byte = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte[0] ^ 1]))
    server = launch("--shard-cache", cache, tp=2).wait_ready()
    server.check_healthy()
    assert sorted(sources(server)) == ["file", "shard"]
    assert server.log().count("shard_refused") == 1
    server.stop()


def test_a_shard_cache_that_cannot_be_written_does_not_keep_the_service_down(launch):
    server = launch("--shard-cache", "/proc/none", tp=2).wait_ready()
    server.check_healthy()
    assert server.log().count("shard_not_written") == 2
    server.stop()


@no_gpu
def test_cuda_without_a_gpu_is_refused_and_cpu_is_the_default():
    assert "--device cuda: expected a GPU with its driver, found none" in refusal("--device", "cuda")
    assert "--devices: expected --device cuda with it, found cpu" in refusal("--devices", "0")
