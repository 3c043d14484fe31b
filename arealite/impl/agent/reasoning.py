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
            length, text = after(history, answer.ids, end), text.lstrip()
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


def after(history: History, ids: list[int], mark: str) -> int:
    """Return how many tokens there are up to the mark and the white space behind it; 0 where it
    ends within a token."""
    count = bisect_left(
        range(len(ids)), True, key=lambda count: mark in history.decode(ids[:count])
    )
    if not history.decode(ids[:count]).rstrip().endswith(mark):
        return 0
    while history.decode(ids[count : count + 1]).isspace():
        count += 1
    return count


def drop(history: History, thought: Thought) -> None:
    """Cut a thought out of the conversation; it stays where tokens or template do not let it."""
    prompt, answer, opening = thought.prompt, thought.answer, thought.opening
    text, content = history.decode(answer.ids[: thought.length]), thought.message["content"]
    ends = (len(prompt.ids) - count for count in range(len(opening.encode()) + 1))
    end = next((end for end in ends if history.decode(prompt.ids[end:]) == opening), None)
    if not thought.length or end is None or not content.startswith(opening + text):
        return
    prompt.ids, prompt.text = prompt.ids[:end], prompt.text.removesuffix(opening)
    answer.ids, answer.text = answer.ids[thought.length :], answer.text.removeprefix(text)
    thought.message["content"] = content[len(opening + text) :]
