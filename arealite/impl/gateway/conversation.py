"""A conversation as a tree of messages that keeps the exact tokens of each sampled answer.

A request repeats the whole history. Its messages are looked up in the tree; the tokens of its
latest sampled answer, and all tokens before, are reused unchanged. Only what is new is rendered
and tokenised. A message that differs begins a branch.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from arealite.api.episode import Origin
from arealite.api.observation import ChatMessage
from arealite.impl.agent.history import ending, first
from arealite.impl.gateway import tree
from arealite.impl.gateway.apis import history
from arealite.impl.gateway.exchange import Answer, ApiError, ChatRequest
from arealite.impl.gateway.rendering import CALLS, SYSTEM, THOUGHTS, TOOLS, Renderer
from arealite.impl.gateway.tree import Completion, Item, Node, Prompt, Sample
from arealite.system.data.forms import tool_calls
from arealite.system.data.templates import decode, tokenize

LONG = 2000
"""Texts with more characters are rendered and tokenised in a thread; parts of a request with more
bytes are converted each time."""
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gateway")
"""One thread: several would hold up the event loop longer, because each may keep the interpreter
for its switch interval."""


class Start(NamedTuple):
    """The beginning of a prompt."""

    base: Sample | None
    reused: list[int]
    """Tokens of earlier turns, in a list of its own."""
    rest: str
    """Text to tokenise."""
    text: str
    """Text of the template after `base`."""


class Conversation:
    """The conversations of one seat; those with an equal beginning share it."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.is_incremental = True
        """False: an incremental rendering differed from that of the whole conversation, and whole
        renderings are used since."""
        self._roots: dict[bytes, Node] = {}
        self._samples: dict[str, Sample] = {}
        """By id of the answer."""
        self._completions: list[Completion] = []
        self._latest: tuple[list[bytes], list[Any], Node, Sample | None] = [], [], Node(), None
        """Items, tools, last message and last sampled answer of the latest request, which the next
        one usually repeats."""
        self._is_begun = False

    async def ask(self, request: ChatRequest, *, is_count_only: bool = False) -> Prompt:
        """Return the prompt of a request. Concurrent calls are allowed.

        Args:
            request: The request.
            is_count_only: Only the tokens are counted; no answer will be sampled.

        Raises:
            ApiError: 400: the template refuses the messages, or cannot force the call; 404: the
                previous answer is unknown.
        """
        if request.prompt is not None:
            return await _run(len(request.prompt), self._complete, request.prompt)
        node, base, reason = self._find(request)
        size = node.characters
        is_checked = False
        if base is not None:
            is_checked = not self.is_incremental or base.turns & (base.turns - 1) == 0
            size -= 0 if is_checked else base.node.characters
            reason = "edited" if base.is_continued else ""
        reason = "resampled" if node.is_asked else reason if self._is_begun else "first"
        if not is_count_only:
            node.is_asked = self._is_begun = True
            if base is not None:
                base.is_continued = True
        return await _run(size, self._make, request, node, base, reason, is_checked)

    def add(self, prompt: Prompt, answer: Answer) -> None:
        """Add an answer to the tree."""
        response = answer.response
        node = prompt.node
        output = response.output_ids if response else []
        is_ended = response is not None and response.stop_reason == "stop" and bool(output)
        stop = ending(self.renderer.tokenizer, output[-1]) if is_ended else ""
        if node is None:
            text = prompt.text + answer.text
            ids = prompt.ids + output
            if stop:  # a client may go on without the token that ended the answer
                self._completions.append(Completion(text, ids[:-1], "edited"))
            self._completions.append(Completion(text + (answer.stop_string or stop), ids))
            return
        message = answer.message()
        item = Item(tree.key_of(message), self._acceptable(node, message, prompt, output, stop))
        turns = prompt.base.turns + 1 if prompt.base else 1
        child = node.children[item.key] = self._child(node, self._with_call_ids(item))
        start = prompt.base.length if prompt.base else 0
        own = replace(prompt, ids=[])
        new = prompt.ids[start:] + output
        length = len(prompt.ids) + len(output)
        sample = Sample(own, new, length, stop, item.message, child, turns, response)
        child.samples.append(sample)
        self._samples[answer.id] = sample

    def _acceptable(
        self, node: Node, message: ChatMessage, prompt: Prompt, output: list[int], stop: str
    ) -> ChatMessage:
        """Return an answer in a form that the template accepts, at worst as its whole text."""
        bare = {**message, "reasoning_content": ""}
        for tried in (message, bare, {**bare, "tool_calls": tool_calls(message)[:1]}):
            with suppress(ApiError):
                self.renderer.ending(node.kinds & TOOLS, tried)
                return self.renderer.prepare(tried)
        text = decode(self.renderer.tokenizer, output)
        return {"role": "assistant", "content": prompt.opening + text.removesuffix(stop)}

    # ------------------------------------------------------------ the tree

    def _find(self, request: ChatRequest) -> tuple[Node, Sample | None, str]:
        """Look up the messages of a request; add new ones.

        Returns:
            The last message, the last sampled answer before it, and the reason for a new branch if
            there is no such answer.
        """
        items = request.items
        tools = request.tools
        previous = request.previous
        known, same, node, base = self._latest
        reason = "edited"
        wanted = None
        if previous or not known or items[: len(known)] != known or tools != same:
            known = []
            base = None
            name = msgspec.json.encode(tools)
            reason = "edited" if name in self._roots else "tools"
            node = self._roots.setdefault(name, Node(kinds=TOOLS if tools else 0))
        parsed = [item for raw in items[len(known) :] for item in _parse(raw)]
        if previous:
            wanted, parsed = self._continue(previous, parsed)
        if not (parsed or node.depth):
            raise ApiError(400, "The request has no message. Send at least one.")
        if not node.depth and parsed[0].is_system and parsed[0].key not in node.children:
            reason = "tools"
        node, base = self._walk(node, base, parsed, wanted)
        if not previous and node.key[0] != "assistant":
            self._latest = items, tools, node, base
        return node, base, reason

    def _walk(
        self, node: Node, base: Sample | None, items: list[Item], wanted: Sample | None
    ) -> tuple[Node, Sample | None]:
        """Return the node of the last of `items` after `node`, and the last sampled answer.

        Args:
            node: The message before.
            base: The last sampled answer up to `node`.
            items: Messages.
            wanted: The answer to prefer among several with equal texts.
        """
        ids = dict[object, object]()
        at = 0
        while at < len(items):
            item, size = tree.merge(node, items, at)
            item = self._renamed(item, ids)
            at = at + size
            node = node.children.get(self._with_call_ids(item).key) or self._child(node, item)
            if node.samples:
                base = wanted if wanted in node.samples else tree.choose(node.samples, item.message)
            if item.key[2]:
                own = (base if node.samples and base else node).message
                ids |= zip(tree.call_ids(item.message), tree.call_ids(own), strict=False)
        return node, base

    def _with_call_ids(self, item: Item) -> Item:
        """Return a message with the ids of its calls in its key, if the template writes ids."""
        if not item.key[2] or item.key[0] != "assistant" or not self.renderer.has_ids:
            return item
        ids = ("", repr(tree.call_ids(item.message)).encode())
        return Item((*item.key[:2], (*item.key[2], ids)), item.message)

    def _renamed(self, item: Item, ids: Mapping[object, object]) -> Item:
        """Return a tool's result with the id that its call has in the tree."""
        if item.key[0] != "tool" or not self.renderer.has_ids:
            return item
        sent = item.message.get("tool_call_id")
        own = ids.get(sent, sent)
        key = ("tool", item.key[1], ((str(own), b""),))
        return Item(key, {**item.message, "tool_call_id": own})

    def _continue(self, previous: str, items: list[Item]) -> tuple[Sample, list[Item]]:
        """Return the answer `previous`; and the messages up to it, then `items`.

        The instructions of a request replace those of the request before.

        Raises:
            ApiError: 404: no such answer.
        """
        if (sample := self._samples.get(previous)) is None:
            what = f"No answer of this session has the id {previous}"
            raise ApiError(404, f"{what}. Send all messages.")
        known = [Item(node.key, node.message) for node in sample.node.path()]
        new = len(items) > 0 and items[0].is_system
        return sample, items[:new] + known[known[0].is_system :] + items[new:]

    def _child(self, node: Node, item: Item) -> Node:
        """Return the node of a message after `node`; create it if there is none."""
        if (found := node.children.get(item.key)) is not None:
            return found
        (role, text, calls), message = item
        kinds = node.kinds | (SYSTEM if item.is_system else 0)
        if role == "assistant":
            kinds |= CALLS if calls else 0
            kinds |= THOUGHTS if message.get("reasoning_content") else 0
        size = node.characters + len(text) + sum([len(arguments) for _, arguments in calls])
        if item.is_system and node.depth and not self.renderer.has_late_system:
            kinds = node.kinds
            message = {**message, "role": "user"}
        message = self.renderer.prepare(message)
        made = Node(node, item.key, message, kinds, size, node.depth + 1)
        node.children[item.key] = made
        return made

    # ------------------------------------------------------------ prompts

    def _make(
        self, request: ChatRequest, node: Node, base: Sample | None, reason: str, is_checked: bool
    ) -> Prompt:
        renderer = self.renderer
        forced = self._forced(request)
        start = self._start(node, base, request.tools, is_checked)
        if base is not start.base and reason != "resampled":
            reason = "rewritten"
        opener = renderer.opening(start.text)
        empty = f"\n{renderer.family.think[1]}\n\n" if forced and opener else ""
        opening = opener + empty + forced
        rest = start.rest + empty + forced
        ids = start.reused
        reused = len(start.reused)
        new = renderer.encode(rest, ids) if reused else first(renderer.tokenizer, rest)
        end = renderer.encode(opening, ())
        count = len(new)
        header = reused + count - len(end) if new[count - len(end) :] == end else None
        ids += new
        origin = Origin(reused, count, reason)
        text = start.text.removesuffix(opener)
        return Prompt(ids, origin, opening, node, start.base, text, header)

    def _forced(self, request: ChatRequest) -> str:
        """Return the text that begins the call which the request demands; "" if it demands none.

        Raises:
            ApiError: 400: the model's calls cannot be forced.
        """
        choice = request.tool_choice
        family = self.renderer.family
        if choice in ("auto", "none"):
            return ""
        if not (text := family.opening(choice[1:] if choice.startswith("=") else None)):
            what = f"tool_choice: a call cannot be forced with models of family {family.name}"
            raise ApiError(400, f'{what}. Use "auto".')
        return text

    def _start(self, node: Node, base: Sample | None, tools: list[Any], is_checked: bool) -> Start:
        """Return the tokens to keep and the text to tokenise for an answer to `node`."""
        renderer = self.renderer
        after = None
        if base is None or base.prompt.node is None:
            text = self._whole(node, [], tools)
            return Start(None, [], text, text)
        if self.is_incremental:
            new = [each.message for each in node.path(base.node.depth)]
            after = renderer.render_after(base.prompt.node.kinds, base.message, new)
        if after is None or is_checked:
            chain = base.chain()
            text = self._whole(node, chain, tools)
            good, at = renderer.repeated(text, chain, node.kinds)
            is_same = good == len(chain)
            if after is not None and not (is_same and after == text[at:]):
                self.is_incremental = False
            if not is_same:
                return self._rewritten(node, chain, tools, good)
            after = text[at:]
        return self._after(base, after)

    def _rewritten(self, node: Node, chain: list[Sample], tools: Sequence[Any], good: int) -> Start:
        """Return the start of a prompt in which the template repeats only `good` answers.

        Args:
            node: The last message.
            chain: The answers of the conversation.
            tools: Schemas of the tools.
            good: Number of answers that are repeated.
        """
        while True:
            text = self._whole(node, chain[:good], tools)
            found, at = self.renderer.repeated(text, chain[:good], node.kinds)
            if found == good:
                break
            good = found
        text = text[at:]
        prompt = chain[good].prompt
        start = self._after(chain[good - 1], text) if good else Start(None, [], text, text)
        if prompt.header is None or not text.startswith(prompt.text):
            return start
        reused = chain[good].ids[: prompt.header]
        rest = text[len(prompt.text) :]
        return start._replace(reused=reused, rest=rest)

    def _after(self, base: Sample, text: str) -> Start:
        turn = self.renderer.ending(base.node.kinds & TOOLS, base.message).turn
        return Start(base, base.ids, self.renderer.remaining(text, base.stop, turn), text)

    def _whole(self, node: Node, answers: Sequence[Sample], tools: Sequence[Any]) -> str:
        """Render a conversation with stand-ins for some answers."""
        messages = [each.message for each in node.path()]
        for number, each in enumerate(answers):
            messages[each.node.depth - 1] = self.renderer.stand_in(each.message, number)
        return self.renderer.render(messages, tools)

    def _complete(self, prompt: str | list[int]) -> Prompt:
        """Return the prompt of a text or of tokens, which may continue an earlier completion."""
        tokenizer = self.renderer.tokenizer
        known = self._completions
        size = len(tokenizer)
        if isinstance(prompt, str):
            found = [each for each in known if prompt.startswith(each.text)]
        elif not 0 <= min(prompt) <= max(prompt) < size:
            raise ApiError(400, f"prompt has ids that are not tokens. Ids are below {size}")
        else:
            found = [each for each in known if prompt[: len(each.ids)] == each.ids]
        anew = Completion("", [], "edited" if known else "first")
        best = max(found, key=lambda each: len(each.ids), default=anew)
        if not isinstance(prompt, str):
            text = tokenizer.decode(prompt)
            ids = prompt
        elif not best.ids:
            text = prompt
            ids = tokenize(tokenizer, prompt)
        else:
            text = prompt
            ids = best.ids + self.renderer.encode(prompt[len(best.text) :], best.ids)
        origin = Origin(len(best.ids), len(ids) - len(best.ids), best.reason)
        best.reason = "edited"
        return Prompt(ids, origin, text=text)


def _parse(raw: bytes) -> list[Item]:
    """Convert a part of a request to messages; short parts are converted once."""
    return (_converted if len(raw) <= LONG else _converted.__wrapped__)(raw)


@lru_cache(maxsize=2**14)
def _converted(raw: bytes) -> list[Item]:
    return [Item(tree.key_of(message), message) for message in history.messages(raw)]


async def _run(size: int, function: Callable[..., Prompt], *args: object) -> Prompt:
    """Call a function; for long texts in a thread."""
    if size <= LONG:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(_thread, function, *args)
