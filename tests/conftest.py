"""Settings of all tests, and shared fixtures: the session's real SGLang server.

Mark the test (or the module: `pytestmark = pytest.mark.sglang`) and request `sglang_server`:

    @pytest.mark.sglang
    async def test_pause(sglang_server: SharedServer) -> None:
        async with aiohttp.ClientSession(sglang_server.address) as session: ...

The server starts with the first test that requests it (20 s). Before each test it is reset: it is
idle, has no open update session, the weights of `folders[0]` (`folders[1]` and `[2]` have others of
the same shape) with the version "default", an empty cache. A test that kills, stops or starves a
server starts its own with tests.sglang.real.real_sglang. Groups of init_weights_update_group need
new names, because they survive a reset.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings
from structlog.dev import ConsoleRenderer, plain_traceback

from arealite.base import registry
from arealite.ext.warm_start import modules
from tests import forks
from tests.sglang.shared import SharedServer, shared_server
from tests.skip_report import pytest_terminal_summary as pytest_terminal_summary
from tests.waiting import stop_ignoring_signals_in_children

# The duration of an example depends on the machine; all machines run the same examples.
# Other examples: pytest --hypothesis-profile=explore.
ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", ANY_SPEED)
settings.register_profile("same", ANY_SPEED, derandomize=True)
settings.load_profile("same")

# Collections of garbage take a fifth of the time of the tests' imports, which leave little garbage.
gc.disable()
stop_ignoring_signals_in_children()
forks.install()

# Tests that do not call log.setup: structlog's own default lets rich print every local variable of
# a traceback, which takes seconds.
PLAIN_CONSOLE = ConsoleRenderer(colors=False, exception_formatter=plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], PLAIN_CONSOLE])


LONGEST = [
    "[unmodified_agent]",
    "test_python.py",
    "written[tool_use]",
    "[AReaLite]",
    "[MRLM]",
    "async_loop",
    "[notebook]",
    "tool[openai_agent]",
    "[sft_to_rl]",
    "[GyLLM]",
    "[stuck_run]",
    "[your_environment]",
]
"""Parts of the names of the longest tests of `make test-docs`, the longest first."""
LONGEST_FILES = [
    "tests/ext/machine/test_machine.py",
    "tests/ext/self_check/test_faults.py",
    "tests/ext/models/test_context_parallel.py",
    "tests/e2e/test_many_workers.py",
    "tests/tools/test_gpu_day.py",
    "tests/impl/engine/test_fsdp_ranks.py",
    "tests/ext/notebook/test_run.py",
    "tests/ext/math/test_math_verify.py",
    "tests/foreign/test_installed_package.py",
    "tests/test_rollout.py",
    "tests/simulation/test_simulation.py",
    "tests/foreign/test_checkout.py",
]
"""The longest files of `make test`, the longest first: more than 20 CPU seconds each."""


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by the marks that this sets
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of long.txt, and increase the timeout of tests of real SGLang servers.

    The longest pages, examples and files come first: else one of them runs alone at the end.
    """
    items.sort(key=rank_by_length)
    patterns = [line.partition("*") for line in long_tests()]
    for item in items:
        name = item.nodeid
        if any(name.startswith(begin) and name.endswith(end) for begin, _, end in patterns):
            item.add_marker(pytest.mark.long)
        if item.get_closest_marker("sglang") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1000))


def long_tests() -> list[str]:
    """Return the lines of long.txt without comments."""
    lines = Path(__file__).with_name("long.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pytest_collection_finish() -> None:
    """Let garbage be collected in the tests, without a walk over all imported modules each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def rank_by_length(item: pytest.Item) -> int:
    """Return a smaller number for a page, an example or a file that takes longer."""
    is_page = item.get_closest_marker("docs") or item.get_closest_marker("examples")
    longest = LONGEST if is_page else LONGEST_FILES
    ranks = [rank for rank, part in enumerate(longest) if part in item.nodeid]
    return min(ranks, default=len(longest))


@pytest.fixture(autouse=True)
def log_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset structlog after each test; a logger with cached settings cannot be captured."""
    before, configure = structlog.get_config(), structlog.configure
    never = {"cache_logger_on_first_use": False}
    monkeypatch.setattr(structlog, "configure", lambda **given: configure(**given | never))
    yield
    configure(**before | never)


@pytest.fixture(autouse=True)
def imported_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget modules of `imports` after each test: a process of reward functions imports them."""
    monkeypatch.setattr(registry, "imported", [])


@pytest.fixture(autouse=True)
def warm_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no command that a test calls in this process import torch in a process of its own."""
    monkeypatch.setattr(modules, "early", lambda config: nullcontext())


@pytest.fixture(scope="session")
def sglang_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    """Provide the server of a session; tests use `sglang_server`."""
    with shared_server(tmp_path_factory.mktemp("sglang")) as server:
        yield server


@pytest.fixture
def sglang_server(
    request: pytest.FixtureRequest, sglang_session: SharedServer
) -> Iterator[SharedServer]:
    """Return a reset server; fail a test that killed it."""
    assert request.node.get_closest_marker("sglang"), "mark the test: pytest.mark.sglang"
    sglang_session.reset()
    yield sglang_session
    assert sglang_session.alive, f"the test killed the session's server\n{tail(sglang_session)}"


def tail(server: SharedServer) -> str:
    return server.real.tail() if server.real else ""
