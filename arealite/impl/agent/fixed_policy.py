"""A seat played by another model, frozen: a server of ours, or an OpenAI-style endpoint.

For opponents, partners and judges; nothing it says is trained on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from arealite.api.agent import load_tokenizer
from arealite.api.agent_config import FixedPolicyConfig
from arealite.api.config import ExperimentConfig
from arealite.api.episode import Action
from arealite.api.llm import LLMClient, clients
from arealite.api.observation import messages
from arealite.base.errors import EpisodeError, UserError
from arealite.impl.agent.chat import ChatAgent
from arealite.impl.agent.completions import Completions, FixedPolicyFailed


class Frozen(NamedTuple):
    """What is needed to generate with a server's model."""

    client: LLMClient
    tokenizer: Any


class FixedPolicyAgent(ChatAgent):
    """Answers within a conversation, as a model that is not trained."""

    trainable = False

    def __init__(self, config: Any, **about: Any) -> None:
        super().__init__(config, **about)
        self.seat = replace(self.seat, sampling=config.sampling, min_version=0)
        self.said: list[dict[str, Any]] = []
        """The conversation with an endpoint."""

    @classmethod
    @asynccontextmanager
    async def share(  # pyright: ignore
        cls, args: ExperimentConfig, config: FixedPolicyConfig
    ) -> AsyncIterator[Frozen | Completions]:
        """Open what leads to the model.

        Raises:
            UserError: the config names none, or two.
        """
        if bool(config.server) == bool(config.base_url):
            raise UserError("agent.type=fixed_policy needs fixed_policy.server, or else .base_url.")
        if config.base_url:
            async with Completions.connect(config) as endpoint:
                yield endpoint
            return
        experiment, slash, trial = config.server.partition("/")
        if not slash:
            raise UserError(f"fixed_policy.server={config.server}: write EXPERIMENT/TRIAL.")
        model = replace(args.model, path=config.model_path or args.model.path)
        if not (Path(model.path) / "config.json").is_file():
            raise UserError(f"fixed_policy.model_path: {model.path} is no model folder.")
        other = replace(args, experiment_name=experiment, trial_name=trial, model=model)
        own = args.trainer.ppo.collector.client
        client = clients.get(own.type)(other, own)
        tokenizer = await asyncio.to_thread(load_tokenizer, model.path)
        try:
            await client.start()
            yield Frozen(client, tokenizer)
        finally:
            await client.close()

    async def act(self, observation: Any) -> Action:
        """Generate after the conversation and the observation.

        Raises:
            FixedPolicyFailed: the model gave no answer.
        """
        if isinstance(self.shared, Completions):
            return await self.ask(self.shared, observation)
        self.client, self.tokenizer = self.shared
        try:
            return await super().act(observation)
        except EpisodeError as error:
            raise FixedPolicyFailed(f"{type(error).__name__}: {error}") from error

    async def ask(self, endpoint: Completions, observation: Any) -> Action:
        """Act through an endpoint."""
        turn = sum(each["role"] == "assistant" for each in self.said)
        if turn == self.config.max_turns:
            return Action("", is_last=True)
        self.said += messages(observation, system=None if self.said else self.config.system_prompt)
        text = await endpoint.ask(self.said, owner=f"seat {self.seat.name}")
        self.said.append({"role": "assistant", "content": text})
        return Action(text, is_last=turn + 1 == self.config.max_turns)
