"""Reads and checks the rows of offline trainers: sft, dpo and reward models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from arealite.api.agent import load_tokenizer
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import PlacedRow
from arealite.api.offline import CheckedRows
from arealite.api.payloads import Payload
from arealite.base.errors import UserError
from arealite.base.model_folder import vocab_size
from arealite.base.trial_files import RunPaths
from arealite.ext.datasets.file_rows import parquet_columns
from arealite.ext.datasets.hub_rows import is_saved
from arealite.ext.offline.chat_rows import chat_row
from arealite.ext.offline.examples import Example, RowEncoder
from arealite.system.data.dataset import EMPTY, identity, read_rows
from arealite.system.data.forms import renamed
from arealite.system.ledger.ledger import decode_header, open_read_only, read_any_format
from arealite.system.ledger.payload_checks import decode_checked

COLUMNS = (
    "messages",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "tokens",
    "loss_mask",
    "reward",
    "next_state",
    "tools",
    "system",
)


def read_dataset(config: ExperimentConfig) -> tuple[list[PlacedRow], list[PlacedRow]]:
    """Read the rows of an offline trainer.

    Returns:
        Training rows and held-out rows; the latter are [] without `dataset.eval`.
    """
    dataset = config.dataset
    min_reward = config.trainer.sft.min_reward if config.trainer.type == "sft" else None
    read = partial(load_rows, min_reward=min_reward, columns=dataset.columns)
    train = read(dataset.train, "train")
    held_out = read(dataset.eval, "eval") if dataset.eval else []
    return train, held_out


def load_rows(
    path: str,
    split: str,
    *,
    min_reward: float | None = None,
    columns: Mapping[str, str] = EMPTY,
) -> list[PlacedRow]:
    """Read rows from a dataset, or from the ledger of a run.

    Args:
        path: A dataset as for `read_rows`, a ledger.sqlite, or a run folder.
        split: train or eval, for errors.
        min_reward: Leave out rows with a smaller reward; rows without a reward are kept.
        columns: The option `dataset.columns`.

    Raises:
        UserError: there are no rows, or none has at least `min_reward`.
    """
    source = Path(path).expanduser()
    is_run = bool(path) and source.is_dir() and not is_saved(source)
    ledger = RunPaths(source).ledger if is_run else source
    if ledger.suffix == ".sqlite":
        rows = _collected(ledger)
    else:
        rows: list[PlacedRow] = []
        for place, row in read_rows(path, split, () if columns else COLUMNS):
            columns_of_row = renamed(row, chat_row(row), columns, place, COLUMNS)
            rows.append((place, columns_of_row))
    if not rows:
        raise UserError(f"dataset.{split}={path} has no rows.")
    if min_reward is None:
        return rows
    rewarded = [row for row in rows if _reward(row, default=min_reward) >= min_reward]
    if not rewarded:
        raise UserError(
            f"dataset.{split}={path}: none of its {len(rows)} rows has a reward of at least "
            f"trainer.sft.min_reward={min_reward}. Lower it."
        )
    return rewarded


def _reward(row: PlacedRow, *, default: float) -> float:
    """Return the reward of a row; `default` without one."""
    place, columns = row
    reward = columns.get("reward")
    if not isinstance(reward, int | float | None):
        raise UserError(f"{place}: `reward` must be a number, or null where it is not known.")
    return default if reward is None else reward


def _collected(ledger: Path) -> list[PlacedRow]:
    """Return one row for each segment of the trajectories in a ledger."""
    with open_read_only(ledger) as db:
        read_any_format(db)
        query = (
            "SELECT trajectory_id, reward, header, prompt_tokens, turns FROM trajectories "
            "JOIN payloads USING (trajectory_id) WHERE turns NOTNULL ORDER BY n"
        )
        rows: list[PlacedRow] = []
        for trajectory_id, reward, header, prompt, turns in db.execute(query):
            payload = Payload(prompt=prompt, turns=turns)
            tree, mismatch = decode_checked(decode_header(header), payload)
            if mismatch:
                raise UserError(
                    f"{ledger}, {trajectory_id}: its payload differs from its header ({mismatch}). "
                    "Run `arealite audit`, and restore the ledger."
                )
            for segment in tree.segments():
                columns: dict[str, object] = {
                    "tokens": segment.tokens,
                    "loss_mask": segment.loss_mask,
                    "reward": reward,
                }
                rows.append((f"{ledger}, {trajectory_id}", columns))
        return rows


def identity_of_rows(config: ExperimentConfig, rows: list[PlacedRow]) -> dict[str, str]:
    """Return the names and values that must not change within a trial of an offline trainer."""
    return identity(config, [columns for _, columns in rows])


def check_examples(config: ExperimentConfig, model: dict[str, object]) -> CheckedRows:
    """Check that the rows of an offline trainer can be used.

    Args:
        config: The experiment.
        model: The model's config.json.

    Raises:
        UserError: a row cannot be used, or no row of a split has a token to train.
    """
    train, held_out = read_dataset(config)
    encoder = RowEncoder(config, load_tokenizer(config.model.path))
    num_token_ids = vocab_size(model)
    untrained = list[str]()
    for row in (*train, *held_out):
        place, _ = row
        examples = encoder.encode(row)
        for example in examples:
            _check_token_ids(example, num_token_ids, place)
        if not all(example.kinds[1:].any() for example in examples):
            untrained.append(place)
    for split, rows in (("train", train), ("eval", held_out)):
        if rows and {place for place, _ in rows} <= {*untrained}:
            raise UserError(
                f"dataset.{split}: no row has a token to learn within "
                f"trainer.offline.max_tokens={config.trainer.offline.max_tokens}. Raise it."
            )
    for path in filter(None, [config.dataset.train, config.dataset.eval]):
        other_columns = [name for name in parquet_columns(path) if name not in COLUMNS]
        encoder.note_columns(other_columns)
    return CheckedRows(
        identity=identity_of_rows(config, train),
        untrained=untrained,
        unread=str(encoder.unread),
    )


def _check_token_ids(example: Example, num_token_ids: int | None, place: str) -> None:
    """Check that the model has all tokens of an example.

    Args:
        example: The tokens.
        num_token_ids: Size of the model's vocabulary; None or 0: unknown.
        place: The row's place, for errors.
    """
    largest = int(example.tokens.max(initial=0))
    smallest = int(example.tokens.min(initial=0))
    is_too_large = num_token_ids is not None and 0 < num_token_ids <= largest
    if smallest >= 0 and not is_too_large:
        return
    wrong_id = smallest if smallest < 0 else largest
    raise UserError(
        f"{place}: token {wrong_id} is not among the model's {num_token_ids}. "
        "Create the rows with the tokenizer of model.path."
    )
