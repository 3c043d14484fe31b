"""Reads and checks the rows of offline trainers: sft, dpo and reward models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from arealite.api.agent import load_tokenizer
from arealite.api.config import ExperimentConfig
from arealite.api.payloads import decode_segments
from arealite.base.errors import UserError
from arealite.base.model_folder import vocab_size
from arealite.base.names import RunPaths
from arealite.system.data.dataset import EMPTY, identity
from arealite.system.data.examples import Row, RowEncoder
from arealite.system.data.forms import chat_row, renamed
from arealite.system.data.sources import is_saved, parquet_columns, read_rows
from arealite.system.ledger.ledger import open_read_only
from arealite.system.ledger.payloads import whole_payload

COLUMNS = (
    *("messages", "prompt", "completion", "chosen", "rejected"),
    *("tokens", "loss_mask", "reward", "next_state", "tools", "system"),
)


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


class Checked(NamedTuple):
    """The result of `check_examples`."""

    identity: dict[str, str]
    """Names and values that must not change within the trial."""
    untrained: list[str]
    """Places of rows that are not trained, because their context fills `max_tokens`."""
    unread: str
    """Names of columns and of keys of messages that nothing reads, as a text; "" without any."""


def check_examples(config: ExperimentConfig, model: dict[str, object]) -> Checked:
    """Check that the rows of an offline trainer can be used.

    Args:
        config: The experiment.
        model: The model's config.json.

    Raises:
        UserError: a row cannot be used, or no row of a split has a token to train.
    """
    train, held_out = read_dataset(config)
    encoder = RowEncoder(config, load_tokenizer(config.model.path))
    vocabulary = vocab_size(model)
    limit = config.trainer.offline.max_tokens
    untrained = list[str]()
    for row in (*train, *held_out):
        examples = encoder.encode(row)
        for example in examples:
            top = int(example.tokens.max(initial=0))
            bottom = int(example.tokens.min(initial=0))
            if bottom < 0 or (vocabulary and top >= vocabulary):
                wrong = top if bottom >= 0 else bottom
                what = f"{row[0]}: token {wrong} is not among the model's {vocabulary}"
                raise UserError(f"{what}. Create the rows with the tokenizer of model.path.")
        if not all(example.kinds[1:].any() for example in examples):
            untrained.append(row[0])
    for split, rows in (("train", train), ("eval", held_out)):
        if rows and {place for place, _ in rows} <= {*untrained}:
            what = f"no row has a token to learn within trainer.offline.max_tokens={limit}"
            raise UserError(f"dataset.{split}: {what}. Raise it.")
    for path in filter(None, [config.dataset.train, config.dataset.eval]):
        encoder.note_columns([name for name in parquet_columns(path) if name not in COLUMNS])
    return Checked(
        identity=identity_of_rows(config, train), untrained=untrained, unread=str(encoder.unread)
    )
