"""The default agent: one prompt and one completion, for mathematics and code.

A derived agent overrides `build_prompt` to change the prompt, or `parse` to read the completion
differently.
"""

from arealite.api.agent import Agent
from arealite.api.collector_config import MathCodeSingleStepConfig
from arealite.api.episode import Action
from arealite.api.llm import LLMResponse
from arealite.api.observation import ChatMessage, messages, observe
from arealite.system.data.templates import beginning_of, tokenize


class MathCodeSingleStepAgent(Agent):
    """Sends the task's prompt and acts with the whole completion."""

    templates_observation = True
    beginning = ""
    """The beginning of the answer, if the prompt's last message is the assistant's."""

    async def act(self, observation: object) -> Action:
        """Generate one completion for an observation, a text or a list of chat messages."""
        prompt = self.build_prompt(observation)
        self.beginning = beginning_of(prompt)
        prompt_ids = tokenize(self.tokenizer, prompt)
        response = await self.generate(prompt_ids)
        return Action(self.parse(response), response)

    def build_prompt(
        self,
        observation: object,
    ) -> str | list[ChatMessage]:
        """Return the chat messages to answer, or the text to continue.

        A text is sent as it is. Without a chat template, a text observation is returned as text.
        """
        config = self.config or MathCodeSingleStepConfig()
        is_chat = config.use_chat_template
        if is_chat is None:
            is_chat = bool(getattr(self.tokenizer, "chat_template", None))
        if config.system_prompt is None and not is_chat:
            return observe(observation).content
        return messages(observation, system=config.system_prompt)

    def parse(self, response: LLMResponse) -> str:
        """Return the action's text: the completion without special tokens, after `beginning`."""
        completion = self.tokenizer.decode(response.output_ids, skip_special_tokens=True)
        return f"{self.beginning}{completion}"
