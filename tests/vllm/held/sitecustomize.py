"""Stops vLLM in the middle of a weight update, so that a test can kill one of its processes there.

Each Python with this folder in PYTHONPATH imports it at its start. A test puts a file into the
folder HOLD_FOLDER; the worker then waits in the next update, until the test removes the file:
`receive` before the last tensors arrive from the process group, `load` with a half-loaded model.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

HOLD_FOLDER = "AREALITE_TEST_HOLD_FOLDER"
MODULE = "arealite_vllm_weights"
POLL_S = 0.01


def wait_if_asked(step: str) -> None:
    """Wait while the file of a step exists, and say so by the file `held`."""
    folder = Path(os.environ[HOLD_FOLDER])
    if (folder / step).exists():
        (folder / "held").touch()
    while (folder / step).exists():
        time.sleep(POLL_S)


def hold_updates(module: Any) -> None:
    """Wait in each update of `module` if a test asks for it."""
    load = module.ModelWeights._load
    receive = module.receive_tensors

    def held_load(self: Any, update: Any, tensors: Iterator[Any]) -> None:
        load(self, update, half_then_wait([*tensors]))

    def held_receive(info: Any, group: Any, device: Any) -> list[Any]:
        half = len(info.names) // 2
        first = receive(part_of(info, 0, half), group, device)
        wait_if_asked("receive")
        return first + receive(part_of(info, half, len(info.names)), group, device)

    module.ModelWeights._load = held_load
    module.receive_tensors = held_receive


def half_then_wait(tensors: Sequence[Any]) -> Iterator[Any]:
    """Yield the tensors, and wait in the middle."""
    half = len(tensors) // 2
    yield from tensors[:half]
    wait_if_asked("load")
    yield from tensors[half:]


def part_of(info: Any, begin: int, end: int) -> Any:
    """Return the description of some of the tensors of one request."""
    return type(info)(
        names=info.names[begin:end],
        dtypes=info.dtypes[begin:end],
        shapes=info.shapes[begin:end],
        load_format=info.load_format,
    )


class HoldingLoader(Loader):
    """Loads the module, and changes its updates."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        hold_updates(module)


class HoldingFinder(MetaPathFinder):
    """Finds the module as Python does."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = HoldingLoader(spec.loader)
        return spec


if HOLD_FOLDER in os.environ:
    sys.meta_path.insert(0, HoldingFinder())
