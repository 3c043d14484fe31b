"""Reads and tokenizes the rows of offline trainers. Shape letter: T = tokens of one row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arealite.api.agent import load_tokenizer
from arealite.api.config import ExperimentConfig
from arealite.api.payloads import decode_segments
from arealite.base.errors import UserError
from arealite.base.model_folder import vocab_size
from arealite.base.names import RunPaths
from arealite.system.data.dataset import EMPTY, identity
from arealite.system.data.forms import chat_row, check_prompt, renamed, tool_calls
from arealite.system.data.sources import is_saved, read_rows
from arealite.system.data.templates import common_prefix_length, encode, render, tokenize
from arealite.system.ledger.ledger import open_read_only
from arealite.system.ledger.payloads import whole_payload

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

COLUMNS = (
    *("messages", "prompt", "completion", "chosen", "rejected"),
    *("tokens", "loss_mask", "reward", "next_state"),
)
CONTEXT, ASSISTANT, NEXT_STATE = 0, 1, 2
"""Kinds of tokens: before the first trained answer; in an answer; between and after answers."""
Row = tuple[str, dict[str, object]]
"""The place of a row, such as "data.jsonl, line 3", and its columns."""
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Example:
    """The tokens of one row."""

    tokens: np.ndarray
    """int32 [T]: token ids"""
    kinds: np.ndarray
    """uint8 [T]: CONTEXT, ASSISTANT or NEXT_STATE"""


# ------------------------------------------------------------ rows


def read_dataset(config: ExperimentConfig) -> tuple[list[Row], list[Row]]:
    """Read the rows of an offline trainer.

    Returns:
        Training rows and held-out rows; the latter are [] without `dataset.eval`.
    """
    data = config.dataset
    least = config.trainer.sft.min_reward if config.trainer.type == "sft" else None
    read = partial(load_rows, min_reward=least, columns=data.columns)
    return read(data.train, "train"), read(data.eval, "eval") if data.eval else []


def load_rows(
    path: str, split: str, *, min_reward: float | None = None, columns: Mapping[str, str] = EMPTY
) -> list[Row]:
    """Read rows from a dataset, or from the ledger of a run.

    Args:
        path: A dataset as for `read_rows`, a ledger.sqlite, or a run folder.
        split: train or eval, for errors.
        min_reward: Leave out rows with a smaller reward; rows without a reward are kept.
        columns: The option `dataset.columns`.

    Raises:
        UserError: there are no rows, or none has at least `min_reward`.
    """
    place = Path(path).expanduser()
    is_run = bool(path) and place.is_dir() and not is_saved(place)
    ledger = RunPaths(place).ledger if is_run else place
    if ledger.suffix == ".sqlite":
        found = _collected(ledger)
    else:
        every = read_rows(path, split, () if columns else COLUMNS)
        found = [(at, renamed(row, chat_row(row), columns, at, COLUMNS)) for at, row in every]
    if not found:
        raise UserError(f"dataset.{split}={path} has no rows.")
    if min_reward is None:
        return found
    rows = [row for row in found if _reward(row, unknown=min_reward) >= min_reward]
    if not rows:
        what = f"none of its {len(found)} rows has a reward of at least trainer.sft.min_reward"
        raise UserError(f"dataset.{split}={path}: {what}={min_reward}. Lower it.")
    return rows


def _reward(row: Row, *, unknown: float) -> float:
    if not isinstance(reward := row[1].get("reward"), int | float | None):
        raise UserError(f"{row[0]}: `reward` must be a number, or null where it is not known.")
    return unknown if reward is None else reward


def _collected(ledger: Path) -> list[Row]:
    """Return one row for each segment of the trajectories in a ledger."""
    with open_read_only(ledger) as db:
        sql = "SELECT trajectory_id, reward, payload FROM trajectories WHERE payload NOTNULL "
        sql += "ORDER BY rowid"
        return [
            (f"{ledger}, {name}", {"tokens": s.tokens, "loss_mask": s.loss_mask, "reward": reward})
            for name, reward, payload in db.execute(sql)
            for s in decode_segments(whole_payload(db, payload))
        ]


def identity_of_rows(config: ExperimentConfig, rows: list[Row]) -> dict[str, str]:
    """Return the names and values that must not change within a trial of an offline trainer."""
    return identity(config, [columns for _, columns in rows])


def check_examples(
    config: ExperimentConfig, model: dict[str, object]
) -> tuple[dict[str, str], list[str]]:
    """Check that the rows of an offline trainer can be used.

    Args:
        config: The experiment.
        model: The model's config.json.

    Returns:
        The names and values that must not change within the trial; and the places of rows that are
        not trained, because their context fills `max_tokens`.

    Raises:
        UserError: a row cannot be used, or no row has a token to train.
    """
    train, held_out = read_dataset(config)
    encode_row = make_encoder(config, load_tokenizer(config.model.path))
    vocabulary, limit = vocab_size(model), config.trainer.offline.max_tokens
    unused = list[str]()
    for row in (*train, *held_out):
        examples = encode_row(row)
        for example in examples:
            top, bottom = int(example.tokens.max(initial=0)), int(example.tokens.min(initial=0))
            if bottom < 0 or (vocabulary and top >= vocabulary):
                wrong = top if bottom >= 0 else bottom
                what = f"{row[0]}: token {wrong} is not among the model's {vocabulary}"
                raise UserError(f"{what}. Create the rows with the tokenizer of model.path.")
        if not all(example.kinds[1:].any() for example in examples):
            unused.append(row[0])
    if {place for place, _ in train} <= {*unused}:
        what = f"no row has a token to learn within trainer.offline.max_tokens={limit}"
        raise UserError(f"{what}. Raise it.")
    return identity_of_rows(config, train), unused


# ------------------------------------------------------------ examples


def make_encoder(config: ExperimentConfig, tokenizer: Tokenizer) -> Callable[[Row], list[Example]]:
    """Return a function that tokenizes a row.

    The function returns one example (sft) or two (dpo and reward: chosen, rejected). It truncates
    an example to `max_tokens`, and raises UserError for a row that cannot be used.
    """
    encoder = _RowEncoder(config, tokenizer)
    return encoder.supervised if config.trainer.type == "sft" else encoder.pair


class _RowEncoder:
    def __init__(self, config: ExperimentConfig, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.sft = tokenizer, config.trainer.sft
        self.limit = config.trainer.offline.max_tokens

    def supervised(self, row: Row) -> list[Example]:
        where, columns = row
        present = {name for name, value in columns.items() if value is not None}
        if "tokens" in present:
            return [self._collected(columns, where)]
        if "messages" in present:
            if isinstance(messages := check_prompt(columns["messages"], where, "messages"), str):
                what = '`messages` must be a list of {"role": …, "content": …}.'
                raise UserError(f"{where}: {what}")
            turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            if self.sft.turns == "last" and turns:
                return [self._chat(messages[: turns[-1] + 1], where, turns[-1:])]
            return [self._chat(messages, where, turns)]
        if {"prompt", "completion"} <= present:
            return [self._answer(columns, where, "completion")]
        raise _unknown(row, "`messages`, `prompt` and `completion`, or `tokens` and `loss_mask`")

    def pair(self, row: Row) -> list[Example]:
        where, columns = row
        if columns.get("chosen") is None or columns.get("rejected") is None:
            raise _unknown(row, "`chosen` and `rejected`, and usually `prompt`")
        if columns["chosen"] == columns["rejected"]:
            raise UserError(f"{where}: `chosen` and `rejected` are equal. Remove the row.")
        return [self._answer(columns, where, name) for name in ("chosen", "rejected")]

    def _collected(self, columns: dict[str, object], where: str) -> Example:
        state = columns.get("next_state") if self.sft.next_state_weight > 0 else None
        if not isinstance(state, str | None):
            raise UserError(f"{where}: `next_state` must be a text, or null without one.")
        tokens, mask = columns["tokens"], columns.get("loss_mask")
        if isinstance(tokens, bytes) and isinstance(mask, bytes):
            tokens, mask = np.frombuffer(tokens, "<i4"), np.frombuffer(mask, np.uint8)
        tokens_T, mask_T = np.asarray(tokens), np.asarray(mask)
        is_whole = tokens_T.dtype.kind in "iu" and mask_T.dtype.kind in "iub"
        if not is_whole or tokens_T.ndim != 1 or tokens_T.shape != mask_T.shape:
            what = "`tokens` must be token ids, and `loss_mask` as many 0 and 1"
            raise UserError(f"{where}: {what}. Write both as lists of equal length.")
        mask_T = mask_T.astype(bool)
        kinds_T = np.where(mask_T, ASSISTANT, np.where(mask_T.cumsum() > 0, NEXT_STATE, CONTEXT))
        state_S = np.array(encode(self.tokenizer, state) if state else [], np.int64)
        kinds_T = np.append(kinds_T, np.full_like(state_S, NEXT_STATE))
        return self._example(np.append(tokens_T, state_S), kinds_T)

    def _answer(self, columns: dict[str, Any], where: str, name: str) -> Example:
        """Tokenize the row's prompt and one answer: two texts, or two lists of messages.

        If the row has no prompt, the prompt is the beginning that both answers have in common.
        """
        answer, prompt = check_prompt(columns[name], where, name), columns.get("prompt")
        if prompt is None and isinstance(answer, list):
            shared = common_prefix_length(columns["chosen"], columns["rejected"])
            prompt, answer = answer[:shared], answer[shared:]
        elif prompt is not None:
            prompt = check_prompt(prompt, where)
        if isinstance(prompt, list) and isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        if isinstance(prompt, list) and isinstance(answer, list):
            roles = enumerate((message["role"] for message in answer), start=len(prompt))
            return self._chat(prompt + answer, where, [i for i, r in roles if r == "assistant"])
        if not isinstance(prompt, str) or not isinstance(answer, str):
            raise UserError(f"{where}: `prompt` and `{name}` must both be texts, or both messages.")
        context, sampled = tokenize(self.tokenizer, prompt), _sampled(self.tokenizer, answer)
        kinds = [CONTEXT] * len(context) + [ASSISTANT] * len(sampled)
        return self._example(context + sampled, kinds)

    def _chat(self, messages: Messages, where: str, turns: list[int]) -> Example:
        """Tokenize a conversation; the assistant's messages at the indices `turns` are trained.

        Each answer is tokenized as an agent would sample it: after the rendered prompt of all
        earlier messages, and closed by EOS. So each rendered prompt has to begin with all earlier
        tokens.
        """
        if not turns:
            raise UserError(f"{where}: no message of the assistant to learn from. Remove the row.")
        ids, kinds = list[int](), list[int]()
        for turn in [*turns, len(messages)]:
            if turn == turns[-1] + 1 == len(messages):
                break  # no message follows the last answer
            try:
                answered = turn < len(messages)
                past = render(self.tokenizer, messages[:turn], add_generation_prompt=answered)
                prompt = encode(self.tokenizer, past)
                text = _said(self.tokenizer, messages, turn) if answered else None
                sampled = [] if text is None else _sampled(self.tokenizer, text)
            except UserError as error:
                raise UserError(f"{where}: {error}") from error
            if prompt[: len(ids)] != ids:
                raise UserError(
                    f"{where}: from token {common_prefix_length(prompt, ids)} on, the chat "
                    f"template renders the messages before message {turn + 1} differently than for "
                    "earlier answers, so no agent would have sampled these tokens. Set trainer.sft."
                    "turns=last, give each answer a row of its own, or change the template."
                )
            kinds += [NEXT_STATE if ids else CONTEXT] * (len(prompt) - len(ids))
            ids, kinds = prompt + sampled, kinds + [ASSISTANT] * len(sampled)
        return self._example(ids, kinds)

    def _example(self, tokens: Any, kinds: Any) -> Example:
        cut = slice(self.limit)
        return Example(np.asarray(tokens[cut], np.int32), np.asarray(kinds[cut], np.uint8))


def _unknown(row: Row, wanted: str) -> UserError:
    where, columns = row
    has = ", ".join(name for name, value in columns.items() if value is not None) or "none"
    return UserError(f"{where}: a row needs the columns {wanted}; it has {has}.")


def _said(tokenizer: Any, messages: Messages, turn: int) -> str:
    """Return the text of an answer: its content, or with tool calls what the template renders."""
    if not tool_calls(messages[turn]):
        return messages[turn]["content"]
    before = render(tokenizer, messages[:turn])
    whole = render(tokenizer, messages[: turn + 1], add_generation_prompt=False)
    return whole[common_prefix_length(before, whole) :].partition(tokenizer.eos_token)[0]


def _sampled(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of an answer, as an agent would sample them."""
    if tokenizer.eos_token_id is None:
        raise UserError("the model's tokenizer has no EOS token to end an answer. Set eos_token.")
    return [*encode(tokenizer, text), tokenizer.eos_token_id]
