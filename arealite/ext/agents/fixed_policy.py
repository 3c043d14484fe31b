"""An agent with the frozen model of another run's server or of an OpenAI-style endpoint.

For opponents, partners and judges. Its answers are never trained on.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from arealite.api.agent import load_tokenizer
from arealite.api.episode import Action
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.llm import LLMClient, clients
from arealite.api.observation import ChatMessage, messages
from arealite.base.errors import EpisodeError, UserError
from arealite.ext.agents.chat import ChatAgent
from arealite.ext.agents.completions_client import CompletionsClient, FixedPolicyFailed
from arealite.ext.agents.config import FixedPolicyConfig


class FixedPolicyAgent(ChatAgent):
    """Answers in a conversation with a model that is not trained."""

    trainable = False

    def __init__(self, config: FixedPolicyConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.seat = replace(self.seat, sampling=config.sampling, min_version=0)
        self.messages: list[ChatMessage] = []
        """The conversation with an endpoint."""

    @classmethod
    @asynccontextmanager
    async def share(  # pyright: ignore
        cls, args: ExperimentConfig, config: FixedPolicyConfig
    ) -> AsyncIterator[tuple[LLMClient, Any] | CompletionsClient]:
        """Yield the model's client and tokenizer, or the endpoint; close them at the end.

        Raises:
            UserError: The config names no model or two models, or the model's folder is missing.
        """
        if bool(config.server) == bool(config.base_url):
            raise UserError(
                "agent.type=fixed_policy: "
                "set fixed_policy.server or fixed_policy.base_url, and not both."
            )
        if config.base_url:
            async with CompletionsClient.connect(config) as endpoint:
                yield endpoint
            return
        experiment, slash, trial = config.server.partition("/")
        if not slash:
            raise UserError(f"fixed_policy.server={config.server}: write EXPERIMENT/TRIAL.")
        model = replace(args.model, path=config.model_path or args.model.path)
        if not (Path(model.path) / "config.json").is_file():
            raise UserError(
                f"fixed_policy.model_path={model.path}: this folder has no config.json. "
                "Set the folder of the model that the server serves."
            )
        args_of_server = replace(
            args,
            experiment_name=experiment,
            trial_name=trial,
            model=model,
        )
        client_config = args.trainer.ppo.collector.client
        client_class = clients.get(client_config.type)
        client = client_class(args_of_server, client_config)
        tokenizer = await asyncio.to_thread(load_tokenizer, model.path)
        try:
            await client.start()
            yield client, tokenizer
        finally:
            await client.close()

    async def act(self, observation: object) -> Action:
        """Append the observation to the conversation and return the model's answer.

        Raises:
            FixedPolicyFailed: The model gave no answer.
        """
        if isinstance(self.shared, CompletionsClient):
            return await self.ask(self.shared, observation)
        self.client, self.tokenizer = self.shared
        try:
            return await super().act(observation)
        except EpisodeError as error:
            raise FixedPolicyFailed(f"{type(error).__name__}: {error}") from error

    async def ask(self, endpoint: CompletionsClient, observation: object) -> Action:
        """Append the observation to the conversation and return the endpoint's answer."""
        turn = sum(message["role"] == "assistant" for message in self.messages)
        if turn == self.config.max_turns:
            return Action("", is_last=True)
        system = None if self.messages else self.config.system_prompt
        self.messages += messages(observation, system=system)
        answer = await endpoint.ask(self.messages, owner=f"seat {self.seat.name}")
        self.messages.append({"role": "assistant", "content": answer})
        return Action(answer, is_last=turn + 1 == self.config.max_turns)
