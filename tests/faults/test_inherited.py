"""A server started by somebody who left it little: few open files, a mask on its signals.

Owns: nothing.  Called by: tests/run.  Fails how: AssertionError with the end of the server's log.
"""
import os
import signal
import socket
import subprocess
import sys

from octavo import BUILD, PATIENCE, eventually


def started_under(folder, preparation):
    """A program that does what is said in Python, then becomes octavo."""
    path = folder / "octavo"
    path.write_text(f"#!{sys.executable}\nimport os, resource, signal, sys\n{preparation}\n"
                    f"os.execv({str(BUILD / 'octavo')!r}, sys.argv)\n")
    path.chmod(0o755)
    return path


def files(soft, hard):
    return f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))"


def test_a_soft_limit_of_open_files_is_raised(launch, tmp_path):
    server = launch(tp=1, program=started_under(tmp_path, files(256, 2000)))
    server.wait_ready()
    with open(f"/proc/{server.pid}/limits") as f:
        line = next(line for line in f if line.startswith("Max open files"))
    assert line.split()[3:5] == ["2000", "2000"], f"expected the soft limit at the hard one, found {line}"
    server.stop()


def test_too_few_open_files_are_a_sentence_and_exit_code_2(tmp_path):
    program = started_under(tmp_path, files(32, 32))
    done = subprocess.run([program, "serve", "--port", "0"], capture_output=True, text=True, timeout=30 * PATIENCE)
    assert done.returncode == 2 and "open files" in done.stderr, f"expected exit code 2 and a sentence, found {done}"


def test_clients_cannot_take_the_descriptors_that_a_restart_needs(launch, tmp_path):
    server = launch(program=started_under(tmp_path, files(256, 256)))
    server.wait_ready()
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
    try:
        for s in idle:
            s.settimeout(10 * PATIENCE)
        assert idle[140].recv(64).startswith(b"HTTP/1.1 503 "), "expected a connection too many to be told so"
        eventually(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) < 256 - 32, 10, "descriptors to spare", server)
        victim = next(p for p in server.processes() if p != server.pid)
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: "recovered" in server.log(), 60, "the ranks to come back", server)
    finally:
        for s in idle:
            s.close()
    server.wait_ready()
    server.check_healthy()
    server.stop()


def test_a_mask_on_signals_is_lifted(launch, tmp_path):
    mask = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD])"
    server = launch(tp=1, program=started_under(tmp_path, mask))
    server.wait_ready()
    server.stop()
