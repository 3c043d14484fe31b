"""The built-in agent: one prompt, one completion, for mathematics and code.

Its steps are small methods, so that an agent with another prompt or another reading of the
completion overrides only that one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from arealite.api.agent import Agent
from arealite.api.episode import Action
from arealite.api.llm import LLMResponse
from arealite.base.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class MathCodeSingleStepAgent(Agent):
    """Asks the task's prompt and acts with the whole completion."""

    async def act(self, observation: Any) -> Action:
        """Generate once after the observation, a text or a list of chat messages."""
        prompt = self.build_prompt(observation)
        response = await self.generate(tokenize(self.tokenizer, prompt))
        return Action(self.parse(response), response)

    def build_prompt(self, observation: Any) -> str | list[dict[str, Any]]:
        """Return the text to continue, or the chat messages to answer."""
        system = self.config.system_prompt if self.config is not None else None
        if system is None:
            return observation
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}]
        return [{"role": "system", "content": system}, *observation]

    def parse(self, response: LLMResponse) -> str:
        """Return what the completion says to the environment."""
        return str(self.tokenizer.decode(response.output_ids, skip_special_tokens=True))


_encode = msgspec.json.Encoder(order="deterministic").encode


def tokenize(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, Any]]) -> list[int]:
    """Turn a prompt into token ids; chat messages go through the chat template.

    The episodes of a group share one prompt, so the ids are cached by the prompt's content. The
    list is shared: nobody may change it.

    Raises:
        UserError: chat messages, and the tokenizer has no chat template.
    """
    return _tokenize(tokenizer, _encode(prompt))


@lru_cache(maxsize=4096)
def _tokenize(tokenizer: PreTrainedTokenizerBase, encoded: bytes) -> list[int]:
    prompt = msgspec.json.decode(encoded)
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]  # type: ignore[return-value]
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "The prompt is a list of chat messages, but the model's tokenizer has no chat "
            "template. Use a chat model, or write the dataset's prompts as plain text."
        )
    return tokenizer.apply_chat_template(  # type: ignore[return-value]
        prompt, tokenize=True, add_generation_prompt=True, return_dict=False
    )
