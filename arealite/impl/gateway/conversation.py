"""A conversation as a tree of messages that keeps the exact tokens of each sampled answer.

A request repeats the whole history. Its messages are looked up in the tree; the tokens of its
latest sampled answer, and all tokens before, are taken as they are. Only what is new is rendered
and tokenised. A message that differs begins a branch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from arealite.api.episode import Origin
from arealite.api.observation import ChatMessage
from arealite.impl.agent.history import ending, first
from arealite.impl.gateway.exchange import Answer, Api, ApiError, ChatRequest
from arealite.impl.gateway.rendering import ANSWERS, CALLS, SYSTEM, THOUGHTS, Renderer
from arealite.system.data.chats import tokenize
from arealite.system.data.forms import tool_calls

LONG = 2000
"""Texts with more characters are rendered and tokenised in a thread."""
MEMO_BYTES = 32 << 20
LONGEST_RUN = 16
"""Neighbouring messages of the assistant that may be parts of one answer."""
SYSTEM_ROLES = ("system", "developer")
Key = tuple[str, str, tuple[tuple[str, bytes], ...]]
"""What a message is recognised by: role, stripped text, names and arguments of calls. A result of
a tool has the id of its call instead, if the template writes ids."""


class Item(NamedTuple):
    """A message of a request."""

    key: Key
    message: ChatMessage


@dataclass(eq=False)
class Node:
    """A message of the tree."""

    parent: Node | None
    key: Key
    message: ChatMessage
    """Prepared for the template."""
    kinds: int = 0
    """Kinds of messages up to this one."""
    characters: int = 0
    """Characters of the messages up to this one."""
    depth: int = 0
    children: dict[Key, Node] = field(default_factory=dict[Key, "Node"])
    samples: list[Sample] = field(default_factory=list["Sample"])
    """Sampled answers with this text and these calls."""
    is_asked: bool = False
    """Whether an answer to this message was requested."""


@dataclass(eq=False)
class Prompt:
    """The prompt of a request."""

    ids: list[int]
    """Shared with the agent's record: never changed."""
    origin: Origin
    opening: str = ""
    """The end of the prompt that belongs to the answer: a thought's opener, a forced call."""
    node: Node | None = None
    """The last message; None for the prompt of /v1/completions."""
    base: Sample | None = None
    """The answer whose tokens the prompt begins with."""
    text: str = ""
    """Text of the template after `base`, without the opening."""
    header: int | None = None
    """Number of tokens before the opening; None: one token has parts of both."""
    has_tools: bool = False


@dataclass(eq=False)
class Sample:
    """A sampled answer."""

    prompt: Prompt
    message: ChatMessage
    """Prepared for the template."""
    output: list[int]
    """The sampled tokens."""
    stop: str
    """Text of the special token that ended the answer; "" if there is none."""
    text: str
    """`Prompt.text`; in /v1/completions, prompt and answer."""
    turns: int
    """Number of answers in prompt and answer."""
    stop_string: str = ""
    node: Node | None = None
    is_continued: bool = False

    def chain(self) -> list[Sample]:
        """Return the answers whose tokens the prompt of this one has, and this one."""
        chain, at = list[Sample](), self
        while at is not None:
            chain.append(at)
            at = at.prompt.base
        return chain[::-1]


class Latest(NamedTuple):
    """The latest request. The next one usually repeats it."""

    api: Api
    tools: list[dict[str, Any]]
    items: list[bytes]
    node: Node
    base: Sample | None


class Conversation:
    """The conversations of one seat; those with an equal beginning share it."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.mismatches = 0
        """1: an incremental rendering differed from that of the whole conversation, and whole
        renderings are used since."""
        self._roots: dict[bytes, Node] = {}
        self._memo: dict[tuple[int, bytes], tuple[Item, ...]] = {}
        self._memo_bytes = 0
        self._samples: dict[str, Sample] = {}
        """By id of the answer."""
        self._completions: list[Sample] = []
        self._latest: Latest | None = None
        self._is_begun = False

    async def ask(self, api: Api, request: ChatRequest, *, is_counted: bool = False) -> Prompt:
        """Return the prompt of a request. Concurrent calls are allowed.

        Args:
            api: The API of the request.
            request: The request.
            is_counted: Only the tokens are counted; no answer will be sampled.

        Raises:
            ApiError: 400: the template refuses the messages, or cannot force the call; 404: the
                previous answer is unknown.
        """
        if request.prompt is not None:
            return await _run(len(request.prompt), self._complete, request.prompt)
        node, base, reason = self._find(api, request)
        size, is_checked = node.characters, False
        if base is not None and base.node is not None:
            is_checked = self.mismatches > 0 or base.turns & (base.turns - 1) == 0
            size -= 0 if is_checked else base.node.characters
            reason = "edited" if base.is_continued else ""
        reason = "resampled" if node.is_asked else reason if self._is_begun else "first"
        if not is_counted:
            node.is_asked = self._is_begun = True
            if base is not None:
                base.is_continued = True
        return await _run(size, self._make, request, node, base, reason, is_checked)

    def add(self, prompt: Prompt, answer: Answer) -> None:
        """Add an answer to the tree."""
        response = answer.response
        ids = response.output_ids if response else []
        is_ended = response is not None and response.stop_reason == "stop" and bool(ids)
        stop = ending(self.renderer.tokenizer, ids[-1]) if is_ended else ""
        turns = prompt.base.turns + 1 if prompt.base else 1
        sample = Sample(prompt, {}, ids, stop, prompt.text, turns)
        if prompt.node is None:
            sample.text, sample.stop_string = prompt.text + answer.text, answer.stop_string
            self._completions.append(sample)
            return
        message = answer.message()
        sample.message = self._acceptable(message, prompt, ids, stop)
        sample.node = self._child(prompt.node, Item(_key(message), sample.message))
        sample.node.samples.append(sample)
        self._samples[answer.id] = sample

    def _acceptable(
        self, message: ChatMessage, prompt: Prompt, ids: list[int], stop: str
    ) -> ChatMessage:
        """Return an answer in a form that the template accepts, at worst as its whole text."""
        bare = {key: each for key, each in message.items() if key != "reasoning_content"}
        for tried in (message, bare):
            with suppress(ApiError):
                self.renderer.ending(0, tried, prompt.has_tools)
                return self.renderer.prepare(tried)
        text = self.renderer.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return {"role": "assistant", "content": prompt.opening + text.removesuffix(stop)}

    # ------------------------------------------------------------ the tree

    def _find(self, api: Api, request: ChatRequest) -> tuple[Node, Sample | None, str]:
        """Look up the messages of a request; add new ones.

        Returns:
            The node of the last message; the last sampled answer before it; and the reason for a
            new branch if there is no such answer.
        """
        latest, items = self._latest, request.items
        base, reason, start = None, "edited", 0
        known = latest.items if latest and not request.previous and latest.api is api else []
        if latest and known and request.tools == latest.tools and items[: len(known)] == known:
            node, base, start = latest.node, latest.base, len(known)
        else:
            tools = msgspec.json.encode(request.tools)
            reason = "edited" if tools in self._roots else "tools"
            node = self._roots.setdefault(tools, Node(None, ("", "", ()), {}))
        parsed = [item for raw in items[start:] for item in self._items(api, raw)]
        wanted = None
        if request.previous:
            wanted, parsed = self._continue(request.previous, parsed)
        if (
            not node.depth
            and parsed
            and _is_system(parsed[0])
            and parsed[0].key not in node.children
        ):
            reason = "tools"
        ids, at = dict[object, object](), 0
        while at < len(parsed):
            item, size = _merge(node, parsed, at)
            node, at = self._child(node, self._renamed(item, ids)), at + size
            if node.samples:
                base = wanted if wanted in node.samples else _choose(node.samples, item.message)
            if item.key[2]:
                own = tool_calls(base.message if node.samples and base else node.message)
                pairs = zip(tool_calls(item.message), own, strict=False)
                ids |= {call.get("id"): mine.get("id") for call, mine in pairs}
        if node.depth == 0:
            raise ApiError(400, "The request has no message. Send at least one.")
        if not request.previous and node.key[0] != "assistant":
            self._latest = Latest(api, request.tools, items, node, base)
        return node, base, reason

    def _items(self, api: Api, raw: bytes) -> tuple[Item, ...]:
        """Convert a part of a request to messages; equal parts are converted once."""
        if (found := self._memo.get((id(api), raw))) is not None:
            return found
        made = tuple([Item(_key(message), message) for message in api.messages(raw)])
        self._memo_bytes += len(raw)
        if self._memo_bytes > MEMO_BYTES:
            self._memo, self._memo_bytes = {}, len(raw)
        self._memo[id(api), raw] = made
        return made

    def _renamed(self, item: Item, ids: Mapping[object, object]) -> Item:
        """Return a tool's result with the id that its call has in the tree."""
        sent = item.message.get("tool_call_id")
        if item.key[0] != "tool" or not self.renderer.has_ids:
            return item
        own = ids.get(sent, sent)
        key = ("tool", item.key[1], ((str(own), b""),))
        return Item(key, item.message if own == sent else {**item.message, "tool_call_id": own})

    def _continue(self, previous: str, items: list[Item]) -> tuple[Sample, list[Item]]:
        """Return the answer `previous`; and the messages up to it, then `items`.

        The instructions of a request replace those of the request before.

        Raises:
            ApiError: 404: no such answer.
        """
        sample = self._samples.get(previous)
        if sample is None or sample.node is None:
            raise ApiError(404, f"No answer of this session has the id {previous}.")
        known = [Item(node.key, node.message) for node in _path(sample.node)]
        new = len(items) > 0 and _is_system(items[0])
        return sample, items[:new] + known[_is_system(known[0]) :] + items[new:]

    def _child(self, node: Node, item: Item) -> Node:
        """Return the node of a message after `node`; create it if there is none."""
        if (found := node.children.get(item.key)) is not None:
            return found
        (role, text, calls), message = item
        kinds = node.kinds | (SYSTEM if role in SYSTEM_ROLES else 0)
        if role == "assistant":
            kinds |= ANSWERS | (CALLS if calls else 0)
            kinds |= THOUGHTS if message.get("reasoning_content") else 0
        size = node.characters + len(text) + sum([len(arguments) for _, arguments in calls])
        prepared = self.renderer.prepare(message)
        made = node.children[item.key] = Node(node, item.key, prepared, kinds, size, node.depth + 1)
        return made

    # ------------------------------------------------------------ prompts

    def _make(
        self, request: ChatRequest, node: Node, base: Sample | None, reason: str, is_checked: bool
    ) -> Prompt:
        forced = self._forced(request)
        start = self._follow(node, base, request.tools, is_checked)
        if base is not start.base and reason != "resampled":
            reason = "rewritten"
        renderer, kept = self.renderer, start.kept
        opening = renderer.opening(start.text)
        text = start.text.removesuffix(opening)
        if forced and opening:  # an empty thought
            forced = f"\n{opening[0]}/{opening[1:].strip()}\n\n{forced}"
        opening, rest = opening + forced, start.rest + forced
        taken, last = sum(map(len, kept)), kept[1] or kept[0]
        ids = renderer.encode(rest, last) if taken else first(renderer.tokenizer, rest)
        origin, end = Origin(taken, len(ids), reason), renderer.encode(opening)
        header = taken + len(ids) - len(end)
        is_split = ids[len(ids) - len(end) :] == end
        ids = kept[0] + (kept[1] + ids) if taken else ids
        made = Prompt(ids, origin, opening, node, start.base, text)
        made.header, made.has_tools = header if is_split else None, bool(request.tools)
        return made

    def _forced(self, request: ChatRequest) -> str:
        """Return the text that begins the call which the request demands; "" if it demands none.

        Raises:
            ApiError: 400: the model's calls cannot be forced, or the tool is unknown.
        """
        choice = request.tool_choice
        if choice in ("auto", "none"):
            return ""
        name = choice[1:] if choice.startswith("=") else None
        known = [tool["function"]["name"] for tool in request.tools]
        if not known or name not in (None, *known):
            raise ApiError(400, f"tool_choice needs the tool {name or 'of any name'} in tools.")
        if not (text := self.renderer.family.opening(name)):
            what = f"tool_choice: a call cannot be forced with {self.renderer.family.name} models"
            raise ApiError(400, f'{what}. Use "auto".')
        return text

    def _follow(self, node: Node, base: Sample | None, tools: list[Any], is_checked: bool) -> Start:
        """Return the tokens to keep and the text to tokenise for an answer to `node`."""
        renderer, after = self.renderer, None
        if base is None or base.node is None or base.node.parent is None:
            text = self._whole(node, [], tools)
            return Start(None, ([], []), text, text)
        if not self.mismatches:
            new = [each.message for each in _path(node, base.node.depth)]
            after = renderer.follow(base.node.parent.kinds, base.message, new, bool(tools))
        if after is None or is_checked:
            chain = base.chain()
            text = self._whole(node, chain, tools)
            good, at, has_header = renderer.match(text, chain, bool(tools))
            is_whole = good == len(chain)
            if after is not None and not (is_whole and after == text[at:]):
                self.mismatches = 1
            if not is_whole:
                return self._rewritten(node, chain, tools, good, has_header)
            after = text[at:]
        return self._after(base, after, bool(tools))

    def _rewritten(
        self, node: Node, chain: list[Sample], tools: list[Any], good: int, has_header: bool
    ) -> Start:
        """Return the start of a prompt in which the template repeats only `good` answers.

        Args:
            node: The last message.
            chain: The answers of the conversation.
            tools: Schemas of the tools.
            good: Number of answers that are repeated.
            has_header: Whether the text before the next answer is repeated, too.
        """
        renderer, at, found = self.renderer, 0, 0
        while True:
            text = self._whole(node, chain[:good], tools)
            found, at, _ = renderer.match(text, chain[:good], bool(tools))
            if found == good:
                break
            good, has_header = found, False
        prompt, text = chain[good].prompt, text[at:]
        start = (
            self._after(chain[good - 1], text, bool(tools))
            if good
            else Start(None, ([], []), text, text)
        )
        if has_header and prompt.header and text.startswith(prompt.text):
            kept = (prompt.ids[: prompt.header], [])
            return start._replace(kept=kept, rest=text[len(prompt.text) :])
        return start

    def _after(self, base: Sample, text: str, has_tools: bool) -> Start:
        turn = self.renderer.ending(0, base.message, has_tools).turn
        return Start(
            base,
            (base.prompt.ids, base.output),
            self.renderer.continued(text, base.stop, turn),
            text,
        )

    def _whole(self, node: Node, answers: Sequence[Sample], tools: list[Any]) -> str:
        """Render a conversation with stand-ins for some answers."""
        messages = [each.message for each in _path(node)]
        for number, each in enumerate(answers):
            if each.node is not None:
                short = self.renderer.stand_in(each.message, number)
                messages[each.node.depth - 1] = short
        return self.renderer.render(messages, tools)

    def _complete(self, prompt: str | list[int]) -> Prompt:
        """Return the prompt of a text or of tokens, which may continue an earlier completion."""
        tokenizer = self.renderer.tokenizer
        text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        base, known, rest = None, list[int](), text
        for sample in self._completions:
            more = _continuation(sample, prompt)
            if more is not None and len(more[0]) > len(known):
                base, (known, rest) = sample, more
        if isinstance(prompt, list):
            ids = prompt
        else:
            ids = known + self.renderer.encode(rest, known) if base else tokenize(tokenizer, text)
        reason = "edited" if self._completions else "first"
        if base is not None:
            is_whole = len(known) == len(base.prompt.ids) + len(base.output)
            reason = "" if is_whole and not base.is_continued else "edited"
            base.is_continued = True
        origin = Origin(len(known), len(ids) - len(known), reason)
        return Prompt(ids, origin, "", None, base, text)


class Start(NamedTuple):
    """The beginning of a prompt."""

    base: Sample | None
    kept: tuple[list[int], list[int]]
    """Tokens that are taken from the tree: a prompt and an answer."""
    rest: str
    """Text to tokenise."""
    text: str
    """Text of the template after `base`."""


async def _run(size: int, function: Callable[..., Prompt], *args: object) -> Prompt:
    """Call a function; for long texts in a thread."""
    return await asyncio.to_thread(function, *args) if size > LONG else function(*args)


def _path(node: Node, depth: int = 0) -> list[Node]:
    """Return the nodes from below `depth` to a node."""
    path, at = list[Node](), node
    while at.depth > depth and at.parent is not None:
        path.append(at)
        at = at.parent
    return path[::-1]


def _choose(samples: Sequence[Sample], message: ChatMessage) -> Sample:
    """Return the answer with the call ids of a message; without one, the newest."""
    ids = [call.get("id") for call in tool_calls(message)]
    found = (
        each for each in samples[::-1] if [c.get("id") for c in tool_calls(each.message)] == ids
    )
    return samples[-1] if len(samples) == 1 else next(found, samples[-1])


def _continuation(sample: Sample, prompt: str | list[int]) -> tuple[list[int], str] | None:
    """Return the tokens of a completion that a prompt continues, and the rest of its text."""
    if isinstance(prompt, list):
        known = sample.prompt.ids + sample.output
        return (known, "") if prompt[: len(known)] == known else None
    if not prompt.startswith(sample.text):
        return None
    known, rest = sample.prompt.ids + sample.output, prompt[len(sample.text) :]
    end = sample.stop_string or sample.stop
    if rest.startswith(end):
        return known, rest[len(end) :]
    return None if sample.stop_string else (known[:-1], rest)


def _merge(node: Node, items: Sequence[Item], at: int) -> tuple[Item, int]:
    """Merge neighbouring messages of the assistant, if possible to a known message.

    Returns:
        The message, and the number of items that it consists of.
    """
    end = at + 1
    if items[at].key[0] != "assistant":
        return items[at], 1
    while end < min(len(items), at + LONGEST_RUN) and items[end].key[0] == "assistant":
        end += 1
    if end == at + 1:
        return items[at], 1
    tried = [(_merged(items[at:each]), each - at) for each in range(end, at, -1)]
    return next((each for each in tried if each[0].key in node.children), tried[0])


def _is_system(item: Item) -> bool:
    return item.key[0] in SYSTEM_ROLES


def _merged(items: Sequence[Item]) -> Item:
    messages = [item.message for item in items]
    made: ChatMessage = {"role": "assistant"}
    for name in ("content", "reasoning_content"):
        made[name] = "\n".join([str(each[name]) for each in messages if each.get(name)])
    calls = [call for each in messages for call in tool_calls(each)]
    message = made | ({"tool_calls": calls} if calls else {})
    return Item(_key(message), message)


def _key(message: ChatMessage) -> Key:
    calls = [
        (str(call["function"]["name"]), _canonical(call["function"].get("arguments")))
        for call in tool_calls(message)
    ]
    return str(message["role"]), str(message.get("content") or "").strip(), tuple(calls)


def _canonical(arguments: object) -> bytes:
    """Return arguments as JSON in one form: keys sorted, 1.0 as 1."""
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments)
    try:
        return _encode(_decode(text))
    except msgspec.DecodeError:
        return str(arguments).encode(errors="surrogatepass")


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value


_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder(float_hook=_number).decode
