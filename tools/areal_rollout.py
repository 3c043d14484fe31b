"""Run episodes with AReaL's own WorkflowExecutor; tools/bench_areal.py starts this process.

The process runs in AReaL's virtual environment and imports no module of ours. For each number on
stdin it runs so many episodes, and prints their wall time and CPU time in seconds.

    .venv-areal/bin/python tools/areal_rollout.py ADDRESS TOKENIZER CONCURRENCY TOKENS PROMPT
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

GROUP = 8
UNUSED = {"hydra", "ray", "megatron", "numba", "einops"}
"""Heavy packages that AReaL imports and its executor never calls: replaced by empty modules."""


class Empty(MetaPathFinder, Loader):
    """Imports a module of UNUSED as a mock."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a spec for the packages of UNUSED and their modules."""
        is_unused = fullname.partition(".")[0] in UNUSED
        return ModuleSpec(fullname, self, is_package=True) if is_unused else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a mock with a module's attributes."""
        return MagicMock(name=spec.name, __path__=[], __spec__=spec)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def make_workflow(tokenizer: Any, tokens: int) -> Any:
    """Return AReaL's RLVR workflow with a reward of 1 that needs no process pool."""
    from areal.api.cli_args import GenerationHyperparameters
    from areal.workflow.rlvr import RLVRWorkflow

    def encode(prompt: str, tokenizer: Any, _: bool) -> list[int]:
        if prompt not in known:  # the episodes of a group share a prompt; ours are cached, too
            known[prompt] = tokenizer(prompt)["input_ids"]
        return [*known[prompt]]

    async def reward(*_: object, **__: object) -> float:
        return 1.0

    known: dict[str, list[int]] = {}
    workflow = RLVRWorkflow(
        reward_fn=lambda *_, **__: 1.0,
        gconfig=GenerationHyperparameters(max_new_tokens=tokens, temperature=1.0),
        tokenizer=tokenizer,
        get_input_ids_fn=encode,
        data_extract_prompt_fn=lambda data: data["prompt"],
    )
    workflow.async_reward_fn = reward
    return workflow


def main(address: str, folder: str, concurrency: int, tokens: int, prompt: str) -> None:
    """Serve the numbers of stdin."""
    sys.meta_path.insert(0, Empty())
    from areal.api.cli_args import InferenceEngineConfig
    from areal.engine.sglang_remote import RemoteSGLangEngine
    from transformers import AutoTokenizer

    logging.disable(logging.INFO)
    config = InferenceEngineConfig(
        backend="sglang:d1",
        max_concurrent_rollouts=concurrency,
        consumer_batch_size=1 << 20,  # staleness never limits the episodes
        max_head_offpolicyness=1 << 10,
        queue_size=1 << 16,
    )
    engine = RemoteSGLangEngine(config)
    engine.initialize(addr=address.removeprefix("http://"))
    workflow = make_workflow(AutoTokenizer.from_pretrained(folder), tokens)
    print("ready", flush=True)
    for line in sys.stdin:
        count, begin, cpu = int(line), time.perf_counter(), time.process_time()
        for number in range(count):
            row = {"prompt": f"{prompt[:-4]}{number // GROUP % 10000:04d}"}
            engine.workflow_executor.submit(row, workflow)
        made = engine.workflow_executor.wait(count)
        seconds = time.perf_counter() - begin
        assert sum(each is not None and each["loss_mask"].sum() == tokens for each in made) == count
        print(seconds, time.process_time() - cpu, flush=True)
    engine.destroy()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
