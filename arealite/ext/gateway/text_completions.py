"""The prompts and answers of /v1/completions, whose texts continue each other."""

from collections.abc import Callable
from dataclasses import dataclass

from arealite.api.episode import Origin
from arealite.ext.agents.turn_tokens import encode_after
from arealite.ext.gateway.rendering import Renderer
from arealite.ext.gateway.request_data import ApiError, ParsedAnswer
from arealite.ext.gateway.tree import Prompt
from arealite.system.data.templates import tokenize


@dataclass(eq=False, kw_only=True)
class TextCompletion:
    """The beginning of a text that continues an answer of /v1/completions."""

    prefix: str
    ids: list[int]
    reason: str = ""
    """`Origin.reason` of the next prompt that begins with it."""


class TextCompletions:
    """The answers of one seat that later prompts of /v1/completions may continue."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self._completions: list[TextCompletion] = []

    def add(
        self,
        prompt: Prompt,
        answer: ParsedAnswer,
        output_ids: list[int],
        stop: str,
    ) -> None:
        """Add an answer.

        Args:
            prompt: Its prompt.
            answer: The answer.
            output_ids: Its tokens.
            stop: Text of the special token that ended the answer; "" if there is none.
        """
        prefix = prompt.template_text + answer.text
        ids = prompt.ids + output_ids
        if stop:  # a client may go on without the token that ended the answer
            without_stop = TextCompletion(prefix=prefix, ids=ids[:-1], reason="edited")
            self._completions.append(without_stop)
        prefix += answer.stop_string or stop
        self._completions.append(TextCompletion(prefix=prefix, ids=ids))

    def prompt(self, requested: str | list[int]) -> Prompt:
        """Return the prompt of a text or of tokens, which may continue an earlier completion.

        Raises:
            ApiError: 400: an id is not that of a token.
        """
        if isinstance(requested, str):
            prompt_text = requested
            continued = self._longest(lambda earlier: prompt_text.startswith(earlier.prefix))
            ids = self._encode(prompt_text, continued)
        else:
            ids = requested
            self._check_ids(ids)
            continued = self._longest(lambda earlier: ids[: len(earlier.ids)] == earlier.ids)
            prompt_text = self.renderer.tokenizer.decode(ids)
        num_reused = len(continued.ids)
        origin = Origin(
            reused=num_reused,
            new=len(ids) - num_reused,
            reason=continued.reason,
        )
        continued.reason = "edited"
        return Prompt(ids=ids, origin=origin, template_text=prompt_text)

    def _check_ids(self, ids: list[int]) -> None:
        vocab_size = len(self.renderer.tokenizer)
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise ApiError(400, f"prompt has ids that are not tokens. Ids are below {vocab_size}")

    def _longest(self, is_continued: Callable[[TextCompletion], bool]) -> TextCompletion:
        """Return the continued completion with the most tokens; an empty one if there is none."""
        reason = "edited" if self._completions else "first"
        empty = TextCompletion(prefix="", ids=[], reason=reason)
        continued = filter(is_continued, self._completions)
        return max(continued, key=lambda completion: len(completion.ids), default=empty)

    def _encode(self, prompt_text: str, continued: TextCompletion) -> list[int]:
        """Tokenise a text, but for the beginning whose tokens are reused."""
        if not continued.ids:
            return tokenize(self.renderer.tokenizer, prompt_text)
        new_text = prompt_text[len(continued.prefix) :]
        return continued.ids + encode_after(self.renderer.tokenizer, continued.ids, new_text)
