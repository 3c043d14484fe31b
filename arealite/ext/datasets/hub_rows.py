"""Reads datasets of the library `datasets`: saved folders, and those of the Hugging Face hub."""

import importlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from arealite.api.hooks import PlacedRow
from arealite.base.errors import UserError, one_line
from arealite.base.extras import import_optional
from arealite.ext.datasets.file_rows import numbered
from arealite.ext.datasets.plain_values import arrow_rows, rows_of

HUB_ID = re.compile(r"[\w-]+/[\w-]+(?:\.\d[\w-]*)*(?::[\w.-]*){0,2}")
"""Matches owner/name, owner/name:config and owner/name:config:split."""
SPLITS = {"eval": ("eval", "validation", "test")}
"""Names of the held-out split, in order of preference. Other splits are read from "train"."""


def library_rows(path: str, split: str) -> Iterator[PlacedRow] | None:
    """Return the rows of a saved folder or of a dataset of the hub; None for another path.

    It is a hook `row_source`.

    Raises:
        UserError: The dataset cannot be read. The iterator raises it.
    """
    file = Path(path).expanduser()
    if os.path.isdir(file):
        return _folder_rows(file, split)
    if HUB_ID.fullmatch(path) and not os.path.exists(file):
        return _hub_rows(path, split)
    return None


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` of the `datasets` library has written a folder."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _folder_rows(folder: Path, split: str) -> Iterator[PlacedRow]:
    """Yield the rows of a folder that `save_to_disk` of the `datasets` library has written."""
    listing = folder / "dataset_dict.json"
    if listing.is_file():
        splits = json.loads(listing.read_text())["splits"]
        folder /= _pick_split(splits, split, str(folder), "/")
    state = folder / "state.json"
    if not state.is_file():
        raise UserError(
            f"dataset.{split}={folder} is a folder without a dataset of save_to_disk. "
            "Name a file, or a folder that save_to_disk has written."
        )
    ipc = importlib.import_module("pyarrow.ipc")
    try:
        entries = json.loads(state.read_text())["_data_files"]
        files = [folder / entry["filename"] for entry in entries]
        tables = [ipc.open_stream(file.read_bytes()).read_all() for file in files]
    except (OSError, ValueError, KeyError) as error:  # errors of Arrow are ValueErrors
        raise UserError(
            f"{folder} is not a readable dataset: {one_line(error):.300}. Save it again."
        ) from error
    rows = chain.from_iterable(arrow_rows(table, folder) for table in tables)
    yield from numbered(folder, rows)


def _hub_rows(name: str, split: str) -> Iterator[PlacedRow]:
    """Yield the rows of a dataset of the Hugging Face hub: owner/name:config:split."""
    dataset_id, config, hub_split, *_ = [*name.split(":"), "", ""]
    try:
        datasets = import_optional("datasets", "datasets")
        splits = datasets.load_dataset(dataset_id, config or None)
        if not hub_split:
            hub_split = _pick_split([*splits], split, f"{dataset_id}:{config}", ":")
        rows = rows_of(splits[hub_split], name)
    except Exception as error:  # the library and the network may raise anything
        raise UserError(
            f"dataset.{split}={name}: there is no file of this name, and as a hub id it failed: "
            f"{one_line(error):.300}. "
            "Correct it, or download the dataset and name a file or a folder."
        ) from error
    yield from numbered(name, rows)


def _pick_split(
    names: Sequence[str],
    split: str,
    dataset: str,
    separator: str,
) -> str:
    """Return the name of the split to read.

    Args:
        names: Splits of the dataset.
        split: train or eval.
        dataset: The dataset's name, for errors.
        separator: Text between the names of dataset and split, for errors.

    Raises:
        UserError: the dataset has no split of a usual name.
    """
    for name in SPLITS.get(split, ("train",)):
        if name in names:
            return name
    raise UserError(
        f"{dataset} has the splits {', '.join(names)}. "
        f"Set dataset.{split}={dataset}{separator}NAME."
    )
