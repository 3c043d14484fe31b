"""Stops vLLM in an update, so that a test can kill it there, or between two steps of generations.

Each Python with this folder in PYTHONPATH imports it at its start. A test puts a file into the
folder HOLD_FOLDER, and later removes it. Meanwhile:

    receive     the next update waits before the last tensors arrive from the process group
    load        the next update waits with a half-loaded model
    generate    generations wait; each command (a request, a pause, …) runs STEPS steps
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

HOLD_FOLDER = "AREALITE_TEST_HOLD_FOLDER"
POLL_S = 0.01
STEPS = 4
"""A new request has its first token in fewer steps, also when vLLM plans steps ahead."""


def is_asked(step: str) -> bool:
    """Whether a test asks for a wait."""
    return (Path(os.environ[HOLD_FOLDER]) / step).exists()


def wait_if_asked(step: str) -> None:
    """Wait while the file of a step exists, and say so by the file `held`."""
    if is_asked(step):
        (Path(os.environ[HOLD_FOLDER]) / "held").touch()
    while is_asked(step):
        time.sleep(POLL_S)


def hold_updates(module: Any) -> None:
    """Wait in each update of `module` for which a test asks."""
    load = module.ModelWeights._load
    receive = module.receive_tensors

    def held_load(self: Any, update: Any, tensors: Iterator[Any]) -> None:
        load(self, update, half_then_wait([*tensors]) if is_asked("load") else tensors)

    def held_receive(info: Any, group: Any, device: Any) -> list[Any]:
        if not is_asked("receive"):
            return receive(info, group, device)
        half = len(info.names) // 2
        first = receive(part_of(info, 0, half), group, device)
        wait_if_asked("receive")
        return first + receive(part_of(info, half, len(info.names)), group, device)

    module.ModelWeights._load = held_load
    module.receive_tensors = held_receive


def hold_generations(module: Any) -> None:
    """Let the engine wait before a step if a test asks for it, and no command has arrived."""
    engine_type = module.EngineCoreProc
    handle = engine_type._handle_client_request
    step = engine_type._process_engine_step
    num_free_steps = 0

    def noting_handle(self: Any, *request: Any) -> None:
        nonlocal num_free_steps
        num_free_steps = STEPS
        handle(self, *request)

    def held_step(self: Any) -> Any:
        nonlocal num_free_steps
        while is_asked("generate") and num_free_steps == 0 and self.input_queue.empty():
            time.sleep(POLL_S)
        num_free_steps = max(0, num_free_steps - 1)
        return step(self)

    engine_type._handle_client_request = noting_handle
    engine_type._process_engine_step = held_step


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


CHANGES: dict[str, Callable[[Any], None]] = {
    "arealite_vllm_weights": hold_updates,
    "vllm.v1.engine.core": hold_generations,
}
"""What is done with a module after its import."""


class HoldingLoader(Loader):
    """Loads a module, and changes it."""

    def __init__(self, loader: Loader, change: Callable[[Any], None]) -> None:
        self._loader = loader
        self._change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)


class HoldingFinder(MetaPathFinder):
    """Finds the modules of CHANGES as Python does."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        change = CHANGES.pop(fullname, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = HoldingLoader(spec.loader, change)
        return spec


if HOLD_FOLDER in os.environ:
    sys.meta_path.insert(0, HoldingFinder())
