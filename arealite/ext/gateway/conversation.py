"""A conversation as a tree of messages that keeps the exact tokens of each sampled answer.

A request repeats the whole history. Its messages are looked up in the tree; the tokens of its
latest sampled answer, and all tokens before, are reused unchanged. Only what is new is rendered
and tokenised. A message that differs begins a branch.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import msgspec

from arealite.api.episode import Origin
from arealite.api.observation import ChatMessage
from arealite.ext.agents.turn_tokens import encode_after, stop_text
from arealite.ext.gateway import tree
from arealite.ext.gateway.apis import past_messages
from arealite.ext.gateway.rendering import CALLS, SYSTEM, THOUGHTS, TOOLS, Renderer
from arealite.ext.gateway.request_data import ApiError, ChatRequest, ParsedAnswer
from arealite.ext.gateway.text_completions import TextCompletions
from arealite.ext.gateway.tree import Key, KeyedMessage, MessageNode, Prompt, SampledAnswer
from arealite.system.data.forms import tool_calls
from arealite.system.data.templates import decode, encode

LONG = 2000
"""Texts with more characters are rendered and tokenised in a thread; parts of a request with more
bytes are converted each time."""
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gateway")
"""One thread: several would hold up the event loop longer, because each may keep the interpreter
for its switch interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStart:
    """The beginning of a prompt."""

    base: SampledAnswer | None
    reused_ids: list[int]
    """Tokens of earlier turns, in a list of its own."""
    new_text: str
    """Text to tokenise."""
    template_text: str
    """Text of the template after `base`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestRequest:
    """The latest request, which the next one usually repeats."""

    items: list[bytes]
    tools: list[Any]
    node: MessageNode
    """The last message."""
    base: SampledAnswer | None
    """The last sampled answer."""

    def is_repeated_by(self, request: ChatRequest) -> bool:
        """Return whether a request has the same tools, and begins with the same items."""
        count = len(self.items)
        if count == 0 or request.tools != self.tools:
            return False
        return request.items[:count] == self.items


class SeatConversations:
    """The conversations of one seat; those with an equal beginning share it."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.is_incremental = True
        """False: an incremental rendering differed from that of the whole conversation, and whole
        renderings are used since."""
        self._roots: dict[bytes, MessageNode] = {}
        """The root of the tree for each set of tools; a key is the JSON of the tools."""
        self._samples: dict[str, SampledAnswer] = {}
        """By id of the answer."""
        self._completions = TextCompletions(renderer)
        self._latest: LatestRequest | None = None
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
            size = len(request.prompt)
            return await _run(size, self._completions.prompt, request.prompt)
        node, base, branch_reason = self._find(request)
        num_characters = node.characters
        is_checked = False
        if base is not None:
            is_checked = not self.is_incremental or is_power_of_two(base.num_turns)
            if not is_checked:
                num_characters -= base.node.characters
        prompt = await _run(num_characters, self._make_prompt, request, node, base, is_checked)
        node = self._store(request, node, base)  # only now: a refused request stores nothing
        prompt.node = node
        reason = self._reason(prompt, node, base, branch_reason)
        prompt.origin = msgspec.structs.replace(prompt.origin, reason=reason)
        if not is_count_only:
            node.is_asked = True
            self._is_begun = True
            if base is not None:
                base.is_continued = True
        return prompt

    def _reason(
        self, prompt: Prompt, node: MessageNode, base: SampledAnswer | None, branch_reason: str
    ) -> str:
        """Return why a prompt begins a branch; "" if it continues the answer `base`."""
        if node.is_asked:
            return "resampled"
        if prompt.base is not base:
            return "rewritten"
        if not self._is_begun:
            return "first"
        if base is None:
            return branch_reason
        return "edited" if base.is_continued else ""

    def add(self, prompt: Prompt, answer: ParsedAnswer) -> None:
        """Add an answer to the tree."""
        response = answer.response
        output_ids = response.output_ids if response else []
        stop = stop_text(self.renderer.tokenizer, response)
        node = prompt.node
        if node is None:
            self._completions.add(prompt, answer, output_ids, stop)
            return
        message = answer.message()
        accepted = self._acceptable(node, message, prompt, output_ids, stop)
        item = KeyedMessage(tree.key_of(message), accepted)
        child = self._child(node, self._with_call_ids(item))
        node.children |= {item.key: child, child.key: child}
        num_base_tokens = prompt.base.num_tokens if prompt.base else 0
        sample = SampledAnswer(
            prompt=replace(prompt, ids=[]),
            new_ids=prompt.ids[num_base_tokens:] + output_ids,
            num_tokens=len(prompt.ids) + len(output_ids),
            stop=stop,
            message=item.message,
            node=child,
            num_turns=prompt.base.num_turns + 1 if prompt.base else 1,
            response=response,
        )
        child.samples.append(sample)
        self._samples[answer.id] = sample

    def _acceptable(
        self,
        node: MessageNode,
        message: ChatMessage,
        prompt: Prompt,
        output_ids: list[int],
        stop: str,
    ) -> ChatMessage:
        """Return an answer in a form that the template accepts, at worst as its whole text."""
        without_thought = {**message, "reasoning_content": ""}
        with_one_call = {**without_thought, "tool_calls": tool_calls(message)[:1]}
        for form in (message, without_thought, with_one_call):
            with suppress(ApiError):
                self.renderer.ending(node.kinds & TOOLS, form)
                return self.renderer.prepare(form)
        sampled = decode(self.renderer.tokenizer, output_ids)
        content = prompt.opening + sampled.removesuffix(stop)
        return {"role": "assistant", "content": content}

    # ------------------------------------------------------------ the tree

    def _find(self, request: ChatRequest) -> tuple[MessageNode, SampledAnswer | None, str]:
        """Look up the messages of a request; make nodes for new ones, which are not stored.

        Returns:
            The last message, the last sampled answer before it, and the reason for a new branch if
            there is no such answer.
        """
        latest = self._latest
        if latest is not None and not request.previous and latest.is_repeated_by(request):
            node = latest.node
            base = latest.base
            reason = "edited"
            new_items = request.items[len(latest.items) :]
        else:
            node, reason = self._root(request.tools)
            base = None
            new_items = request.items
        messages = [message for item in new_items for message in _parse(item)]
        preferred = None
        if request.previous:
            preferred, messages = self._continue(request.previous, messages)
        if node.depth == 0:
            if not messages:
                raise ApiError(400, "The request has no message. Send at least one.")
            instructions = messages[0]
            if instructions.is_system and instructions.key not in node.children:
                reason = "tools"
        node, base = self._walk(node, base, messages, preferred)
        return node, base, reason

    def _root(self, tools: list[Any]) -> tuple[MessageNode, str]:
        """Return the root of the conversations with some tools, and the reason for its branches."""
        tools_json = msgspec.json.encode(tools)
        root = self._roots.get(tools_json)
        if root is not None:
            return root, "edited"
        return MessageNode(kinds=TOOLS if tools else 0), "tools"

    def _store(
        self, request: ChatRequest, node: MessageNode, base: SampledAnswer | None
    ) -> MessageNode:
        """Add the messages of a request to the tree; return its last message there.

        A concurrent request may have added equal ones.
        """
        path = node.path()
        root = path[0].parent or node
        if not root.children:  # a new root
            root = self._roots.setdefault(msgspec.json.encode(request.tools), root)
        stored = root
        for message in path:
            message.parent = stored
            stored = stored.children.setdefault(message.key, message)
        if not request.previous and stored.key.role != "assistant":
            self._latest = LatestRequest(
                items=request.items,
                tools=request.tools,
                node=stored,
                base=base,
            )
        return stored

    def _walk(
        self,
        node: MessageNode,
        base: SampledAnswer | None,
        items: list[KeyedMessage],
        preferred: SampledAnswer | None,
    ) -> tuple[MessageNode, SampledAnswer | None]:
        """Return the node of the last of `items` after `node`, and the last sampled answer.

        Args:
            node: The message before.
            base: The last sampled answer up to `node`.
            items: Messages.
            preferred: The answer to prefer among several with equal texts.
        """
        tree_ids = dict[object, object]()  # of calls, by the ids that the client sent
        at = 0
        while at < len(items):
            item, num_merged = tree.merge(node, items, at)
            at += num_merged
            item = self._renamed(item, tree_ids)
            key = self._with_call_ids(item).key
            node = node.children.get(key) or self._child(node, item)
            message_in_tree = node.message
            if node.samples:
                base = tree.choose(node.samples, item.message, preferred=preferred)
                message_in_tree = base.message
            if item.key.calls:
                sent_ids = tree.call_ids(item.message)
                ids_in_tree = tree.call_ids(message_in_tree)
                tree_ids |= zip(sent_ids, ids_in_tree, strict=False)
        return node, base

    def _with_call_ids(self, item: KeyedMessage) -> KeyedMessage:
        """Return a message with the ids of its calls in its key, if the template writes ids."""
        calls = item.key.calls
        if not item.is_assistant or not calls or not self.renderer.has_ids:
            return item
        ids = repr(tree.call_ids(item.message)).encode()
        calls += (("", ids),)
        return KeyedMessage(item.key._replace(calls=calls), item.message)

    def _renamed(self, item: KeyedMessage, tree_ids: Mapping[object, object]) -> KeyedMessage:
        """Return a tool's result with the id that its call has in the tree."""
        if item.key.role != "tool" or not self.renderer.has_ids:
            return item
        sent_id = item.message.get("tool_call_id")
        tree_id = tree_ids.get(sent_id, sent_id)
        key = Key(
            role="tool",
            content=item.key.content,
            calls=((str(tree_id), b""),),
        )
        return KeyedMessage(key, {**item.message, "tool_call_id": tree_id})

    def _continue(
        self, previous: str, items: list[KeyedMessage]
    ) -> tuple[SampledAnswer, list[KeyedMessage]]:
        """Return the answer `previous`; and the messages up to it, then `items`.

        The instructions of a request replace those of the request before.

        Raises:
            ApiError: 404: no such answer.
        """
        sample = self._samples.get(previous)
        if sample is None:
            raise ApiError(
                404, f"No answer of this session has the id {previous}. Send all messages."
            )
        earlier = [KeyedMessage(node.key, node.message) for node in sample.node.path()]
        if earlier[0].is_system:
            earlier = earlier[1:]
        num_instructions = 1 if items and items[0].is_system else 0
        return sample, items[:num_instructions] + earlier + items[num_instructions:]

    def _child(self, node: MessageNode, item: KeyedMessage) -> MessageNode:
        """Return the node of a message after `node`; a new one, not stored, if there is none."""
        return node.children.get(item.key) or self._new_child(node, item)

    def _new_child(self, node: MessageNode, item: KeyedMessage) -> MessageNode:
        key = item.key
        message = item.message
        kinds = node.kinds
        if item.is_system:
            kinds |= SYSTEM
        if item.is_assistant and key.calls:
            kinds |= CALLS
        if item.is_assistant and message.get("reasoning_content"):
            kinds |= THOUGHTS
        if item.is_system and node.depth and not self.renderer.has_late_system:
            kinds = node.kinds
            message = {**message, "role": "user"}
        num_characters = len(key.content)
        num_characters += sum([len(arguments) for _, arguments in key.calls])
        return MessageNode(
            parent=node,
            key=key,
            message=self.renderer.prepare(message),
            kinds=kinds,
            characters=node.characters + num_characters,
            depth=node.depth + 1,
        )

    # ------------------------------------------------------------ prompts

    def _make_prompt(
        self,
        request: ChatRequest,
        node: MessageNode,
        base: SampledAnswer | None,
        is_checked: bool,
    ) -> Prompt:
        """Render and tokenise the prompt of a request.

        Args:
            request: The request.
            node: Its last message.
            base: The last sampled answer before it.
            is_checked: Whether an incremental rendering is compared with that of the whole.

        Raises:
            ApiError: 400: the template refuses the messages, or cannot force the call.
        """
        renderer = self.renderer
        forced_call = self._forced_call(request)
        start = self._start(node, base, request.tools, is_checked)
        opener = renderer.opening(start.template_text)
        ending_of_thought = f"\n{renderer.family.think[1]}\n\n" if forced_call and opener else ""
        appended = ending_of_thought + forced_call
        opening = opener + appended
        new_text = start.new_text + appended
        num_reused = len(start.reused_ids)
        new_ids = encode_after(renderer.tokenizer, start.reused_ids, new_text)
        return Prompt(
            ids=start.reused_ids + new_ids,
            origin=Origin(reused=num_reused, new=len(new_ids)),
            opening=opening,
            node=node,
            base=start.base,
            template_text=start.template_text.removesuffix(opener),
            header=self._header_size(num_reused, new_ids, opening),
        )

    def _header_size(self, num_reused: int, new_ids: list[int], opening: str) -> int | None:
        """Return the number of tokens before the opening; None: one token has parts of both."""
        opening_ids = encode(self.renderer.tokenizer, opening)
        num_before = len(new_ids) - len(opening_ids)
        return num_reused + num_before if new_ids[num_before:] == opening_ids else None

    def _forced_call(self, request: ChatRequest) -> str:
        """Return the text that begins the call which the request demands; "" if it demands none.

        Raises:
            ApiError: 400: the model's calls cannot be forced.
        """
        choice = request.tool_choice
        family = self.renderer.family
        if choice in ("auto", "none"):
            return ""
        tool_name = choice[1:] if choice.startswith("=") else None
        call_start = family.opening(tool_name)
        if not call_start:
            raise ApiError(
                400,
                f"tool_choice: a call cannot be forced with models of family {family.name}. "
                'Use "auto".',
            )
        return call_start

    def _start(
        self,
        node: MessageNode,
        base: SampledAnswer | None,
        tools: list[Any],
        is_checked: bool,
    ) -> PromptStart:
        """Return the tokens to keep and the text to tokenise for an answer to `node`."""
        base_request = base.prompt.node if base is not None else None
        if base is None or base_request is None:
            return _start_anew(self._render_whole(node, [], tools))
        text_after = None
        if self.is_incremental:
            new_nodes = node.path(base.node.depth)
            text_after = self.renderer.render_after(
                base_request.kinds,
                base.message,
                [new_node.message for new_node in new_nodes],
            )
        if text_after is not None and not is_checked:
            return self._start_after(base, text_after)
        answers = base.chain()
        whole_text = self._render_whole(node, answers, tools)
        num_repeated, end = self.renderer.repeated(whole_text, answers, node.kinds)
        is_repeated = num_repeated == len(answers)
        is_equal = is_repeated and text_after == whole_text[end:]
        if text_after is not None and not is_equal:
            self.is_incremental = False
        if not is_repeated:
            return self._start_rewritten(node, answers, tools, num_repeated)
        return self._start_after(base, whole_text[end:])

    def _start_rewritten(
        self,
        node: MessageNode,
        answers: list[SampledAnswer],
        tools: Sequence[Any],
        num_repeated: int,
    ) -> PromptStart:
        """Return the start of a prompt in which the template repeats only some answers.

        Args:
            node: The last message.
            answers: The answers of the conversation.
            tools: Schemas of the tools.
            num_repeated: Number of answers that are repeated.
        """
        num_kept = num_repeated
        while True:
            kept = answers[:num_kept]
            whole_text = self._render_whole(node, kept, tools)
            num_repeated, end = self.renderer.repeated(whole_text, kept, node.kinds)
            if num_repeated == num_kept:
                break
            num_kept = num_repeated
        text_after = whole_text[end:]
        start = self._start_after(kept[-1], text_after) if kept else _start_anew(text_after)
        rewritten = answers[num_kept]
        prompt = rewritten.prompt
        if prompt.header is None or not text_after.startswith(prompt.template_text):
            return start
        return replace(
            start,
            reused_ids=rewritten.ids[: prompt.header],
            new_text=text_after[len(prompt.template_text) :],
        )

    def _start_after(self, base: SampledAnswer, text_after: str) -> PromptStart:
        """Return the start of a prompt that continues an answer by a text of the template."""
        turn = self.renderer.ending(base.node.kinds & TOOLS, base.message).turn
        return PromptStart(
            base=base,
            reused_ids=base.ids,
            new_text=self.renderer.remaining(text_after, base.stop, turn),
            template_text=text_after,
        )

    def _render_whole(
        self, node: MessageNode, answers: Sequence[SampledAnswer], tools: Sequence[Any]
    ) -> str:
        """Render a conversation with stand-ins for some answers."""
        messages = [message_node.message for message_node in node.path()]
        for number, answer in enumerate(answers):
            index = answer.node.depth - 1
            messages[index] = self.renderer.stand_in(answer.message, number)
        return self.renderer.render(messages, tools)


def is_power_of_two(num_turns: int) -> bool:
    """Return whether the incremental rendering is checked after this number of turns.

    A check renders the whole conversation. With checks after 1, 2, 4, 8, … turns only, all checks
    together cost about as much as two renderings of the longest conversation.
    """
    return num_turns & (num_turns - 1) == 0


def _start_anew(whole_text: str) -> PromptStart:
    """Return the start of a prompt without tokens of earlier turns."""
    return PromptStart(
        base=None,
        reused_ids=[],
        new_text=whole_text,
        template_text=whole_text,
    )


def _parse(item: bytes) -> list[KeyedMessage]:
    """Convert a part of a request to messages; short parts are converted once."""
    convert = _converted if len(item) <= LONG else _converted.__wrapped__
    return convert(item)


@lru_cache(maxsize=2**14)
def _converted(item: bytes) -> list[KeyedMessage]:
    messages = past_messages.messages(item)
    return [KeyedMessage(tree.key_of(message), message) for message in messages]


async def _run(size: int, function: Callable[..., Prompt], *args: object) -> Prompt:
    """Call a function; for long texts in a thread."""
    if size <= LONG:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(_thread, function, *args)
