"""A conversation with thoughts: the environment gets the text after a thought.

Later prompts may omit thoughts. A thought is dropped by removing its tokens; the rest is never
tokenised again. A prompt without an earlier thought does not extend the prompt before it, so it
starts a new training segment.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from arealite.api.episode import Action
from arealite.api.llm import LLMResponse
from arealite.ext.agents.chat import ChatAgent
from arealite.ext.agents.history import History, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """Position of a thought in the conversation."""

    prompt: Piece
    opening: str
    """End of the prompt, if the template itself starts the thought; else ""."""
    answer: Piece
    length: int
    """Number of tokens at the start of the answer that are the thought."""
    message: dict[str, Any]
    """The chat message of the answer: `opening` and the sampled text."""


class ReasoningAgent(ChatAgent):
    """Answers with a thought first, which ends with the marker `end`."""

    templates_observation = True
    latest: Thought | None = None
    """The thought of the last answer."""

    def read(self, response: LLMResponse) -> Action:
        """Return an action with the text after the thought; "" if the thought does not end."""
        history = self.history
        begin = self.config.begin
        end = self.config.end
        prompt = history.pieces[-1]
        _, ended_before, answer_start = history.beginning.rpartition(end)
        is_begun = prompt.text.rstrip().endswith(begin) or begin in answer_start
        opening = prompt.text[prompt.text.rindex(begin) :] if is_begun else ""
        sampled_text = history.add(response, opening=opening)
        answer = history.pieces[-1]
        _, end_marker, after_thought = sampled_text.partition(end)
        if end_marker:
            action_text = after_thought.lstrip()
            stop = answer.text.removeprefix(sampled_text)
            num_thought_tokens = tokens_before(history, answer.ids, action_text + stop)
        elif begin not in opening + sampled_text:  # there is no thought
            start = answer_start.lstrip() if ended_before else answer_start
            action_text = start + sampled_text
            num_thought_tokens = 0
        else:  # the answer ended inside the thought
            action_text = ""
            has_stop = answer.text != sampled_text
            num_thought_tokens = len(answer.ids) - has_stop
        self._keep(
            Thought(
                prompt=prompt,
                opening=opening,
                answer=answer,
                length=num_thought_tokens,
                message=history.messages[-1],
            )
        )
        return Action(action_text, response, is_last=self.is_over())

    def _keep(self, thought: Thought) -> None:
        """Remember the latest thought; drop the thought that the option `keep` excludes."""
        previous = self.latest
        self.latest = thought
        if self.config.keep == "none":
            drop(self.history, thought)
        elif self.config.keep == "last" and previous is not None:
            drop(self.history, previous)


def tokens_before(history: History, ids: list[int], tail: str) -> int:
    """Return the number of tokens before `tail`, the end of the text of `ids`.

    White space before `tail` counts as before. The search starts at the end of `ids`, because
    thoughts are long and the text after them is short.

    Returns:
        The number of tokens; 0 if `tail` starts inside a token.
    """

    def text_after(count: int) -> str:
        return history.decode(ids[count:]).lstrip()

    def fits(count: int) -> bool:
        return len(text_after(count)) <= len(tail)

    width = 16
    while width < len(ids) and fits(len(ids) - width):
        width *= 2
    lowest = max(0, len(ids) - width)
    count = bisect_left(range(len(ids)), True, lo=lowest, key=fits)
    while history.decode(ids[count : count + 1]).isspace():
        count += 1
    return count if text_after(count) == tail else 0


def drop(history: History, thought: Thought) -> None:
    """Remove a thought from the conversation.

    The thought stays if it ends inside a token, or if the message does not start with it.
    """
    prompt = thought.prompt
    answer = thought.answer
    opening = thought.opening
    ids_after = answer.ids[thought.length :]
    text_after = history.decode(ids_after)
    thought_text = opening + answer.text.removesuffix(text_after)
    prompt_end = opening_position(history, prompt, opening)
    content = thought.message["content"]
    if not thought.length or prompt_end is None or not content.startswith(thought_text):
        return
    prompt.ids = prompt.ids[:prompt_end]
    prompt.text = prompt.text.removesuffix(opening)
    answer.ids = ids_after
    answer.text = text_after
    thought.message["content"] = content.removeprefix(thought_text)


def opening_position(history: History, prompt: Piece, opening: str) -> int | None:
    """Return the position of the token at which `opening`, the end of the prompt, starts.

    Returns:
        The position; None if `opening` starts inside a token.
    """
    for num_tokens in range(len(opening.encode()) + 1):
        start = len(prompt.ids) - num_tokens
        if history.decode(prompt.ids[start:]) == opening:
            return start
    return None
