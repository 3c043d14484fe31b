"""Environments of the library verifiers: their agents use the gateway, their rewards train it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.episode import Seat
from arealite.api.llm import LLMRequest, LLMResponse, SamplingConfig
from arealite.api.task import Task
from arealite.api.trial import TrialConfig
from arealite.base.errors import UserError
from arealite.ext.adapters.config import VerifiersConfig
from arealite.ext.adapters.verifiers import VerifiersEnv
from tests.ext.games.players import first_rows
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import tokenizer
from tests.fakes.gateway import Foreign

PACKAGE = """
import httpx
import verifiers.v1 as vf

__all__ = ["SumTaskset", "ChatHarness"] + TWO * ["DebateEnv"]


class SumTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == str(sum(range(task.idx))))

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return 1.0 if len(trace.last_reply) < 4 else 0.0


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for n in range(20):
            yield SumTask(vf.TaskData(prompt=f"sum of 0..{n - 1}?"), self.config.task)


class ChatConfig(vf.HarnessConfig):
    turns: int = 2


class ChatHarness(vf.Harness[ChatConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        messages = [{"role": "user", "content": data.prompt}]
        url, headers = f"{endpoint}/chat/completions", {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=60) as http:
            for _ in range(self.config.turns):
                reply = await http.post(url, json={"model": ctx.model, "messages": messages})
                reply.raise_for_status()
                answer = reply.json()["choices"][0]["message"]
                messages += [answer, {"role": "user", "content": "again"}]
        return vf.ProgramResult(0, "", "")


class DebateConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class DebateEnv(vf.Env[DebateConfig]):
    async def run(self, task, agents):
        await agents.solver.run(task)
        await agents.judge.run(task)
"""


def answer(request: LLMRequest) -> LLMResponse | Exception:
    """Answer with the sum of the numbers before that of the prompt; seat `judge` says "no idea"."""
    text = tokenizer().decode(request.input_ids)
    if "/judge/" in request.request_id:
        return response([*tokenizer().encode("no idea"), tokenizer().eos_token_id])
    last = int(text.partition("0..")[2].partition("?")[0])
    return response([*tokenizer().encode(str(sum(range(last + 1)))), tokenizer().eos_token_id])


def make(**options: Any) -> Env:
    return VerifiersEnv(TrialConfig(), VerifiersConfig(**options))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write environments of the library; those of two agents have the suffix _two."""
    pytest.importorskip("verifiers", reason="needs the extra verifiers", exc_type=ImportError)
    for name, two in (("arealite_sums", 0), ("arealite_sums_two", 1)):
        (tmp_path / f"{name}.py").write_text(PACKAGE.replace("TWO", str(two)))
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
async def env(package: None, request: Any) -> AsyncIterator[Env]:
    made = make(**{"id": "arealite_sums"} | getattr(request, "param", {}))
    await made.setup()
    try:
        yield made
    finally:
        await made.close()


def agents(env: Env, number: int = 0, client: ScriptedClient | None = None) -> dict[str, Agent]:
    """Return agents of a new episode."""
    sampling = SamplingConfig(max_new_tokens=64)
    client = client or ScriptedClient(answer)
    return {
        name: Foreign(
            None,
            client=client,
            tokenizer=tokenizer(),
            seat=Seat(name=name, episode_id=f"e{number}", sampling=sampling),
        )
        for name in env.seats
    }


def task_of(row: dict[str, Any]) -> Task:
    return Task(
        task_id="train-0", prompt=row["prompt"], ground_truth=None, extra_info=row["extra_info"]
    )


async def test_weighted_rewards_are_parts_of_the_reward(env: Env) -> None:
    (row,) = (r for r in first_rows(env, 18) if r["prompt"] == "sum of 0..7?")
    seats = agents(env)
    await env.run(task_of(row), **seats)
    record = seats["agent"].record
    assert record.reward_parts == {"right": 2.0, "short": 0.5}
    assert [turn.reward for turn in record.turns] == [0.0, 2.5]
    first, second = record.turns
    told = [*first.input_ids, *first.response.output_ids]
    assert second.input_ids[: len(told)] == told


async def test_concurrent_episodes_use_their_own_sessions(env: Env) -> None:
    rows = first_rows(env, 12)
    played = [agents(env, number) for number in range(12)]
    await asyncio.gather(*(env.run(task_of(r), **p) for r, p in zip(rows, played, strict=True)))
    for row, seats in zip(rows, played, strict=True):
        prompts = [tokenizer().decode(t.input_ids) for t in seats["agent"].record.turns]
        assert len(prompts) == 2
        assert all(row["prompt"] in prompt for prompt in prompts)


@pytest.mark.parametrize(
    "env",
    [{"id": "arealite_sums_two", "seats": ["solver", "judge"]}],
    indirect=True,
)
async def test_each_agent_of_an_environment_has_its_seat(env: Env) -> None:
    (row,) = (r for r in first_rows(env, 18) if r["prompt"] == "sum of 0..7?")
    seats = agents(env)
    await env.run(task_of(row), **seats)
    assert seats["solver"].record.reward_parts == {"right": 2.0, "short": 0.5}
    assert seats["judge"].record.reward_parts == {"right": 0.0, "short": 0.0}


@pytest.mark.parametrize(
    "env", [{"options": {"agent": {"harness": {"id": "arealite_sums", "turns": 1}}}}], indirect=True
)
async def test_options_are_those_of_verifiers(env: Env) -> None:
    seats = agents(env)
    await env.run(task_of(first_rows(env, 1)[0]), **seats)
    assert len(seats["agent"].record.turns) == 1


async def test_failed_episode_names_the_error_of_the_environment(env: Env) -> None:
    def fail(request: LLMRequest) -> LLMResponse | Exception:
        return RuntimeError("no server")

    with pytest.raises(RuntimeError, match="no server"):
        await env.run(task_of(first_rows(env, 1)[0]), **agents(env, 0, ScriptedClient(fail)))
    row = first_rows(env, 1)[0]
    with pytest.raises(UserError, match=r"no task of verifiers\.id=arealite_sums"):
        await env.run(task_of(row | {"extra_info": {"number": 0, "key": "x"}}), **agents(env))


def test_rows_are_seeded_and_splits_share_no_task(package: None) -> None:
    env = make(id="arealite_sums")
    train = [row["extra_info"]["number"] for row in first_rows(env, 36)]
    assert train == [row["extra_info"]["number"] for row in first_rows(env, 36)]
    assert train != [row["extra_info"]["number"] for row in first_rows(env, 36, seed=2)]
    assert sorted(train[:18]) == sorted(train[18:]) and train[:18] != train[18:]
    held_out = {row["extra_info"]["number"] for row in first_rows(env, 4, split="eval")}
    assert held_out == {9, 19} and not held_out & {*train}


def test_missing_environment_is_a_user_error(package: None) -> None:
    with pytest.raises(UserError, match=r"verifiers\.id='not_there' .*not found"):
        first_rows(make(id="not_there"), 1)
    with pytest.raises(UserError, match=r"with .*agnet.* Extra inputs are not permitted"):
        first_rows(make(id="arealite_sums", options={"agnet": {}}), 1)
    with pytest.raises(UserError, match=r"verifiers\.id='' .*needs a seed taskset"):
        first_rows(make(), 1)


def test_missing_package_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(UserError, match=r"verifiers is not installed: pip install .*verifiers"):
        first_rows(make(id="x"), 1)
