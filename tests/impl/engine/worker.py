"""One rank of a small gloo group.

RANK and WORLD_SIZE come from the environment; ranks meet through a file in the folder.
"""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from arealite.api.engine_config import FSDPConfig
from arealite.base.model_folder import read_json
from arealite.impl.engine import hf_folder
from arealite.impl.engine.fsdp import FSDPEngine
from tests.impl.engine.helpers import (
    CONTEXTS,
    LOSS,
    VARIANTS,
    add_routing,
    add_top_ids,
    gradients,
    load,
    loss_of,
    make_engine,
    make_rows,
    random_record,
    save,
    weights,
)

UNEVEN = [list(range(9)), [9, 10, 11]]
ONE_EMPTY = [[], list(range(12))]
EXPERTS: dict[str, dict[str, Any]] = {
    "shards": {"max_tokens_per_microbatch": 64},
    "copies": {"shard_size": 1, "layout": "packed"},
    "recomputed": {"gradient_checkpointing": True, "layout": "packed"},
    "context": {"context_parallel": 2},
}
"""Options of engines of a mixture of experts that must agree with one rank."""


def ranks(folder: Path, model: str, shard_size: int = 0) -> None:
    """Compute gradients under two partitions; update, save, update; load and update again."""
    rank = dist.get_rank()
    rows = make_rows()
    out: dict[str, object] = {}
    engine = make_engine(model, max_tokens_per_microbatch=64, shard_size=shard_size)
    more = [[]] * (dist.get_world_size() - 2)
    for name, partition in {"uneven": UNEVEN + more, "one_empty": ONE_EMPTY + more}.items():
        parts = [[rows[i] for i in indices] for indices in partition]
        out[name] = gradients(engine, parts[rank])
        out[f"{name}_forward"] = engine.forward(parts[rank])
    parts = [[rows[i] for i in indices] for indices in UNEVEN + more]
    engine.forward_backward(parts[rank][::2], LOSS)
    out["two_calls"] = gradients(engine, parts[rank][1::2])
    engine.train_batch(parts[rank], LOSS)
    save(engine, folder / "step-1", {"step": 1})
    out["stats"] = engine.train_batch(parts[rank], LOSS)
    out["weights"] = weights(engine)
    out["fingerprint"] = engine.fingerprint()
    again = make_engine(model, max_tokens_per_microbatch=64, seed=9, shard_size=shard_size)
    out["extra"] = load(again, folder / "step-1")
    again.train_batch(parts[rank], LOSS)
    out["resumed"] = weights(again)
    out["resumed_fingerprint"] = again.fingerprint()
    engine.export(folder / "export")
    torch.save(out, folder / f"out-{rank}.pt")


def copies(folder: Path, model: str) -> None:
    """Run `ranks` with two copies of the model."""
    ranks(folder, model, shard_size=2)


def variants(folder: Path, model: str) -> None:
    """For each variant: gradients, two updates with a checkpoint between, one rank's checkpoint."""
    rank, rows = dist.get_rank(), make_rows()
    parts = [[rows[i] for i in indices] for indices in UNEVEN]
    frozen = FSDPEngine(FSDPConfig(), model_path=model, seed=0)
    out: dict[str, dict[str, object]] = {"base": frozen.forward(parts[rank])}
    for name, options in VARIANTS.items():
        engine, other = (make_engine(model, **options) for _ in range(2))
        reference = engine.without_adapter()
        found = out[name] = {"gradients": gradients(engine, parts[rank], updates=True)[0]}
        save(engine, folder / f"{name}-1", {"step": 1})
        found["stats"] = engine.train_batch(parts[rank], loss_of(engine))
        save(engine, folder / f"{name}-2", {"step": 1})
        found["forward"] = engine.forward(parts[rank])
        found["base"] = reference.forward(parts[rank])
        found["weights"] = weights(engine)
        load(other, folder / f"{name}-1")
        other.train_batch(parts[rank], loss_of(engine))
        found["resumed"] = engine.fingerprint() == other.fingerprint()
        load(other, folder / f"{name}-of-one")
        found["of one"] = weights(other)
    torch.save(out, folder / f"out-{rank}.pt")


def contexts(folder: Path, model: str) -> None:
    """For each case of CONTEXTS: outputs, gradients, and the weights after an update."""
    warnings.simplefilter("error", FutureWarning)  # of deprecated functions of torch
    rank, size = dist.get_rank(), dist.get_world_size()
    out: dict[str, dict[str, object]] = {}
    for name, (family, options) in CONTEXTS.items():
        for group in {2, size}:
            rows = make_rows()
            if "routed" in name:
                add_routing(rows)
            if "top" in name:
                add_top_ids(rows, size=7, truncated=0.4)
            parts = [rows[:9], rows[9:], [], []][:size]
            options = options | {"context_parallel": group, "max_tokens_per_microbatch": 32}
            engine = make_engine(Path(model) / family, **options)
            found = out[f"{name} of {group}"] = {"forward": engine.forward(parts[rank])}
            record = None if engine.head == "value" else {"logprobs": "prox_logprobs"}
            found["gradients"], found["stats"] = gradients(
                engine, parts[rank], loss_of(engine, rows), updates=True, record_outputs=record
            )
            found["recorded"] = [row.fields["prox_logprobs"] for row in parts[rank]]
            found["weights"] = weights(engine)
    torch.save(out, folder / f"out-{rank}.pt")


def experts(folder: Path, model: str) -> None:
    """For each variant of EXPERTS: gradients with replayed experts, and weights after an update."""
    rank, out = dist.get_rank(), dict[str, dict[str, object]]()
    has_balance = read_json(model).get("output_router_logits", False)
    for name, options in EXPERTS.items():
        if has_balance and "context_parallel" in options:
            continue
        rows = random_record(make_rows(), Path(model))
        parts = [[rows[i] for i in indices] for indices in UNEVEN]
        engine = make_engine(model, optimizer={"type": "sgd"}, **options)
        found, stats = gradients(engine, parts[rank], LOSS, updates=True)
        out[name] = {"gradients": found, "stats": stats, "weights": weights(engine)}
    torch.save(out, folder / f"out-{rank}.pt")


def buffers(folder: Path, model: str) -> None:
    """Compute logprobs of a model with persistent buffers; export, save and load its weights."""
    rank, rows = dist.get_rank(), make_rows()
    parts = [[rows[i] for i in indices] for indices in UNEVEN]
    out: dict[str, object] = {}
    for shards in (0, 1):
        engine = make_engine(model, shard_size=shards)
        path = folder / f"shards-{shards}"
        found = {"forward": engine.forward(parts[rank]), "weights": weights(engine)}
        engine.train_batch(parts[rank], LOSS)
        save(engine, path / "step-1", {"step": 1})
        engine.export(path / "export")
        again = make_engine(path / "export", shard_size=shards)
        found["again"] = again.fingerprint() == engine.fingerprint()
        found["trained"] = weights(engine)
        other = make_engine(model, shard_size=shards)
        load(other, path / "step-1")
        found["resumed"] = other.fingerprint() == engine.fingerprint()
        out[path.name] = found
    torch.save(out, folder / f"out-{rank}.pt")


def memory(folder: Path, model: str) -> None:
    """Measure the peak memory growth in bytes of load, save, export and stream."""
    hf_folder.FILE_BYTES = 8 << 20
    small = measure(folder / "small", str(folder / "tiny"))  # imports and buffers count as well
    found = measure(folder, model) | {"small": small["load"]}
    (folder / f"memory-{dist.get_rank()}.json").write_text(json.dumps(found))


def measure(folder: Path, model: str) -> dict[str, int]:
    """Run each operation once; return its memory growth."""
    found: dict[str, int] = {}

    @contextmanager
    def measured(name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = status("VmRSS")
        yield
        found[name] = status("VmHWM") - before

    with measured("load"):
        engine = make_engine(model, optimizer={"type": "sgd", "beta1": 0.0})
    with measured("save"):
        save(engine, folder / "step-1", {})
    with measured("resume"):
        load(engine, folder / "step-1")
    with measured("export"):
        engine.export(folder / "export")
    with measured("stream"):
        for _ in engine.stream_weights():
            pass
    return found


def status(key: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def kill_in_save(folder: Path, model: str) -> None:
    """Save twice; send SIGKILL to this process before the second rename."""
    rename = os.rename

    def die_at_the_second(source: Path, target: Path) -> None:
        if Path(source).name == ".step-2.tmp":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    engine = make_engine(model)
    save(engine, folder / "step-1", {"step": 1})
    os.rename = die_at_the_second
    save(engine, folder / "step-2", {"step": 2})


def main(scenario: str, folder: Path, model: str) -> None:
    """Run one scenario as one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    scenarios = {
        "ranks": ranks,
        "copies": copies,
        "variants": variants,
        "contexts": contexts,
        "experts": experts,
        "buffers": buffers,
        "memory": memory,
        "kill_in_save": kill_in_save,
    }
    scenarios[scenario](folder, model)
    dist.destroy_process_group()
