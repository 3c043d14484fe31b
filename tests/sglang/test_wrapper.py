"""`launch_llm_server.py llm_server.type=sglang` with a real SGLang server.

All tests use one wrapper: they run in their order, and the last one stops it.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from arealite.system.names.name_registry import NameRegistry, read_secret
from tests.models import tiny_model
from tests.sglang.real import PYTHON, ROOT
from tests.sglang.shared import call
from tests.waiting import until, until_exited

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

START_S = 240.0


class Wrapper:
    """The command as a user runs it, in a separate folder."""

    def __init__(self, folder: Path, model: Path, *overrides: str) -> None:
        self.registry = NameRegistry(root=folder / "names/u/arealite/t")
        self.shown = folder / "shown.log"
        words = [
            "llm_server.type=sglang",
            f"llm_server.sglang.python={PYTHON}",
            "llm_server.sglang.device=cpu",
            "llm_server.sglang.drain_timeout_s=1",
            "cluster.heartbeat_s=0.1",
            f"model.path={model}",
            f"cluster.name_root={folder / 'names'}",
            f"cluster.run_root={folder / 'runs'}",
            "cluster.user=u",
            "trial_name=t",
            *overrides,
        ]
        with self.shown.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "arealite" / "launch_llm_server.py"), *words],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def logs(self) -> list[Path]:
        """Return the logs of its servers."""
        found = list(self.shown.parent.glob("runs/**/*.log"))
        assert found
        return found

    def name(self) -> dict[str, Any] | None:
        """Return the server's registry entry, or None."""
        return next((entry.value for entry in self.registry.list("llm_server")), None)

    def await_name(self) -> dict[str, Any]:
        ended = lambda: self.process.poll() is not None  # noqa: E731
        until(lambda: self.name() or ended(), what="the server's name", seconds=START_S)
        name = self.name()
        assert name is not None, self.shown.read_text()
        return name

    def family(self) -> list[psutil.Process]:
        """Return all processes of the server."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def call(self, path: str, body: dict[str, Any] | None = None, **options: Any) -> Any:
        """Send a request with the trial's token; return (status, answer)."""
        return call(self.await_name()["address"], path, body, token=self.token, **options)

    @property
    def token(self) -> str:
        secret = read_secret(self.registry.root)
        assert secret is not None
        return secret.token

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("wrapped") / "model")


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Wrapper]:
    started = Wrapper(tmp_path_factory.mktemp("wrapper"), model, "llm_server.context_length=500")
    try:
        yield started
    finally:
        started.close()


def generate(wrapper: Wrapper, count: int) -> list[threading.Thread]:
    """Send generations of 450 tokens and return when some run; ignore their results."""
    sampling = {"max_new_tokens": 450, "ignore_eos": True}

    def send(i: int) -> None:
        try:
            body = {"input_ids": [5, 6 + i], "sampling_params": sampling}
            wrapper.call("/generate", body, seconds=60)
        except (OSError, http.client.HTTPException):
            pass  # the server died, as these tests intend

    threads = [threading.Thread(target=send, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    until(lambda: running(wrapper), what="requests in flight", seconds=60)
    return threads


def running(wrapper: Wrapper) -> int:
    """Return the number of running requests that the server reports."""
    loads = wrapper.call("/v1/loads?include=core")[1]["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def load(wrapper: Wrapper) -> int:
    told = (wrapper.name() or {}).get("load", {})
    return told.get("running", 0) + told.get("waiting", 0)


def test_invalid_argument_exits_with_the_servers_error(tmp_path: Path, model: Path):
    wrapper = Wrapper(tmp_path, model, "llm_server.sglang.extra_args=[--no-such-argument]")
    try:
        assert wrapper.process.wait(START_S) == 2
        shown = wrapper.shown.read_text()
        error = shown[shown.index("error: llm_server-127.0.0.1-") :]
        assert "died (" in error and "Its last lines (" in error
        assert "unrecognized arguments: --no-such-argument" in error, "SGLang's own words"
        assert wrapper.name() is None
    finally:
        wrapper.close()


def test_wrapper_killed_during_a_server_start_leaves_no_process(tmp_path: Path, model: Path):
    wrapper = Wrapper(tmp_path, model)
    try:
        scheduler = lambda: any("scheduler" in p.name() for p in wrapper.family())  # noqa: E731
        until(scheduler, what="SGLang's scheduler", seconds=START_S)
        family = wrapper.family()
        wrapper.process.kill()
        until_exited(*family)
        assert len(family) >= 3
    finally:
        wrapper.close()


def test_registry_entry_of_a_healthy_server_follows_its_state(wrapper: Wrapper, model: Path):
    name = wrapper.await_name()
    assert name == {
        "address": name["address"],
        "type": "sglang",
        "model_path": str(model),
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 64,
        "protocol": "sglang",
        "dtype": "float32",
        "context_length": 494,  # the longest prompt that SGLang accepts
        "version": "default",
        "host": "127.0.0.1",
        "pid": wrapper.family()[0].pid,
        "load": {"running": 0, "waiting": 0, "capacity": 128},
    }
    body = {"model_path": str(model), "weight_version": "7"}
    assert wrapper.call("/update_weights_from_disk", body)[0] == 200
    until(lambda: (wrapper.name() or {})["version"] == "7", what="version 7 in the name")
    threads = generate(wrapper, 8)
    until(lambda: load(wrapper), what="a load in the name")
    until(lambda: load(wrapper) == 0, what="an idle server's name", seconds=60)
    for thread in threads:
        thread.join()


def test_server_answers_only_with_the_token_and_never_shows_it(
    wrapper: Wrapper, model: Path
) -> None:
    address = wrapper.await_name()["address"]
    body = {"model_path": str(model), "weight_version": "666"}
    asked = {
        "/generate": {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}},
        "/pause_generation": {"mode": "abort"},
        "/abort_request": {"abort_all": True},
        "/update_weights_from_disk": body,
        "/update_weight_version": {"new_version": "666"},
        "/init_weights_update_group": {},
        "/flush_cache": {},
        "/model_info": None,
        "/server_info": None,
    }
    for path, what in asked.items():
        assert [call(address, path, what, token=token)[0] for token in ("", "guess")] == [401, 401]
    assert call(address, "/health")[0] == 200
    assert wrapper.call("/model_info")[1]["weight_version"] != "666"
    for process in wrapper.family():
        assert not any(wrapper.token in word for word in process.cmdline())
        assert not any(wrapper.token in value for value in process.environ().values())
    assert wrapper.token not in wrapper.shown.read_text()
    assert all(wrapper.token not in log.read_text() for log in wrapper.logs())


def test_server_killed_while_generating_is_restarted_with_the_initial_weights(wrapper: Wrapper):
    before = wrapper.await_name()
    family = wrapper.family()
    generate(wrapper, 16)
    begin = time.monotonic()
    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: wrapper.name() is None, what="the name to go")
    gone_s = time.monotonic() - begin
    after = wrapper.await_name()
    back_s = time.monotonic() - begin
    print(f"\nkill -9 → no name: {gone_s:.2f} s; → healthy and named again: {back_s:.1f} s")
    assert gone_s < 1.0
    assert after["pid"] != before["pid"]
    assert after["version"] == "default"
    assert after["address"] == before["address"]
    until_exited(*family)
    assert wrapper.call("/model_info")[0] == 200


def test_sigterm_stops_a_paused_server_with_running_requests(wrapper: Wrapper):
    generate(wrapper, 16)
    wrapper.call("/pause_generation", {"mode": "retract"})
    assert running(wrapper), "requests that will never end"
    family = wrapper.family()
    begin = time.monotonic()
    wrapper.process.terminate()
    until(lambda: wrapper.name() is None, what="the name to go first", seconds=1.0)
    assert wrapper.process.wait(60) == 0
    seconds = time.monotonic() - begin
    print(f"\nSIGTERM while paused with 16 requests → ended: {seconds:.1f} s")
    until_exited(*family)
    assert len(family) >= 4
    assert seconds < 15
