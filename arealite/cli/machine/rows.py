"""The rows of `arealite check --machine`: what each one runs, where, and why one cannot run."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from arealite.api.engine_config import FSDPConfig
from arealite.base.errors import UserError
from arealite.impl.server.sglang import probe

CHECKS = "arealite.cli.machine"
LAYOUTS = "padded", "packed"
WAYS = "disk", "distributed"
PAUSE_MODES = "abort", "retract", "in_place"
MAX_RANKS = 8


@dataclass(frozen=True)
class Row:
    """One check, which child processes run."""

    name: str
    function: str
    """`module:function`; it gets a Bench and `options`."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    ranks: int = 1
    device: str = "cpu"
    """cpu (gloo) or cuda (nccl)."""
    server: str = ""
    """The server that the processes of this row's session start; "": none."""
    missing: str = ""
    """Why this machine cannot run the row; "": it can."""
    needs: str = "reference"
    """The row whose files this one reads."""

    @property
    def session(self) -> tuple[int, str, str]:
        """Rows with equal values run in the same processes, one after the other."""
        return self.ranks, self.device, self.server


def plan(*, gpus: int, quick: bool, sglang_python: str | None) -> list[Row]:
    """Return the rows of a machine with `gpus` GPUs; rows of one session are consecutive."""
    cuda = "cuda" if gpus else "cpu"
    rows = [*_one_rank(cuda)]
    worlds = [2] if quick else [2, 4, 8]
    for ranks in (size for size in worlds if size <= max(4, gpus)):
        rows += _several_ranks(ranks, cuda if gpus >= ranks else "cpu")
    if not quick:
        own = {"options": {"source": 2}, "needs": "checkpoint/2 ranks"}
        rows.append(Row("resume/2 ranks to 1", f"{CHECKS}.training:resume", device=cuda, **own))
    if gpus < 2:
        what = "this machine has no GPU" if not gpus else "this machine has one GPU"
        rows.append(Row("nccl", "", missing=f"{what}; rows with several ranks use gloo on the CPU"))
    rows += _servers("embedded", cuda, gpus, {}, "")
    python, missing = sglang_python or sys.executable, ""
    try:
        probe(str(Path(python).expanduser()), cuda)
    except UserError as error:
        missing = f"{error} (--sglang-python PATH)"
    return [*rows, *_servers("sglang", cuda, gpus, {"python": python}, missing)]


def _one_rank(device: str) -> Iterator[Row]:
    training, measures = f"{CHECKS}.training", f"{CHECKS}.measures"
    dtypes = get_args(get_type_hints(FSDPConfig)["dtype"])
    yield Row("reference", f"{training}:reference", {}, 1, device)
    for layout in LAYOUTS:
        for dtype in dtypes:
            options = {"layout": layout, "dtype": dtype}
            yield Row(f"train/{layout}/{dtype}", f"{training}:update", options, 1, device)
    if "float16" not in dtypes:
        yield Row("train/float16", "", missing="engine.fsdp.dtype has no float16")
    for name, value in {"gradient_checkpointing": True, "cpu_offload": True, "lora": 4}.items():
        yield Row(f"train/{name}", f"{training}:update", {name: value}, 1, device)
    yield Row("replay", f"{training}:replay", {}, 1, device)
    yield Row("checkpoint", f"{training}:save_and_load", {}, 1, device)
    yield Row("copies", f"{measures}:copies", {}, 1, device)
    for dtype in ("float32", "bfloat16"):
        yield Row(f"step/{dtype}", f"{measures}:step", {"dtype": dtype}, 1, device)
    yield Row("publish/shared", f"{CHECKS}.serving:shared", {}, 1, device)


def _several_ranks(ranks: int, device: str) -> Iterator[Row]:
    training = f"{CHECKS}.training"
    ways: dict[str, dict[str, Any]] = {
        "fsdp2": {},
        "fsdp2, packed bfloat16": {"layout": "packed", "dtype": "bfloat16"},
        "ddp": {"shard_size": 1},
        "hsdp": {"shard_size": ranks // 2},
        "context_parallel": {"context_parallel": ranks},
    }
    known = {each.name for each in fields(FSDPConfig)}
    for way, options in ways.items():
        missing = ""
        if unknown := {*options} - known:
            missing = f"engine.fsdp has no {unknown.pop()}"
        elif way == "hsdp" and ranks < 4:
            missing = "HSDP needs 4 ranks"
        name = f"train/{way}/{ranks} ranks"
        yield Row(name, f"{training}:update", options, ranks, device, "", missing)
    yield Row(f"replay/{ranks} ranks", f"{training}:replay", {}, ranks, device)
    yield Row(f"checkpoint/{ranks} ranks", f"{training}:save_and_load", {}, ranks, device)
    own = {"options": {"source": 1}, "needs": "checkpoint"}
    yield Row(f"resume/1 rank to {ranks}", f"{training}:resume", ranks=ranks, device=device, **own)
    yield Row(f"all_reduce/{ranks} ranks", f"{CHECKS}.measures:all_reduce", {}, ranks, device)


def _servers(
    server: str, device: str, gpus: int, options: dict[str, Any], missing: str
) -> Iterator[Row]:
    # NCCL refuses two processes on one GPU.
    backend = "gloo" if gpus < 2 else "nccl"
    for way in WAYS:
        own = options | {"way": way, "backend": backend}
        function = f"{CHECKS}.serving:publish"
        yield Row(f"publish/{way}/{server}", function, own, 1, device, server, missing)
    for mode in PAUSE_MODES:
        own = options | {"mode": mode}
        function = f"{CHECKS}.serving:interrupt"
        yield Row(f"interrupt/{mode}/{server}", function, own, 1, device, server, missing)
