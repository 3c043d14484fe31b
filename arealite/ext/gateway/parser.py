"""Parse sampled tokens into a thought, a text and tool calls, whole or while they are sampled."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from arealite.api.llm import LLMResponse
from arealite.api.observation import ToolCall
from arealite.ext.agents.turn_tokens import special_text
from arealite.ext.gateway.families import FAMILIES, CallError, Family, MarkedPart, ToolSchemas, skip
from arealite.ext.gateway.rendering import Renderer, any_of
from arealite.ext.gateway.request_data import (
    ChatRequest,
    Delta,
    ParsedAnswer,
    ParsedCall,
    StopReason,
)
from arealite.ext.gateway.tree import Prompt
from arealite.system.data.templates import decode

SHORT = 2048
"""An unfinished call up to this length is read again with each new text."""
GROWTH = 8
"""A longer call is read again after it has grown by 1 / GROWTH of its length."""
WINDOW = 32
"""Longest sequence of earlier tokens that is decoded again with new ones."""
MAX_REPLACEMENTS = 3
"""Most replacement characters at the end of a text that may be the bytes of half a character."""


class AnswerPiece(NamedTuple):
    """A part of an answer."""

    kind: str
    """One of "text", "thought" and "call"."""
    content: str
    call: ParsedCall | None = None


def unfinished(unread: str, words: Iterable[str], start: int = 0) -> int:
    """Return the length of the longest end of `unread[start:]` that may be the start of a word."""
    num_characters = len(unread) - start
    sizes = [
        size
        for word in words
        for size in range(1, min(num_characters + 1, len(word)))
        if unread.endswith(word[:size])
    ]
    return max(sizes, default=0)


class Scanner:
    """Splits an answer of a family into pieces. Time is linear in the length of the answer."""

    def __init__(self, family: Family, tools: ToolSchemas = (), *, has_calls: bool = True) -> None:
        if not has_calls and not family.has_channels:
            family = replace(family, openers=(), first=(), noise=())
        self.family = family
        self.tools = tools
        self.mode = "start"
        """One of "start", "text", "thought", and "part" (at a marker of a call or a header)."""
        self.unread = ""
        """Text that is not a part of a piece yet."""
        self.at = 0
        """Index in `unread`."""
        self.new_text = ""
        """Text that is not added to `unread` yet."""
        self.pieces: list[AnswerPiece] = []
        self.first = [*family.first]
        if family.think[0]:
            self.first.append(family.think[0])
        words = [*family.openers, *family.noise]
        self.ends: dict[str, Sequence[str]] = {
            "text": words,
            "thought": words if family.has_channels else family.think[1:],
        }
        """Markers that may end a text or a thought."""
        self.patterns = {mode: re.compile(any_of(markers)) for mode, markers in self.ends.items()}

    def feed(self, new_text: str, *, is_end: bool = False) -> list[AnswerPiece]:
        """Return the pieces that are certain after more text; at the end, all that are left."""
        self.new_text += new_text
        is_long = len(self.unread) > SHORT
        has_grown = len(self.new_text) * GROWTH >= len(self.unread)
        if is_long and not has_grown and not is_end:
            return []  # reading a long call again for each token would take quadratic time
        self.unread += self.new_text
        self.new_text = ""
        self.at = 0
        while self.at < len(self.unread) and self._step(is_end):
            pass
        pieces = self.pieces
        self.pieces = []
        self.unread = self.unread[self.at :]
        return pieces

    def _step(self, is_end: bool) -> bool:
        """Read on as the mode requires; return False if more text is needed."""
        if self.mode == "start":
            return self._start(is_end)
        if self.mode == "part":
            return self._part(is_end)
        return self._text(is_end)

    def _start(self, is_end: bool) -> bool:
        """Look for a marker that stands only at the start."""
        begin = skip(self.unread, self.at, r"\s;")
        for marker in self.first:
            if self.unread.startswith(marker, begin):
                self._read_first(marker, begin)
                return True
        if not is_end and self._may_have_first(begin):
            return False
        self.mode = "text"
        return True

    def _read_first(self, marker: str, begin: int) -> None:
        """Begin the thought or the call of a marker at the start."""
        if marker == self.family.think[0]:
            self.mode = "thought"
            self.at = begin + len(marker)
        else:
            self.mode = "part"
            self.at = begin

    def _may_have_first(self, begin: int) -> bool:
        """Return whether the text so far may be the start of a marker."""
        return any(
            marker.startswith(self.unread[begin : begin + len(marker)]) for marker in self.first
        )

    def _text(self, is_end: bool) -> bool:
        """Take a text or thought up to a marker, or all that cannot be the start of one."""
        marker = self.patterns[self.mode].search(self.unread, self.at)
        if marker:
            end = marker.start()
        elif is_end:
            end = len(self.unread)
        else:
            num_uncertain = unfinished(self.unread, self.ends[self.mode], self.at)
            end = len(self.unread) - num_uncertain
        if end > self.at:
            piece = AnswerPiece(self.mode, self.unread[self.at : end])
            self.pieces.append(piece)
        self.at = end
        if not marker:
            return False
        if marker[0] in self.family.openers:
            self.mode = "part"
            return True
        self.at = marker.end()
        self.mode = "text" if marker[0] in self.ends["text"] else "start"
        return True

    def _part(self, is_end: bool) -> bool:
        """Read the part at a marker."""
        try:
            part = self.family.parse(self.unread, self.at, self.tools)
        except CallError as error:
            end = self._end_of_malformed(error, is_end)
            if end is None:
                return False
            malformed = ParsedCall(
                error=str(error),
                raw=self.unread[self.at : end],
            )
            part = MarkedPart(end, [malformed])
        raw = self.unread[self.at : part.end]
        self.at = part.end
        if raw[0] == "{" and '"name"' not in raw:  # JSON, but not a call
            self.mode = "text"
            self.pieces.append(AnswerPiece("text", raw))
            return True
        self.mode = part.mode
        for call in part.calls:
            self.pieces.append(AnswerPiece("call", call.raw, call))
        if not part.calls:  # a header: separates a message from the one before
            self.pieces.append(AnswerPiece(self.mode, "\n"))
        return True

    def _end_of_malformed(self, error: CallError, is_end: bool) -> int | None:
        """Return the end of a malformed call: its close marker or the end of the answer.

        None: the call may be complete with more text.
        """
        close = self.family.close
        if close and (is_end or error.at is not None):
            close_start = self.unread.find(close, error.at or self.at)
            if close_start >= 0:
                return close_start + len(close)
        return len(self.unread) if is_end else None


def read_calls(
    answer: str, family: Family, tools: ToolSchemas = (), *, ids: str = "call_{}"
) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text around the calls of a whole answer, and its calls, also malformed ones.

    Args:
        answer: The answer.
        family: The family of the model.
        tools: The tools, by which arguments without types are converted.
        ids: Form of the ids of calls.
    """
    scanner = Scanner(family, tools)
    pieces = scanner.feed(answer, is_end=True)
    texts = [piece.content for piece in pieces if piece.kind == "text"]
    parsed_calls = [piece.call for piece in pieces if piece.call]
    calls = [
        ToolCall(
            call_id=ids.format(number),
            name=call.name,
            arguments=msgspec.json.decode(call.arguments),
            error=call.error,
        )
        for number, call in enumerate(parsed_calls)
    ]
    return "".join(texts), tuple(calls)


class Parser:
    """Parses one answer.

    Args:
        renderer: Has the model's tokenizer and family.
        request: The request that is answered.
        prompt: Its prompt.
        id: `ParsedAnswer.id`.
        index: Number of the answer, below `request.n`.
    """

    def __init__(
        self,
        renderer: Renderer,
        request: ChatRequest,
        prompt: Prompt,
        *,
        id: str,
        index: int,
    ) -> None:
        self.is_raw = request.prompt is not None
        self.family = FAMILIES["text"] if self.is_raw else renderer.family
        self.request = request
        self.prompt = prompt
        self.id = id
        self.index = index
        self.has_calls = bool(request.tools) and request.tool_choice != "none"
        self.scanner = Scanner(self.family, request.tools, has_calls=self.has_calls)
        self.scanner.new_text = prompt.opening  # read with the first text
        self.decoder = StreamDecoder(renderer.tokenizer)
        self.tokenizer = renderer.tokenizer
        self.num_fed = 0
        """Number of tokens that were fed."""
        self.last_ids = list[int]()
        """The last token, if it is special: it is no text if it ends the answer."""
        self.uncertain = ""
        """Text that may be the start of a stop string."""
        self.stop_string = ""
        self.thought = TrimmedText(is_raw=self.is_raw)
        self.answer_text = TrimmedText(is_raw=self.is_raw)
        self.calls: list[ParsedCall] = []
        self.malformed = 0

    def feed(self, new_ids: Sequence[int]) -> list[Delta]:
        """Return what new tokens add to the answer."""
        self.num_fed += len(new_ids)
        ids = [*self.last_ids, *new_ids]
        self.last_ids = []
        if ids and special_text(self.tokenizer, ids[-1]):
            self.last_ids.append(ids.pop())
        return self._read(self.decoder.decode(ids), is_end=False)

    def finish(self, response: LLMResponse) -> tuple[list[Delta], ParsedAnswer]:
        """Return the remaining deltas, the last one with kind "end", and the answer.

        Tokens of the response that were not fed are read first.
        """
        deltas = self.feed(response.output_ids[self.num_fed :])
        last_ids = [] if response.stop_reason == "stop" else self.last_ids
        last_text = self.decoder.decode(last_ids, is_end=True)
        deltas += self._read(last_text, is_end=True)
        answer = self._answer(response)
        if not answer.text and not answer.calls:
            deltas.append(Delta(kind="text", index=self.index))
        deltas.append(Delta(kind="end", answer=answer, index=self.index))
        return deltas, answer

    def _answer(self, response: LLMResponse) -> ParsedAnswer:
        """Return the answer after all its tokens were read."""
        tokens = list[str]()
        if self.request.logprobs:
            tokens += [self.tokenizer.decode([token]) for token in response.output_ids]
        return ParsedAnswer(
            id=self.id,
            thought="".join(self.thought.parts),
            text="".join(self.answer_text.parts),
            calls=tuple(self.calls),
            stop_reason=self._stop_reason(response),
            stop_string=self.stop_string,
            prompt_tokens=len(self.prompt.ids),
            cached_tokens=self.prompt.origin.reused,
            response=response,
            tokens=tuple(tokens),
            malformed=self.malformed,
        )

    def _stop_reason(self, response: LLMResponse) -> StopReason:
        if response.stop_reason != "stop" and not self.stop_string:
            return "length"
        if self.calls:
            return "calls"
        return "stop_string" if self.stop_string else "stop"

    def _read(self, new_text: str, *, is_end: bool) -> list[Delta]:
        """Add text to the answer."""
        deltas: list[Delta] = []
        certain_text = self._before_stop_string(new_text, is_end)
        for piece in self.scanner.feed(certain_text, is_end=is_end):
            call = piece.call
            is_call = call is not None and self._takes_calls()
            if call and is_call and not call.error:
                deltas.append(self._add_call(call))
                continue
            if is_call:
                self.malformed += 1
            deltas += self._add_text(
                "thought" if piece.kind == "thought" else "text", piece.content
            )
        return deltas

    def _takes_calls(self) -> bool:
        """Return whether the next call is a call of the answer; else it is text."""
        if not self.has_calls:
            return False
        return self.request.is_parallel or not self.calls

    def _before_stop_string(self, new_text: str, is_end: bool) -> str:
        """Return the text before the first stop string, as far as it is certain."""
        if self.stop_string:
            return ""
        unchecked = self.uncertain + new_text
        stops = self.request.stop
        matches = list[tuple[int, int, str]]()
        for stop in stops:
            start = unchecked.find(stop)
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if matches:  # generation stopped at the stop string that ends first
            _, end, self.stop_string = min(matches)
        elif is_end:
            end = len(unchecked)
        else:
            end = len(unchecked) - unfinished(unchecked, stops)
        self.uncertain = unchecked[end:]
        return unchecked[:end]

    def _add_call(self, call: ParsedCall) -> Delta:
        """Add a call to the answer."""
        added = replace(call, id=self._id_of(call), raw="")
        self.calls.append(added)
        return Delta(kind="call", call=added, index=self.index)

    def _id_of(self, call: ParsedCall) -> str:
        """Return the model's own id of a call, or one that depends on the history and the call.

        So a restarted client sends the same history again, and its turns are resumed.
        """
        used_ids = [earlier.id for earlier in self.calls]
        is_new = call.id and call.id not in used_ids
        if is_new and re.fullmatch(self.family.sampled_id, call.id):
            return call.id
        place = f"{self.index}/{len(used_ids)}/{call.raw}".encode()
        hashed = b"".join([*self.request.items, place])
        digest = hashlib.blake2b(hashed, digest_size=12).hexdigest()
        if self.family.name.startswith("mistral"):  # needs nine letters and digits
            return digest[:9]
        return f"call_{digest}"

    def _add_text(self, kind: Literal["thought", "text"], new_text: str) -> list[Delta]:
        """Add text to a field of the answer."""
        field = self.thought if kind == "thought" else self.answer_text
        part = field.add(new_text)
        return [Delta(kind=kind, text=part, index=self.index)] if part else []


class TrimmedText:
    """A text that grows, without white space at both ends; a raw text keeps it."""

    def __init__(self, *, is_raw: bool) -> None:
        self.is_raw = is_raw
        self.parts = list[str]()
        self._spaces = list[str]()
        """White space that is part of the text if more text follows it."""

    def add(self, new_text: str) -> str:
        """Add text; return the part that is certain now."""
        if self.is_raw:
            body = new_text
        else:
            new_text = new_text if self.parts else new_text.lstrip()
            body = new_text.rstrip()
        if not body:
            self._spaces.append(new_text)
            return ""
        part = "".join([*self._spaces, body])
        self.parts.append(part)
        self._spaces = [new_text[len(body) :]]
        return part


class StreamDecoder:
    """Decodes tokens as they are sampled."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._ids = list[int]()
        """The latest tokens."""
        self._num_read = 0
        """Number of characters of `_ids` that were returned."""

    def decode(self, new_ids: Sequence[int], *, is_end: bool = False) -> str:
        """Return the text that new tokens add; half a character waits for its other bytes."""
        if len(self._ids) > WINDOW:
            self._ids = self._ids[-WINDOW // 2 :]
            self._num_read = _certain_size(decode(self.tokenizer, self._ids))
        self._ids += new_ids
        decoded = decode(self.tokenizer, self._ids)
        end = len(decoded) if is_end else _certain_size(decoded)
        new_text = decoded[self._num_read : end]
        self._num_read = max(self._num_read, end)
        return new_text


def _certain_size(decoded: str) -> int:
    """Return the length of a text without the replacements of a half character's bytes."""
    num_replacements = len(decoded) - len(decoded.rstrip("\ufffd"))
    return len(decoded) - min(MAX_REPLACEMENTS, num_replacements)
