"""An environment of verifiers: its proxy stands between the agent and the gateway.

verifiers bounds the versions of openai and mcp, so it has a virtual environment of its own.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import verifiers.v1 as vf
from clients import openai_chat
from clients.tools import Job
from openai import AsyncOpenAI
from verifiers.v1.utils import loaders

__all__ = ["PlayHarness", "QuestionTaskset"]
ID = "verifiers_agent"  # verifiers looks for a module without a package
sys.path.append(os.path.dirname(__file__))


class QuestionTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """A task without a reward."""

    @vf.reward(weight=1.0)
    async def answered(self, trace: Any) -> float:
        """Return 1 for any answer."""
        return float(bool(trace.last_reply))


class QuestionTaskset(vf.Taskset[QuestionTask, vf.TasksetConfig]):
    """One task."""

    def load(self) -> Any:
        """Yield it."""
        yield QuestionTask(vf.TaskData(prompt="the questions"), self.config.task)


class PlayConfig(vf.HarnessConfig):
    """The questions, and whether to stream."""

    questions: list[str] = []  # noqa: RUF012  (pydantic copies it)
    is_stream: bool = False


class PlayHarness(vf.Harness[PlayConfig]):
    """Plays the session of the openai SDK through verifiers' proxy."""

    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
        tool_interception_url: Any = None,
    ) -> Any:
        """Ask the questions."""
        given = {"is_stream": self.config.is_stream, "questions": self.config.questions}
        job = Job(endpoint, "", secret, ctx.model, folder="", **given)
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        return vf.ProgramResult(0, await openai_chat.play(job, client), "")


async def play(job: Job) -> str:
    """Run one episode of the environment."""
    harness = {"id": ID, "is_stream": job.is_stream, "questions": job.questions}
    agent = {"runtime": {"type": "subprocess"}, "harness": harness}
    options = {"taskset": {"id": ID}, "agent": agent}
    env: Any = loaders.load_environment(loaders.resolve_env_config(options))
    name = f"KEY_{abs(hash(job.api_key))}"
    os.environ[name] = job.api_key
    client = vf.EvalClientConfig(base_url=job.base_url, api_key_var=name)
    async with env.serving():
        task = next(iter(env.taskset))
        episode = await env.run_episode(task, vf.ModelContext(model=job.model, client=client))
    if not episode.ok:
        errors = [each for trace in (*episode.traces, episode) for each in trace.errors]
        raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
    return str(episode.traces[0].last_reply)
