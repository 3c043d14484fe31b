"""Tokenizes the rows of offline trainers: sft, dpo and reward models.

A chat row has the tokens that an agent would send and sample. Each answer has the tokens of its own
rendering, see answers.py. Shape letters: T = tokens of one row; S = tokens of its `next_state`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import PlacedRow
from arealite.base.errors import UserError
from arealite.ext.agents.turn_tokens import common_prefix_length
from arealite.ext.offline.answers import RenderedConversation, special_tokens
from arealite.ext.offline.tool_schemas import read_tools
from arealite.ext.prompts.rendering_probes import unread_keys
from arealite.system.data.forms import check_prompt, tool_calls
from arealite.system.data.templates import encode, tokenize

if TYPE_CHECKING:
    from arealite.api.tokenizer import Tokenizer

CONTEXT = 0
"""Kind of the tokens before the first trained answer."""
ASSISTANT = 1
"""Kind of the tokens of a trained answer."""
NEXT_STATE = 2
"""Kind of the tokens between and after trained answers."""
ALWAYS_READ = {"reward", "conversations"}
"""Columns that are read before a row is tokenized: as min_reward, and as ShareGPT's messages."""
CHAT_COLUMNS = {"tools", "system"}
"""Columns that belong to a conversation. A row of texts has no place for them."""
MessageList = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Example:
    """The tokens of one row."""

    tokens: np.ndarray
    """int32 [T]: token ids"""
    kinds: np.ndarray
    """uint8 [T]: CONTEXT, ASSISTANT or NEXT_STATE"""


@dataclass(kw_only=True)
class Unread:
    """Names in the rows that nothing reads. The values are not used; the order is that of rows."""

    columns: dict[str, None] = field(default_factory=dict[str, None])
    message_keys: dict[str, None] = field(default_factory=dict[str, None])

    def __str__(self) -> str:
        """Return both kinds of names as a text; "" if there are none."""
        columns = f"columns {', '.join(self.columns)}" if self.columns else ""
        keys = f"keys of messages {', '.join(self.message_keys)}" if self.message_keys else ""
        return "; ".join(filter(None, [columns, keys]))


class RowEncoder:
    """Tokenizes rows."""

    def __init__(self, config: ExperimentConfig, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.sft = config.trainer.sft
        self.limit = config.trainer.offline.max_tokens
        self.is_sft = config.trainer.type == "sft"
        self.mapped = {path.partition(".")[0] for path in config.dataset.columns.values()}
        """Columns of the file that `dataset.columns` names."""
        self.unread = Unread()

    def encode(self, row: PlacedRow) -> list[Example]:
        """Tokenize a row, and truncate each example to `max_tokens`.

        Returns:
            One example (sft) or two (dpo and reward: chosen, rejected).

        Raises:
            UserError: the row cannot be used. The error begins with the place of the row.
        """
        return self._supervised(row) if self.is_sft else self._pair(row)

    def _supervised(self, row: PlacedRow) -> list[Example]:
        place, columns = row
        present = {name for name, cell in columns.items() if cell is not None}
        if "tokens" in present:
            self._note_columns(columns, {"tokens", "loss_mask", "next_state"})
            return [self._collected(columns, place)]
        if "messages" in present:
            return [self._conversation(columns, place)]
        if {"prompt", "completion"} <= present:
            return [self._answer(columns, place, "completion")]
        raise _unknown(row, "`messages`, `prompt` and `completion`, or `tokens` and `loss_mask`")

    def _pair(self, row: PlacedRow) -> list[Example]:
        place, columns = row
        if columns.get("chosen") is None or columns.get("rejected") is None:
            raise _unknown(row, "`chosen` and `rejected`, and usually `prompt`")
        if columns["chosen"] == columns["rejected"]:
            raise UserError(f"{place}: `chosen` and `rejected` are equal. Remove the row.")
        return [self._answer(columns, place, name) for name in ("chosen", "rejected")]

    def _conversation(self, columns: dict[str, object], place: str) -> Example:
        """Tokenize the column `messages` of a row."""
        self._note_columns(columns, {"messages", *CHAT_COLUMNS})
        messages = check_prompt(columns["messages"], place, "messages")
        if isinstance(messages, str):
            raise UserError(f'{place}: `messages` must be a list of {{"role": …, "content": …}}.')
        messages = _with_system(messages, columns, place)
        turns = self._trained_turns(messages, place)
        if self.sft.turns == "last" and turns:
            last_turn = turns[-1]
            messages = messages[: last_turn + 1]
            turns = [last_turn]
        return self._chat(columns, place, messages, turns)

    def _collected(self, columns: dict[str, object], place: str) -> Example:
        """Return the example of a row with tokens; the tokens of `next_state` follow if trained."""
        state = columns.get("next_state") if self.sft.next_state_weight > 0 else None
        if not isinstance(state, str | None):
            raise UserError(f"{place}: `next_state` must be a text, or null without one.")
        tokens = columns["tokens"]
        mask = columns.get("loss_mask")
        if isinstance(tokens, bytes) and isinstance(mask, bytes):
            tokens = np.frombuffer(tokens, "<i4")
            mask = np.frombuffer(mask, np.uint8)
        tokens_T = np.asarray(tokens)
        mask_T = np.asarray(mask)
        are_integers = tokens_T.dtype.kind in "iu" and mask_T.dtype.kind in "iub"
        if not are_integers or tokens_T.ndim != 1 or tokens_T.shape != mask_T.shape:
            raise UserError(
                f"{place}: `tokens` must be token ids, and `loss_mask` as many 0 and 1. "
                "Write both as lists of equal length."
            )
        is_trained_T = mask_T.astype(bool)
        follows_answer_T = is_trained_T.cumsum() > 0
        kinds_T = np.where(follows_answer_T, NEXT_STATE, CONTEXT)
        kinds_T = np.where(is_trained_T, ASSISTANT, kinds_T)
        state_ids = encode(self.tokenizer, state) if state else []
        state_S = np.array(state_ids, np.int64)
        state_kinds_S = np.full_like(state_S, NEXT_STATE)
        return self._example(
            tokens=np.append(tokens_T, state_S),
            kinds=np.append(kinds_T, state_kinds_S),
        )

    def _answer(
        self,
        columns: dict[str, Any],
        place: str,
        name: str,
    ) -> Example:
        """Tokenize the row's prompt and one answer: two texts, or two lists of messages.

        If the row has no prompt, the prompt is the beginning that both answers have in common.

        Args:
            columns: The row.
            place: Its place, for errors.
            name: The column with the answer.
        """
        answer = check_prompt(columns[name], place, name)
        prompt = columns.get("prompt")
        answer_columns = {"completion"} if name == "completion" else {"chosen", "rejected"}
        if prompt is None and isinstance(answer, list):
            chosen = columns["chosen"]
            rejected = columns["rejected"]
            num_shared = common_prefix_length(chosen, rejected)
            prompt = answer[:num_shared]
            answer = answer[num_shared:]
        elif prompt is not None:
            prompt = check_prompt(prompt, place)
        if isinstance(prompt, list) and isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        if isinstance(prompt, list) and isinstance(answer, list):
            self._note_columns(columns, {"prompt", *answer_columns, *CHAT_COLUMNS})
            return self._answer_messages(columns, place, prompt, answer)
        if not isinstance(prompt, str) or not isinstance(answer, str):
            raise UserError(f"{place}: `prompt` and `{name}` must both be texts, or both messages.")
        self._note_columns(columns, {"prompt", *answer_columns})
        context = tokenize(self.tokenizer, prompt)
        sampled = [*encode(self.tokenizer, answer), self._eos(place)]
        kinds = [CONTEXT] * len(context) + [ASSISTANT] * len(sampled)
        return self._example(context + sampled, kinds)

    def _answer_messages(
        self,
        columns: dict[str, Any],
        place: str,
        prompt: MessageList,
        answer: MessageList,
    ) -> Example:
        """Tokenize a prompt and an answer that are lists of messages."""
        prompt = _with_system(prompt, columns, place)
        prompt, answer, beginning = _continued(prompt, answer)
        answer_turns = self._trained_turns(answer, place)
        turns = [len(prompt) + turn for turn in answer_turns]
        return self._chat(columns, place, prompt + answer, turns, beginning=beginning)

    def _trained_turns(self, messages: MessageList, place: str) -> list[int]:
        """Return the indices of the assistant's messages whose `weight` is not 0."""
        turns = list[int]()
        for index, message in enumerate(messages):
            weight = message.get("weight")
            if weight not in (None, 0, 1):
                raise UserError(f"{place}: `weight` of message {index + 1} must be 0 or 1.")
            if message["role"] == "assistant" and weight != 0:
                turns.append(index)
        return turns

    def _chat(
        self,
        columns: Mapping[str, object],
        place: str,
        messages: MessageList,
        turns: list[int],
        *,
        beginning: str = "",
    ) -> Example:
        """Tokenize the conversation of a row, whose messages at the indices `turns` are trained.

        Each prompt has to begin with all earlier tokens, as for an agent. `beginning` is the
        beginning of the first trained message that belongs to the prompt.
        """
        tools = read_tools(columns.get("tools"), place)
        if not turns:
            raise UserError(f"{place}: no message of the assistant to learn from. Remove the row.")
        self._note_message_keys(messages)
        try:
            tokens, kinds = self._chat_tokens(messages, turns, tools, beginning)
        except UserError as error:
            raise UserError(f"{place}: {error}") from error
        return self._example(tokens, kinds)

    def _chat_tokens(
        self,
        messages: MessageList,
        turns: list[int],
        tools: Sequence[object],
        beginning: str,
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of a conversation, and their kinds."""
        conversation = RenderedConversation(self.tokenizer, messages, tools)
        conversation.check_context()
        tokens = list[int]()
        kinds = list[int]()
        next_turns = [*turns[1:], len(messages)]
        for turn, next_turn in zip(turns, next_turns, strict=True):
            is_first = turn == turns[0]
            answer = conversation.answer(
                turn,
                following=next_turn,
                begun=beginning if is_first else "",
            )
            prompt = self._extend(tokens, answer.prompt, turn)
            num_context = len(prompt) - len(tokens)
            kinds += [CONTEXT if is_first else NEXT_STATE] * num_context
            sampled = self._encode_after(answer.prompt, answer.text)
            if answer.needs_eos:
                sampled = [*sampled, self._eos()]
            tokens = prompt + sampled
            kinds += [ASSISTANT] * len(sampled)
        if turns[-1] + 1 < len(messages):
            rendered = conversation.prompt(len(messages))
            whole = self._extend(tokens, rendered, len(messages))
            kinds += [NEXT_STATE] * (len(whole) - len(tokens))
            tokens = whole
        return tokens, kinds

    def _encode_after(self, prompt: str, answer: str) -> list[int]:
        """Return the tokens of an answer that follows a prompt.

        Tokenizers treat the start of a text differently, so the answer is tokenized after the
        prompt's last special token, where tokenizers split a text in any case.
        """
        places = [prompt.rfind(token) for token in special_tokens(self.tokenizer)]
        prompt_end = prompt[max(0, *places) :] if places else prompt
        end_ids = encode(self.tokenizer, prompt_end)
        ids = encode(self.tokenizer, prompt_end + answer)
        num_end = len(end_ids)
        if ids[:num_end] == end_ids:
            return ids[num_end:]
        return encode(self.tokenizer, answer)

    def _extend(
        self,
        tokens: list[int],
        rendered: str,
        turn: int,
    ) -> list[int]:
        """Return the tokens of a rendered prompt, which has to begin with earlier tokens."""
        prompt = encode(self.tokenizer, rendered)
        if prompt[: len(tokens)] != tokens:
            num_equal = common_prefix_length(prompt, tokens)
            raise UserError(
                f"from token {num_equal} on, the chat template renders "
                f"the messages before message {turn + 1} differently than for earlier answers, so "
                "no agent would have sampled these tokens. Set trainer.sft.turns=last, give each "
                "answer a row of its own, or change the template."
            )
        return prompt

    def _eos(self, place: str = "") -> int:
        if self.tokenizer.eos_token_id is None:
            prefix = f"{place}: " if place else ""
            raise UserError(
                f"{prefix}the model's tokenizer has no EOS token to end an answer. Set eos_token."
            )
        return self.tokenizer.eos_token_id  # type: ignore[return-value]

    def _example(self, tokens: Any, kinds: Any) -> Example:
        """Return an example of at most `max_tokens` tokens."""
        return Example(
            tokens=np.asarray(tokens[: self.limit], np.int32),
            kinds=np.asarray(kinds[: self.limit], np.uint8),
        )

    # ------------------------------------------------------------ what nothing reads

    def note_columns(self, names: Iterable[str]) -> None:
        """Note columns that are not read, except those that were read before."""
        for name in names:
            if name not in ALWAYS_READ | self.mapped:
                self.unread.columns[name] = None

    def _note_columns(self, columns: Mapping[str, object], read: set[str]) -> None:
        """Note the columns of a row that have a value and are not in `read`."""
        present = [name for name, cell in columns.items() if cell is not None]
        self.note_columns([name for name in present if name not in read])

    def _note_message_keys(self, messages: MessageList) -> None:
        for key in unread_keys(self.tokenizer, messages):
            if key != "weight":
                self.unread.message_keys[key] = None


def _with_system(
    messages: MessageList,
    columns: Mapping[str, Any],
    place: str,
) -> MessageList:
    """Return the messages after the row's column `system`, if it has one."""
    system = columns.get("system")
    if not system:
        return messages
    if not isinstance(system, str):
        raise UserError(f"{place}: `system` must be a text, or null without one.")
    if messages and messages[0]["role"] == "system":
        if messages[0]["content"] != system:
            raise UserError(
                f"{place}: the column `system` differs from the first message, which is a system "
                "message, too. Keep one of them."
            )
        return messages
    return [{"role": "system", "content": system}, *messages]


def _continued(prompt: MessageList, answer: MessageList) -> tuple[MessageList, MessageList, str]:
    """Join the beginning of an answer at the end of a prompt with the answer.

    Returns:
        The prompt without the beginning, the answer with it, and the beginning; "" without one.
    """
    first = answer[0]
    last = prompt[-1] if prompt else {"role": ""}
    are_answers = last["role"] == "assistant" and first["role"] == "assistant"
    if not are_answers or tool_calls(last):
        return prompt, answer, ""
    beginning = last["content"]
    content = beginning + (first["content"] or "")
    whole_answer = {**last, **first, "content": content}
    return prompt[:-1], [whole_answer, *answer[1:]], beginning


def _unknown(row: PlacedRow, wanted: str) -> UserError:
    """Return the error for a row without the columns that a trainer needs."""
    place, columns = row
    present = [name for name, cell in columns.items() if cell is not None]
    names = ", ".join(present) or "none"
    return UserError(f"{place}: a row needs the columns {wanted}; it has {names}.")
