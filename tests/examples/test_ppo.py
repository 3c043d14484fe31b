"""The examples with sampling and a trainer do what they demonstrate."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from arealite.base import config as base_config
from arealite.ext.audit.audit import audit
from arealite.system.names.name_registry import read_secret
from tests.e2e.conftest import ENVIRONMENT, ROOT, SLOW_S, Finished
from tests.examples.conftest import LIMIT_S, Example
from tests.ext.web.browser.sites import needs_chromium
from tests.waiting import until

pytestmark = [pytest.mark.examples, pytest.mark.timeout(2 * LIMIT_S)]
Line = dict[str, float]


def trained(done: Finished, steps: int = 2) -> list[Line]:
    """Return the metrics of each step, after a check of exit code and balance."""
    assert done.code == 0, done.shown + done.logs()
    balance = audit(done.paths.ledger)
    assert balance.ok and balance.steps == steps, balance.table()
    lines = [line for line in done.metrics() if "reward/mean" in line]
    assert any(line.get("update/grad_norm", 0) > 0 for line in lines), (
        "there was something to learn"
    )
    return lines


def test_quickstart_publishes_evaluates_and_balances(example: Example, tmp_path: Path) -> None:
    more = "launcher.server_args=[llm_server.embedded.max_running_requests=16]"
    done = example("quickstart", "trainer.ppo.total_steps=3", more)
    lines = trained(done, 3)
    assert "eval at step 3" in done.shown and "balanced" in done.shown
    assert "server ready" in (done.paths.logs / "llm_server-0.log").read_text()
    assert [line["publish/servers"] for line in lines[1:]] == [1, 1]
    assert not list((tmp_path / "names").rglob("llm_server/*.json")), "the server left its name"


def test_grpo_math_reports_reference_kl_and_bounded_staleness(example: Example) -> None:
    lines = trained(example("grpo_math"))
    begin, end = (line["policy/reference_kl"] for line in lines)
    assert begin == pytest.approx(0, abs=1e-6) and end > 0
    assert max(line["staleness/max"] for line in lines) <= 2


def test_ppo_critic_trains_its_critic(example: Example) -> None:
    for line in trained(example("ppo_critic")):
        assert line["critic/grad_norm"] > 0
        assert line["episode/groups_of_one"] == line["episode/trajectories"] == 64


def test_hybrid_trains_sft_then_ppo(example: Example) -> None:
    done = example("hybrid", "tasks=48", "n=8")
    trained(done)
    assert "stage 1 of 2: sft" in done.shown and "stage 2 of 2: async_ppo" in done.shown
    taught = done.paths.root.with_name("hybrid-laptop-stage1") / "export"
    assert base_config.read(done.paths.config).model.path == str(taught)


def test_custom_agent_retries_at_a_cost(example: Example) -> None:
    lines = trained(example("custom_agent", "trainer.ppo.collector.agent.retry.cost=0.5"))
    for line in lines:
        again = line["reward/parts/retries"]
        assert 0 < again == pytest.approx(line["episode/turns_mean"] - 1)
        assert line["reward/min"] < 0 < line["reward/max"], "a further try costs"


def test_external_sglang_uses_running_servers(
    example: Example,
    kit: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "SERVER_KEY", "none")
    with socket.socket() as silent:  # a port that is bound and not listening
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        nobody = example("external_sglang", f"llm_server.addresses=[127.0.0.1:{port}]")
    assert nobody.code == 2 and "error: " in nobody.shown
    names, ours = tmp_path_factory.mktemp("server"), [f"model.path={kit('sorting') / 'model'}"]
    ours += [f"cluster.name_root={names}"]
    with subprocess.Popen(
        [sys.executable, str(ROOT / "arealite/launch_llm_server.py"), *ours],
        cwd=names,
        env=ENVIRONMENT,
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            up = lambda: list(names.rglob("llm_server/*.json")) or server.poll() is not None  # noqa: E731
            until(up, what="the server", seconds=SLOW_S)
            (entry,) = names.rglob("llm_server/*.json")
            address = json.loads(entry.read_text())["address"].removeprefix("http://")
            key = read_secret(entry.parents[1])
            assert key is not None
            monkeypatch.setitem(ENVIRONMENT, "SERVER_KEY", key.token)
            lines = trained(example("external_sglang", f"llm_server.addresses=[{address}]"))
            assert lines[-1]["publish/servers"] == 1
            assert server.poll() is None, "it is not ours to stop"
        finally:
            server.terminate()


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_code_sandbox_runs_programs(example: Example) -> None:
    lines = trained(example("code_sandbox", "trainer.ppo.batch_size=32", of="code"))
    assert all(line["reward/parts/loaded"] > 0 for line in lines)
    assert max(line["reward/parts/passed"] for line in lines) > 0


def test_tool_use_calls_tools(example: Example) -> None:
    for line in trained(example("tool_use", of="calculator")):
        assert line["reward/parts/tool_calls"] > 0
        assert line["episode/turns_mean"] > 1, "a call is answered, and the answer read"


@pytest.mark.parametrize("name", ["openai_agent", "messages_agent", "langgraph_agent"])
def test_foreign_agents_call_their_tool(example: Example, name: str) -> None:
    if name == "langgraph_agent" and find_spec("langgraph") is None:
        pytest.skip("langgraph is not installed: make test-agents")
    for line in trained(example(name, of="foreign_agent")):
        assert line["reward/parts/tool_calls"] > 0
        assert line["episode/turns_mean"] > 1, "a call is answered, and the answer read"
        assert line["reward/parts/branches"] == 0, "each conversation is one segment"


def test_several_environments_train_both_parts(example: Example) -> None:
    done = example("several_environments", "trainer.ppo.batch_size=128", of="calculator")
    lines = trained(done)
    for part in ("sums", "calls"):
        assert any(f"reward/{part}/mean" in line for line in lines)
    shares = [line[f"curriculum/{part}/share"] for line in lines for part in ("sums", "calls")]
    assert all(0 < share < 1 for share in shares)


def test_debate_trains_both_seats(example: Example) -> None:
    for line in trained(example("debate", of="debate")):
        assert line["episode/trajectories"] == 2 * 64, "both seats are trained"
        assert 0 < line["reward/parts/score"] < 1
        assert {"reward/seat/pro/mean", "reward/seat/con/mean"} <= line.keys()


def test_self_play_evaluates_both_seats(example: Example) -> None:
    done = example(
        "self_play", "trainer.ppo.eval.num_prompts=0", "dataset.eval_rows=8", of="tic_tac_toe"
    )
    assert any(line["reward/min"] < 0 < line["reward/max"] for line in trained(done))
    told = [line for line in done.metrics() if "eval/reward" in line]
    assert len(told) == 2
    assert all({"eval/reward/as_x", "eval/reward/as_o"} <= line.keys() for line in told)


@needs_chromium
def test_browser_clicks_right_and_wrong_buttons(example: Example) -> None:
    # The page of the other task has a single button, so its batches have nothing wrong to click.
    tasks = "trainer.ppo.collector.env.browser.tasks=[click-test-2]"
    more = (tasks, "trainer.ppo.batch_size=32", "dataset.eval_rows=4")
    for line in trained(example("browser", *more, of="click_test")):
        assert line["reward/min"] == -1, "some buttons are wrong"
        assert line["reward/max"] > 0, "and some are right"
