"""`arealite eval` and `collect` without a server: a scripted client answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arealite.api.agent import Agent
from arealite.api.env import Env, envs
from arealite.api.llm import LLMRequest, LLMResponse, clients
from arealite.api.task import Task
from arealite.base.errors import RewardTimeout
from arealite.cli.main import main
from arealite.ext.evaluation import sampling_run
from arealite.system.names.name_registry import Entry
from tests.fakes.client import ScriptedClient, response
from tests.impl.rollout import worlds
from tests.models import tiny_model

assert worlds is not None


@clients.register("scripted")
class Answering(ScriptedClient):
    """A client whose answer has one letter more than the sample's number: 0 → "a", 1 → "aa", …"""

    asked: list[LLMRequest] = []  # noqa: RUF012

    def __init__(self, args: Any, config: Any) -> None:
        super().__init__(self.answer)

    def answer(self, request: LLMRequest) -> LLMResponse:
        Answering.asked.append(request)
        member = int(request.request_id.split("/")[1])
        return response([13] * (member + 1), version=5)


@envs.register("letters")
class Letters(Env):
    """An environment with one point per letter; the prompt "check" fails."""

    async def run(self, task: Task, **agents: Agent) -> None:
        action = await agents["agent"].act(task.prompt)
        if task.prompt == "check":
            raise RewardTimeout("killed")
        if task.prompt == "unscored" and len(action.text) != 2:
            agents["agent"].reward(None)
            return
        rare = {"rare": 0.5} if len(action.text) == 1 else {}
        agents["agent"].reward(float(len(action.text)), length=1.0, **rare)


class Command:
    """A command that runs in a folder."""

    def __init__(self, folder: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.command, self._capsys = folder, command, capsys
        self.model = tiny_model(folder / "model")
        self.rows = folder / "rows.jsonl"
        self.out = ""
        Answering.asked.clear()

    def write(self, *rows: dict[str, Any]) -> None:
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def __call__(self, *words: str, env: str = "letters") -> int:
        split = "eval" if self.command == "eval" else "train"
        code = main(
            [
                self.command,
                *(f"model.path={self.model}", f"cluster.run_root={self.folder / 'runs'}"),
                *(f"cluster.name_root={self.folder / 'names'}", f"dataset.{split}={self.rows}"),
                f"trainer.ppo.collector.env.type={env}",
                "trainer.ppo.collector.client.type=scripted",
                *words,
            ]
        )
        captured = self._capsys.readouterr()
        self.out = captured.out + captured.err
        return code


def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the preflight check so that it finds a server."""
    server = Entry(role="llm_server", id="a", value={"context_length": 512}, age_s=0.0)
    monkeypatch.setattr(sampling_run.preflight, "find_servers", lambda config, model: [server])
    monkeypatch.setattr(sampling_run.log, "setup", lambda *_: None)  # the captured stderr is closed
