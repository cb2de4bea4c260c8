"""Fixtures and options of the Python tests.

--tp N         workers of a server that says nothing else (default 8)
--patience X   deadlines times X, for sanitizer builds
--ring NAME    "soak" runs the tests marked soak too
The programs are those of OCTAVO_BUILD_ROOT (default: build/).
"""
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import octavo  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--tp", type=int, default=8)
    parser.addoption("--patience", type=float, default=1.0)
    parser.addoption("--ring", default="usual")


def pytest_configure(config):
    config.addinivalue_line("markers", "smoke: also run against the sanitizer builds")
    config.addinivalue_line("markers", "soak: takes many minutes, only with --ring=soak")
    octavo.TP = config.getoption("--tp")
    octavo.PATIENCE = config.getoption("--patience")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--ring") == "soak":
        return
    soak = [i for i in items if i.get_closest_marker("soak")]
    if soak:
        config.hook.pytest_deselected(items=soak)
        items[:] = [i for i in items if i not in soak]


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The server that most tests share; it must end cleanly after all of them."""
    s = octavo.Server(tmp_path_factory.mktemp("server"))
    try:
        s.wait_ready()
        yield s
        s.stop()
    finally:
        s.destroy()


@pytest.fixture
def launch(tmp_path):
    """Starts servers of a test's own; whatever happens, none outlives the test."""
    servers = []

    def start(*options, **more):
        servers.append(octavo.Server(tmp_path, *options, **more))
        return servers[-1]
    yield start
    for s in servers:
        s.destroy()


@pytest.fixture
def client(server):
    with server.client() as c:
        yield c
