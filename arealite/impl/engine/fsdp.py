"""The train engine over FSDP2: one Hugging Face model, sharded over the ranks.

Here are the collective verbs only; model, batches, optimizer and files are in the modules beside.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import arealite
from arealite.algo.packing import computed_tokens, microbatches
from arealite.api.engine import Head, LossFn, LossInput, Sequence, TrainEngine, Training
from arealite.api.engine_config import FSDPConfig
from arealite.base.errors import InvariantError, UserError
from arealite.base.log import get
from arealite.base.model_folder import exact_length
from arealite.impl.engine import attention, checkpoint, loading, lora, rng
from arealite.impl.engine.batch import collate, scatter
from arealite.impl.engine.fingerprint import fingerprint
from arealite.impl.engine.hf_folder import copy_small_files, write_weights
from arealite.impl.engine.model import (
    LogprobModel,
    ValueModel,
    fsdp_modules,
    recompute,
    reshard,
    shard,
)
from arealite.impl.engine.optimizer import Optimizer

log = get(__name__)
CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class FSDPEngine(TrainEngine):
    """See TrainEngine. torch.distributed is initialised: nccl trains on this rank's CUDA device."""

    def __init__(
        self,
        config: FSDPConfig,
        *,
        model_path: str,
        seed: int,
        training: Training | None = None,
        head: Head = "lm",
    ) -> None:
        if config.dtype not in DTYPES:
            raise UserError(f"Unknown dtype '{config.dtype}'. Known: {', '.join(DTYPES)}.")
        self.config = config
        cuda = "nccl" in dist.get_backend()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else CPU
        self.dtype = DTYPES[config.dtype]
        self._source = Path(model_path).expanduser()
        torch.manual_seed(seed + dist.get_rank())
        self.head: Head = head
        self.module = loading.empty_model(self._source, head)
        """The Hugging Face model whose parameters are trained in place."""
        self.module.requires_grad_(training is not None)
        has_adapter = training is not None and config.lora.rank > 0
        self._adapter = lora.inject(self.module, config.lora, head) if has_adapter else None
        plain = self._set_dtypes() and dist.get_world_size() == 1 and not config.cpu_offload
        self._model = (
            ValueModel(self.module)
            if head == "value"
            else LogprobModel(self.module, logits_chunk=config.logits_chunk)
        )
        self.layout = attention.choose(
            config.layout, self.module, device=self.device, dtype=self.dtype
        )
        if config.gradient_checkpointing:
            recompute(self.module)
        mesh = _mesh(self.device, config.shard_size)
        if not plain:
            shard(self._model, mesh, dtype=self.dtype, offload=config.cpu_offload)
        loading.load_weights(
            self.module, self._source, self.device, offload=config.cpu_offload, seed=seed
        )
        self._optimizer = Optimizer(self.module, training) if training else None

    def without_adapter(self) -> FSDPEngine:
        """Return a frozen engine on the same parameters that leaves the adapters out: the policy
        that training began with, as a reference that costs no memory."""
        return _Base(self)

    @property
    def optimizer(self) -> Optimizer:
        """What trains the model; InvariantError where nothing does."""
        if self._optimizer is None:
            raise InvariantError("an engine without `training` is frozen: forward only")
        return self._optimizer

    def forward(
        self, rows: list[Sequence], all_lengths: list[list[int]]
    ) -> dict[str, list[np.ndarray]]:
        """See TrainEngine.forward."""
        results: dict[str, list[np.ndarray]] = {}
        with torch.no_grad():
            for indices in self._plan(rows, all_lengths):
                part = [rows[i] for i in indices]
                outputs = self._model(collate(part, self.device, self.layout))
                for name, values_N in outputs.items():
                    result = results.setdefault(name, [np.empty(0)] * len(rows))
                    if not part:
                        continue
                    for i, row in zip(indices, scatter(values_N, part), strict=True):
                        result[i] = row
        # Without a backward pass nothing frees what was gathered, and a load would not reach it.
        reshard(self._model)
        return results

    def train_batch(
        self,
        rows: list[Sequence],
        all_lengths: list[list[int]],
        loss_fn: LossFn,
        *,
        together: int = 1,
        noting: Mapping[str, str] | None = None,
    ) -> dict[str, float]:
        """See TrainEngine.train_batch; adds microbatches, tokens, padded_tokens of all ranks."""
        plan = self._plan(rows, all_lengths, together)
        optimizer = self.optimizer
        roots = fsdp_modules(self._model)[:1]
        totals: dict[str, torch.Tensor | float] = {}
        for number, indices in enumerate(plan):
            last = number == len(plan) - 1
            for root in roots:
                root.set_requires_gradient_sync(last)
                root.set_is_last_backward(last)
            part = [rows[i] for i in indices]
            for name, value in self._backward(part, loss_fn, noting or {}).items():
                totals[name] = totals.get(name, 0.0) + value
        lengths = [len(row.tokens) for row in rows]
        stats = {name: float(value) for name, value in totals.items()} | {
            "microbatches": float(len(plan)),
            "tokens": float(sum(lengths)),
            "padded_tokens": float(computed_tokens(lengths, plan, self.layout)),
        }
        outcome = optimizer.step()
        if outcome["skipped_update"]:
            log.warning("update skipped", reason="gradient norm not finite")
        return _sum_over_ranks(stats) | outcome

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        """See TrainEngine.save; the folder appears by a rename once all ranks have written."""
        rank, temp = dist.get_rank(), checkpoint.temporary(path)
        if rank == 0:
            checkpoint.begin(path)
        dist.barrier()
        save_shards(self._state(), checkpoint_id=temp / "state")
        (temp / f"rng-{rank}.json").write_text(json.dumps(rng.state()))
        dist.barrier()
        if rank == 0:
            inside = {"updates": self.optimizer.updates, "extra": extra}
            (temp / "extra.json").write_text(json.dumps(inside))
            checkpoint.commit(path, self._facts() | {"step": extra.get("step", 0)})
            log.info("checkpoint written", path=str(path))
        dist.barrier()

    def load(self, path: Path) -> dict[str, Any]:
        """See TrainEngine.load; ranks that did not exist when it was written keep their seeded RNG.

        Raises:
            UserError: the checkpoint is missing or broken, and names the good ones; or it is of
                other parameters or another optimizer.
        """
        checkpoint.require(path)
        reshard(self._model)
        state, held = self._state(), FileSystemReader(path / "state").read_metadata()
        names = (f"{part}.{name}" for part, tensors in state.items() for name in tensors)
        if absent := next((n for n in names if n not in held.state_dict_metadata), None):
            raise UserError(
                f"Checkpoint '{path}' has no '{absent}': go on with the model, engine.fsdp.lora "
                "and optimizer.type it was written with, or begin anew with resume=never."
            )
        load_shards(state, checkpoint_id=path / "state")
        inside = json.loads((path / "extra.json").read_text())
        self.optimizer.updates = inside["updates"]
        states = path / f"rng-{dist.get_rank()}.json"
        if states.exists():
            rng.restore(json.loads(states.read_text()))
        dist.barrier()
        return inside["extra"]

    def export(self, path: Path) -> None:
        """See TrainEngine.export; in the compute dtype, merged, and `adapter/` as peft knows it."""
        weights = self.stream_weights()
        if dist.get_rank() == 0:
            temp = checkpoint.begin(path)
            copy_small_files(self._source, temp)
            config = json.loads((temp / "config.json").read_text())
            config.pop("torch_dtype", None)
            config["dtype"] = self.config.dtype
            if self.head == "value":
                config["architectures"] = [type(self.module).__name__]
                config |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
            (temp / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            write_weights(temp, weights)
            self._write_adapter(temp / "adapter")
            checkpoint.commit(path, self._facts())
            log.info("model exported", path=str(path))
        else:
            for _ in weights:
                pass
            self._write_adapter(None)
        dist.barrier()

    def stream_weights(self, *, on_device: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """See TrainEngine.stream_weights; compute dtype, tied weights once, adapters merged."""
        for name, full in lora.merged(self.module, self._full, self.dtype):
            if dist.get_rank() == 0:
                yield name, full if on_device else full.to("cpu", copy=True)

    def fingerprint(self) -> str:
        """See TrainEngine.fingerprint; over the float32 masters, as this world size cuts them."""
        return fingerprint(dict(lora.held_tensors(self.module)), self.device)

    def _set_dtypes(self) -> bool:
        """Keep parameters without training in the compute dtype; say whether all that computes in
        it has it now (adapters take and give any, and compute in their own)."""
        for name, param in self.module.named_parameters():
            if not param.requires_grad and name != loading.SCORE:
                param.data = param.data.to(self.dtype)
        return all(
            param.dtype == self.dtype or lora.ADAPTER in name
            for name, param in self.module.named_parameters()
        )

    def _full(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self.device)
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _write_adapter(self, folder: Path | None) -> None:
        if self._adapter is not None:
            lora.write(self.module, self._full, self._adapter, folder, base=self._source)

    def _plan(
        self, rows: list[Sequence], all_lengths: list[list[int]], together: int = 1
    ) -> list[list[int]]:
        limit = exact_length(self.module.config.get_text_config().to_dict())
        longest = max((length for each in all_lengths for length in each), default=0)
        if limit and longest > limit:
            raise UserError(
                f"A row has {longest} tokens. Positions of '{self._source}' beyond {limit} depend "
                f"on the rows beside it: use llm_server.context_length={limit}, or shorter rows."
            )
        return microbatches(
            [len(row.tokens) for row in rows],
            self.config.max_tokens_per_microbatch,
            layout=self.layout,
            together=together,
            all_lengths=all_lengths,
        )

    def _backward(
        self, rows: list[Sequence], loss_fn: LossFn, noting: Mapping[str, str]
    ) -> dict[str, torch.Tensor]:
        batch = collate(rows, self.device, self.layout)
        outputs = self._model(batch)
        if not rows:
            torch.cat(list(outputs.values())).sum().backward()
            return {}
        noted = {field: outputs[name].detach() for name, field in noting.items()}
        loss, stats = loss_fn(LossInput(outputs, batch.rows_N, batch.fields | noted))
        loss.backward()
        for field, values_N in noted.items():
            for row, values_T in zip(rows, scatter(values_N, rows), strict=True):
                row.fields[field] = values_T
        return stats

    def _state(self) -> dict[str, Any]:
        model = {
            name: tensor.detach()
            for name, tensor in lora.held_tensors(self.module)
            if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter)
        }
        return {"model": model, "optimizer": self.optimizer.state()}

    def _facts(self) -> dict[str, Any]:
        return {
            "world_size": dist.get_world_size(),
            "arealite": arealite.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }


class _Base(FSDPEngine):
    def __init__(self, trained: FSDPEngine) -> None:
        vars(self).update(vars(trained), _optimizer=None)

    def forward(
        self, rows: list[Sequence], all_lengths: list[list[int]]
    ) -> dict[str, list[np.ndarray]]:
        with lora.switched_off(self.module):
            return super().forward(rows, all_lengths)


def _mesh(device: torch.device, shard_size: int) -> DeviceMesh:
    """Return the mesh of all ranks, or of copies × the shards of one."""
    size = dist.get_world_size()
    shard_size = shard_size or size
    if size % shard_size:
        raise UserError(
            f"engine.fsdp.shard_size {shard_size} does not divide the {size} trainer ranks. "
            f"Use a divisor of {size}, or 0 to share one copy among all."
        )
    if shard_size == size:
        return init_device_mesh(device.type, (size,))
    names = ("copies", "shards")
    return init_device_mesh(device.type, (size // shard_size, shard_size), mesh_dim_names=names)


def _sum_over_ranks(stats: dict[str, float]) -> dict[str, float]:
    """Add the stats of all ranks; a rank without rows has fewer names."""
    if dist.get_world_size() == 1:
        return stats
    gathered: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, stats)
    names = dict.fromkeys(name for part in gathered for name in part)
    return {name: sum(part.get(name, 0.0) for part in gathered) for name in names}
