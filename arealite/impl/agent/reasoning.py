"""A conversation with thoughts: the environment gets what follows a thought, and later prompts may
do without it.

A thought is dropped by cutting tokens, never by tokenising what is left. The prompt without it does
not extend the last one, so it begins a training segment.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

from arealite.api.episode import Action
from arealite.api.llm import LLMResponse
from arealite.impl.agent.chat import ChatAgent
from arealite.impl.agent.history import History, Piece


class Thought(NamedTuple):
    """Where a thought stands in the conversation."""

    prompt: Piece
    opening: str
    """How the prompt ends, where the template itself begins the thought."""
    answer: Piece
    length: int
    """Tokens that the answer begins with."""
    message: dict[str, Any]
    """The answer, as the template gets it: the opening and what was sampled."""


class ReasoningAgent(ChatAgent):
    """Thinks, up to a mark, then answers."""

    latest: Thought | None = None
    """Of the last answer."""

    def read(self, response: LLMResponse) -> Action:
        """Return the text after the thought; it is "" where the thought does not end."""
        history, begin, end = self.history, self.config.begin, self.config.end
        prompt = history.pieces[-1]
        is_begun = prompt.text.rstrip().endswith(begin)
        opening = prompt.text[prompt.text.rindex(begin) :] if is_begun else ""
        said = history.add(response, opening=opening)
        answer = history.pieces[-1]
        length, (_, mark, text) = 0, said.partition(end)
        if mark:
            text = text.lstrip()
            length = before(history, answer.ids, text + answer.text.removeprefix(said))
        elif begin not in opening + said:
            text = said
        else:  # the answer ended within the thought
            length = len(answer.ids) - (answer.text != said)
        past = self.latest
        self.latest = Thought(prompt, opening, answer, length, history.messages[-1])
        dropped = {"all": None, "last": past, "none": self.latest}[self.config.keep]
        if dropped is not None:
            drop(history, dropped)
        return Action(text, response, is_last=self.is_over())


def before(history: History, ids: list[int], tail: str) -> int:
    """Return how many tokens there are before those of `tail`, white space included; 0 where it
    begins within a token.

    It is looked for from the end: thoughts are long, and what follows them is short.
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
    """Cut a thought out of the conversation; it stays where tokens or template do not let it."""
    prompt, answer, opening = thought.prompt, thought.answer, thought.opening
    content, rest = thought.message["content"], history.decode(answer.ids[thought.length :])
    text = answer.text.removesuffix(rest)
    ends = (len(prompt.ids) - count for count in range(len(opening.encode()) + 1))
    end = next((end for end in ends if history.decode(prompt.ids[end:]) == opening), None)
    if not thought.length or end is None or not content.startswith(opening + text):
        return
    prompt.ids, prompt.text = prompt.ids[:end], prompt.text.removesuffix(opening)
    answer.ids, answer.text = answer.ids[thought.length :], rest
    thought.message["content"] = content[len(opening + text) :]
