"""Parse sampled tokens into a thought, a text and tool calls, whole or while they are sampled."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from arealite.api.llm import LLMResponse
from arealite.api.observation import ToolCall
from arealite.impl.agent.history import ending
from arealite.impl.gateway.exchange import Answer, Call, ChatRequest, Delta
from arealite.impl.gateway.families import FAMILIES, CallError, Family, Part, Tools, skip
from arealite.impl.gateway.rendering import Renderer
from arealite.impl.gateway.tree import Prompt
from arealite.system.data.templates import decode

SHORT = 2048
"""An unfinished call up to this length is read again with each new text."""
WINDOW = 32
"""Longest sequence of earlier tokens that is decoded again with new ones."""
Piece = tuple[str, str, Call | None]
"""A part of an answer: "text", "thought" or "call", its text, and the call."""


def unfinished(text: str, words: Iterable[str], at: int = 0) -> int:
    """Return the length of the longest end of `text[at:]` that may be the start of a word."""
    starts = (word[:end] for word in words for end in range(1, min(len(text) - at + 1, len(word))))
    return max((len(start) for start in starts if text.endswith(start)), default=0)


class Scanner:
    """Splits an answer of a family into pieces. Time is linear in the length of the answer."""

    def __init__(self, family: Family, tools: Tools = (), *, has_calls: bool = True) -> None:
        if not has_calls and not family.has_channels:
            family = replace(family, openers=(), first=(), noise=())
        self.family = family
        self.tools = tools
        self.mode = "start"
        self.rest = ""
        self.at = 0
        self.new = ""
        self.pieces: list[Piece] = []
        self.first = [*family.first, *filter(None, family.think[:1])]
        words = [*family.openers, *family.noise]
        self.ends = {"text": words, "thought": words if family.has_channels else family.think[1:]}
        """Markers that may end a text or a thought."""
        ends = {mode: "|".join(map(re.escape, words)) for mode, words in self.ends.items()}
        self.patterns = {mode: re.compile(end or "(?!)") for mode, end in ends.items()}

    def feed(self, text: str, *, is_end: bool = False) -> list[Piece]:
        """Return the pieces that are certain after more text; at the end, all that are left."""
        self.new += text
        if len(self.rest) > SHORT and not is_end and len(self.new) * 8 < len(self.rest):
            return []  # reading a long call again for each token would take quadratic time
        self.rest = self.rest + self.new
        self.at = 0
        self.new = ""
        while self.at < len(self.rest) and getattr(self, f"_{self.mode}")(is_end):
            pass
        pieces = self.pieces
        self.pieces = []
        self.rest = self.rest[self.at :]
        return pieces

    def _start(self, is_end: bool) -> bool:
        """Look for a marker that stands only at the start."""
        begin = skip(self.rest, self.at, r"\s;")
        found = next((word for word in self.first if self.rest.startswith(word, begin)), "")
        if found:
            is_thought = found == self.family.think[0]
            self.mode, self.at = ("thought", begin + len(found)) if is_thought else ("part", begin)
            return True
        starts = [word.startswith(self.rest[begin : begin + len(word)]) for word in self.first]
        self.mode = "start" if any(starts) and not is_end else "text"
        return self.mode == "text"

    def _text(self, is_end: bool) -> bool:
        """Take a text or thought up to a marker, or all that cannot be the start of one."""
        found = self.patterns[self.mode].search(self.rest, self.at)
        held = 0 if found or is_end else unfinished(self.rest, self.ends[self.mode], self.at)
        end = found.start() if found else len(self.rest) - held
        if end > self.at:
            self.pieces.append((self.mode, self.rest[self.at : end], None))
        self.at = end
        if found and found[0] in self.family.openers:
            self.mode = "part"
        elif found:
            self.at = found.end()
            self.mode = "text" if found[0] in self.ends["text"] else "start"
        return found is not None

    _thought = _text

    def _part(self, is_end: bool) -> bool:
        """Read the part at a marker. A malformed call ends with its close marker or the answer."""
        rest = self.rest
        at = self.at
        close = self.family.close
        try:
            part = self.family.parse(rest, at, self.tools)
        except CallError as error:
            is_final = bool(close) and (is_end or error.at is not None)
            end = rest.find(close, error.at or at) if is_final else -1
            if end < 0 and not is_end:
                return False
            end = end + len(close) if end >= 0 else len(rest)
            part = Part(end, [Call(error=str(error), raw=rest[at:end])])
        raw = rest[at : part.end]
        self.at = part.end
        self.mode = part.mode
        if raw[0] == "{" and '"name"' not in raw:  # JSON, but not a call
            self.mode = "text"
            part = Part(part.end)
        elif not part.calls:
            raw = "\n"  # a header: separates a message from the one before
        self.pieces += [("call", call.raw, call) for call in part.calls] or [(self.mode, raw, None)]
        return True


def read_calls(
    text: str, family: Family, tools: Tools = (), *, ids: str = "call_{}"
) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text around the calls of a whole answer, and its calls, also malformed ones.

    Args:
        text: The answer.
        family: The family of the model.
        tools: The tools, by which arguments without types are converted.
        ids: Form of the ids of calls.
    """
    scanner = Scanner(family, tools)
    pieces = scanner.feed(text) + scanner.feed("", is_end=True)
    said = "".join(said for kind, said, _ in pieces if kind == "text")
    return said, tuple(
        ToolCall(ids.format(n), call.name, msgspec.json.decode(call.arguments), call.error)
        for n, call in enumerate(call for *_, call in pieces if call)
    )


class Parser:
    """Parses one answer.

    Args:
        renderer: Has the model's tokenizer and family.
        request: The request that is answered.
        prompt: Its prompt.
        id: `Answer.id`.
        index: Number of the answer, below `request.n`.
    """

    def __init__(
        self, renderer: Renderer, request: ChatRequest, prompt: Prompt, *, id: str, index: int
    ) -> None:
        self.is_raw = request.prompt is not None
        self.family = FAMILIES["text"] if self.is_raw else renderer.family
        self.request = request
        self.prompt = prompt
        self.id = id
        self.index = index
        self.has_calls = bool(request.tools) and request.tool_choice != "none"
        self.scanner = Scanner(self.family, request.tools, has_calls=self.has_calls)
        self.scanner.new = prompt.opening  # read with the first text
        self.tokenizer = renderer.tokenizer
        self.ids, self.shown = list[int](), 0
        """The latest tokens, and how many characters of them were read."""
        self.count = 0
        self.last = list[int]()
        self.kept = ""
        self.stop_string = ""
        self.parts: dict[str, list[str]] = {"thought": [], "text": []}
        self.spaces: dict[str, list[str]] = {"thought": [], "text": []}
        """White space that is part of the answer if more text follows it."""
        self.calls: list[Call] = []
        self.malformed = 0

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """Return what new tokens add to the answer."""
        self.count += len(ids)
        ids = [*self.last, *ids]
        self.last = []
        if ids and ending(self.tokenizer, ids[-1]):
            self.last.append(ids.pop())
        return self._read(self._decode(ids), is_end=False)

    def finish(self, response: LLMResponse) -> tuple[list[Delta], Answer]:
        """Return the remaining deltas, the last one with kind "end", and the answer.

        Tokens of the response that were not fed are read first.
        """
        deltas = self.feed(response.output_ids[self.count :])
        is_stop = response.stop_reason == "stop"
        deltas += self._read(self._decode([] if is_stop else self.last, is_end=True), is_end=True)
        reason = "calls" if self.calls else "stop_string" if self.stop_string else "stop"
        reason = reason if is_stop or self.stop_string else "length"
        ids = response.output_ids if self.request.logprobs else ()
        tokens = tuple(self.tokenizer.decode([token]) for token in ids)
        thought, text = map("".join, self.parts.values())
        if not text and not self.calls:
            deltas.append(Delta("text", index=self.index))
        more = self.stop_string, len(self.prompt.ids), self.prompt.origin.reused, response, tokens
        answer = Answer(self.id, thought, text, tuple(self.calls), reason, *more, self.malformed)
        return [*deltas, Delta("end", answer=answer, index=self.index)], answer

    def _decode(self, ids: Sequence[int], *, is_end: bool = False) -> str:
        """Return the text that new tokens add; half a character waits for its rest."""
        if len(self.ids) > WINDOW:
            self.ids = self.ids[-WINDOW // 2 :]
            self.shown = _certain(decode(self.tokenizer, self.ids))
        self.ids += ids
        text = decode(self.tokenizer, self.ids)
        end = len(text) if is_end else _certain(text)
        new = text[self.shown : end]
        self.shown = max(self.shown, end)
        return new

    def _read(self, text: str, *, is_end: bool) -> list[Delta]:
        deltas: list[Delta] = []
        for kind, said, call in self.scanner.feed(self._cut(text, is_end), is_end=is_end):
            is_wanted = self.has_calls and (self.request.is_parallel or not self.calls)
            if call and is_wanted and not call.error:
                self.calls.append(Call(self._id(call), call.name, call.arguments))
                deltas.append(Delta("call", call=self.calls[-1], index=self.index))
            else:
                self.malformed += bool(call and is_wanted)
                deltas += self._say("thought" if kind == "thought" else "text", said)
        return deltas

    def _cut(self, text: str, is_end: bool) -> str:
        """Return the text before the first stop string, as far as it is certain."""
        if self.stop_string:
            return ""
        text = self.kept + text
        stops = self.request.stop
        ends = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
        if ends:
            _, end, self.stop_string = min(ends)  # generation stopped at the one that ends first
        else:
            end = len(text) - (0 if is_end else unfinished(text, stops))
        self.kept = text[end:]
        return text[:end]

    def _id(self, call: Call) -> str:
        """Return the model's own id of a call, or one that depends on the history and the call.

        So a restarted client sends the same history again, and its turns are resumed.
        """
        used = [made.id for made in self.calls]
        if call.id and call.id not in used and re.fullmatch(self.family.sampled_id, call.id):
            return call.id
        place = f"{self.index}/{len(used)}/{call.raw}".encode()
        name = hashlib.blake2b(b"".join([*self.request.items, place]), digest_size=12).hexdigest()
        is_short = self.family.name.startswith("mistral")  # needs nine letters and digits
        return name[:9] if is_short else f"call_{name}"

    def _say(self, kind: Literal["thought", "text"], text: str) -> list[Delta]:
        """Add text to a field of the answer, without white space at both ends of the field."""
        said = self.parts[kind]
        spaces = self.spaces[kind]
        text = text if said or self.is_raw else text.lstrip()
        body = text if self.is_raw else text.rstrip()
        if not body:
            spaces.append(text)
            return []
        said.append("".join([*spaces, body]))
        self.spaces[kind] = [text[len(body) :]]
        return [Delta(kind, said[-1], index=self.index)]


def _certain(text: str) -> int:
    """Return the length of a text without the replacements of a half character's bytes."""
    return len(text) - min(3, len(text) - len(text.rstrip("\ufffd")))
