"""A conversation with thoughts: the environment gets the text after a thought.

Later prompts may omit thoughts. A thought is dropped by removing its tokens; the rest is never
tokenised again. A prompt without an earlier thought does not extend the prompt before it, so it
starts a new training segment.
"""

from bisect import bisect_left
from typing import Any, NamedTuple

from arealite.api.episode import Action
from arealite.api.llm import LLMResponse
from arealite.impl.agent.chat import ChatAgent
from arealite.impl.agent.history import History, Piece


class Thought(NamedTuple):
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

    latest: Thought | None = None
    """The thought of the last answer."""

    def read(self, response: LLMResponse) -> Action:
        """Return an action with the text after the thought; "" if the thought does not end."""
        history = self.history
        begin = self.config.begin
        end = self.config.end
        prompt = history.pieces[-1]
        beginning = history.beginning
        _, has_ended, answer_start = beginning.rpartition(end)
        is_begun = prompt.text.rstrip().endswith(begin) or begin in answer_start
        opening = prompt.text[prompt.text.rindex(begin) :] if is_begun else ""
        whole = history.add(response, opening=opening)
        answer = history.pieces[-1]
        length, (_, marker, text) = 0, whole.partition(end)
        if marker:
            text = text.lstrip()
            length = tokens_before(history, answer.ids, text + answer.text.removeprefix(whole))
        elif begin not in opening + whole:
            text = (answer_start.lstrip() if has_ended else answer_start) + whole
        else:  # the answer ended inside the thought
            length = len(answer.ids) - (answer.text != whole)
        previous = self.latest
        self.latest = Thought(prompt, opening, answer, length, history.messages[-1])
        dropped = {"all": None, "last": previous, "none": self.latest}[self.config.keep]
        if dropped is not None:
            drop(history, dropped)
        return Action(text, response, is_last=self.is_over())


def tokens_before(history: History, ids: list[int], tail: str) -> int:
    """Return the number of tokens before `tail`, the end of the text of `ids`.

    White space before `tail` counts as before. The search starts at the end of `ids`, because
    thoughts are long and the text after them is short.

    Returns:
        The number of tokens; 0 if `tail` starts inside a token.
    """

    def fits(count: int) -> bool:
        return len(history.decode(ids[count:]).lstrip()) <= len(tail)

    width = 16
    while width < len(ids) and fits(len(ids) - width):
        width *= 2
    count = bisect_left(range(len(ids)), True, lo=max(0, len(ids) - width), key=fits)
    while history.decode(ids[count : count + 1]).isspace():
        count += 1
    return count if history.decode(ids[count:]).lstrip() == tail else 0


def drop(history: History, thought: Thought) -> None:
    """Remove a thought from the conversation.

    The thought stays if it ends inside a token, or if the message does not start with it.
    """
    prompt = thought.prompt
    answer = thought.answer
    opening = thought.opening
    content = thought.message["content"]
    rest = history.decode(answer.ids[thought.length :])
    text = answer.text.removesuffix(rest)
    ends = (len(prompt.ids) - count for count in range(len(opening.encode()) + 1))
    end = next((end for end in ends if history.decode(prompt.ids[end:]) == opening), None)
    if not thought.length or end is None or not content.startswith(opening + text):
        return
    prompt.ids = prompt.ids[:end]
    prompt.text = prompt.text.removesuffix(opening)
    answer.ids = answer.ids[thought.length :]
    answer.text = rest
    thought.message["content"] = content[len(opening + text) :]
