"""The train engine: one Hugging Face model, which FSDP2 shards over several ranks.

This module holds the collective operations and the checkpoints. The modules beside it hold the
model, the batches, the optimizer and the files of a Hugging Face folder.
"""

import copy
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.tensor import DTensor

from arealite.algo.packing import LAYOUTS, Plan
from arealite.api.engine import Head, LossFn, LossInput, Sequence, TrainEngine, Training
from arealite.api.engine_config import FSDPConfig
from arealite.base.errors import InvariantError, UserError
from arealite.base.log import get
from arealite.base.model_folder import exact_length
from arealite.impl.engine import attention, checkpoint, loading, lora
from arealite.impl.engine import model as models
from arealite.impl.engine.batch import MicroBatch, collate, input_items, scatter
from arealite.impl.engine.context_parallel import ContextGroup
from arealite.impl.engine.fingerprint import fingerprint
from arealite.impl.engine.hf_folder import copy_small_files, write_config, write_weights
from arealite.impl.engine.optimizer import Optimizer
from arealite.impl.engine.routing import Balance, Routing
from arealite.impl.weights.names import TensorNames

log = get(__name__)
CPU = torch.device("cpu")


class FSDPEngine(TrainEngine):
    """Implements TrainEngine; needs a process group. With nccl it uses this rank's CUDA device."""

    def __init__(
        self,
        config: FSDPConfig,
        *,
        model_path: str,
        seed: int,
        training: Training | None = None,
        head: Head = "lm",
        adapter: str | None = None,
    ) -> None:
        if config.dtype not in loading.DTYPES:
            known = ", ".join(loading.DTYPES)
            raise UserError(f"Unknown dtype '{config.dtype}'. Known: {known}.")
        self.config = config
        cuda = "nccl" in dist.get_backend()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else CPU
        self.dtype = loading.DTYPES[config.dtype]
        self.source = Path(model_path).expanduser()
        torch.manual_seed(seed + dist.get_rank())
        self.head: Head = head
        self.module = loading.empty_model(self.source, head)
        """The Hugging Face model whose parameters are trained in place."""
        self.names = TensorNames(self.module, self.source)
        self.unused_tensors = self.names.unused
        self.module.requires_grad_(training is not None)
        folder = Path(adapter).expanduser() if adapter else None
        has_adapter = training is not None and (config.lora.rank > 0 or folder is not None)
        self.adapter = lora.inject(self.module, config.lora, head, folder) if has_adapter else None
        if has_adapter and dist.get_rank() == 0:
            lora.report(self.module, [] if folder else config.lora.targets)
        is_uniform = loading.set_dtypes(self.module, self.dtype)
        offload = config.cpu_offload
        is_sharded = dist.get_world_size() > 1 or offload
        if head == "value":
            self._model = models.ValueModel(self.module)
        else:
            self._model = models.LogprobModel(self.module, logits_chunk=config.logits_chunk)
        self.layout = attention.choose(config.layout, self.module, self.device, self.dtype)
        self._context = ContextGroup(config.context_parallel, self.module, self.device)
        trains = training is not None and head == "lm"
        self.routing = Routing.of(self.module) if trains else None
        self._balance = Balance.of(self.module) if trains else None
        if config.gradient_checkpointing:
            models.recompute(self.module)
        mesh = models.make_mesh(self.device, config.shard_size)
        if is_sharded:
            models.shard(self._model, mesh, dtype=self.dtype, offload=offload)
        self.whole_module = self.module if is_uniform and not is_sharded else None
        loading.load_weights(self.module, self.names, self.device, offload=offload, seed=seed)
        if folder and has_adapter:
            lora.load_adapter(self.module, folder)
        scales = self.dtype == torch.float16
        self._optimizer = Optimizer(self.module, training, scales_loss=scales) if training else None
        self._adapters = dict[str, torch.Tensor]()
        """Values of the adapters in `forward`; {}: those of the parameters."""

    def without_adapter(self) -> "FSDPEngine":
        """Return a frozen engine on the same parameters, with the adapters as they are now."""
        engine = copy.copy(self)
        engine._optimizer = engine.routing = None
        engine._adapters = lora.values(self.module)
        return engine

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer.

        Raises:
            InvariantError: the engine is frozen.
        """
        if self._optimizer is None:
            raise InvariantError("an engine without `training` is frozen: forward only")
        return self._optimizer

    def forward(self, rows: list[Sequence]) -> dict[str, list[np.ndarray]]:
        """Return the head's outputs; see TrainEngine."""
        results: dict[str, list[np.ndarray]] = {}
        rows, own = self._context.gather_rows(rows)
        replaced = lora.replaced(self.module, self._adapters)
        with replaced, torch.no_grad(), models.low_precision(self._model, self.dtype):
            for indices in self._plan(rows):
                part = [rows[i] for i in indices]
                for name, values_N in self._compute(self._collate(part)).items():
                    result = results.setdefault(name, [np.empty(0)] * len(rows))
                    scattered = scatter(values_N, part) if part else []
                    for i, row in zip(indices, scattered, strict=True):
                        result[i] = row
        # Without a backward pass gathered parameters stay in memory; `load` would not update them.
        models.reshard(self._model)
        self._routing_stats()
        return {name: result[own] for name, result in results.items()}

    def train_batch(
        self,
        rows: list[Sequence],
        loss_fn: LossFn,
        *,
        rows_per_example: int = 1,
        record_outputs: Mapping[str, str] | None = None,
    ) -> dict[str, float]:
        """Apply one update; see TrainEngine. Adds microbatches, tokens and computed_tokens."""
        rows, _ = self._context.gather_rows(rows)
        optimizer = self.optimizer
        plan = self._plan(rows, rows_per_example)
        roots = models.fsdp_modules(self._model)[:1]
        own = sum(max(1, len(row.tokens) - 1) for row in rows) / self._context.size
        inputs = _sum_over_ranks({"inputs": own})["inputs"] if self._balance else 0.0
        totals = dict[str, torch.Tensor | float]()
        computed = 0
        with models.low_precision(self._model, self.dtype):
            for number, indices in enumerate(plan):
                last = number == len(plan) - 1
                for root in roots:
                    root.set_requires_all_reduce(last)
                    root.set_is_last_backward(last)
                part = [rows[i] for i in indices]
                batch = self._collate(part)
                if not part:  # other ranks have rows, and their collectives need this rank
                    torch.cat([*self._model(batch).values()]).sum().backward()
                    continue
                computed += batch.input_ids_BW.numel() * self._context.size
                scale = optimizer.scale.value
                loss = loss_fn
                if self._balance is not None:
                    loss = self._balance.added_to(loss_fn, batch.inputs, inputs)
                stats, recorded = backward(self._compute, batch, loss, record_outputs, scale=scale)
                for name, value in stats.items():
                    totals[name] = totals.get(name, 0.0) + value
                for field, values_N in recorded.items():
                    for row, values_T in zip(part, scatter(values_N, part), strict=True):
                        row.fields[field] = values_T
        counted = {name: float(value) for name, value in totals.items()} | {
            "microbatches": float(len(plan)),
            "tokens": float(sum(len(row.tokens) for row in rows)),
            "computed_tokens": float(computed),
        }
        # All ranks of a context group have the same numbers: one of them counts.
        counted = ({} if self._context.rank else counted) | self._routing_stats()
        outcome = optimizer.step()
        if outcome["skipped_update"]:
            scale = optimizer.scale.value if optimizer.scale.enabled else None
            log.warning("update skipped", reason="gradient norm not finite", loss_scale=scale)
        return _sum_over_ranks(counted) | outcome

    def save(self, folder: Path, extra: dict[str, object]) -> None:
        """Write this rank's shards; see TrainEngine."""
        save_state(self._live_state(), checkpoint_id=folder / "state")
        if dist.get_rank() == 0:
            scale = [self.optimizer.scale.value, self.optimizer.scale.clean]
            inside = {"updates": self.optimizer.updates, "loss_scale": scale, "extra": extra}
            (folder / "extra.json").write_text(json.dumps(inside))

    def load(self, folder: Path) -> dict[str, object]:
        """Read this rank's shards; see TrainEngine."""
        models.reshard(self._model)
        state = self._live_state()
        stored = FileSystemReader(folder / "state").read_metadata().state_dict_metadata
        names = (f"{part}.{name}" for part, tensors in state.items() for name in tensors)
        if absent := next((name for name in names if name not in stored), None):
            what = "use the model, engine.fsdp.lora and optimizer.type that it was written with"
            fix = f"{what}, or start a new run with resume=never."
            raise UserError(f"Checkpoint '{folder}' has no '{absent}': {fix}")
        load_state(state, checkpoint_id=folder / "state")
        inside = json.loads((folder / "extra.json").read_text())
        self.optimizer.updates = inside["updates"]
        if (scale := self.optimizer.scale).enabled:
            scale.value, scale.clean = inside.get("loss_scale", [scale.value, 0])
        return inside["extra"]

    def export(self, path: Path) -> None:
        """Write the model in the compute dtype, adapters merged, and `adapter/` for peft."""
        temp = checkpoint.begin(path) if dist.get_rank() == 0 else None
        weights = self.stream_weights()
        if temp:
            copy_small_files(self.source, temp)
            write_config(temp, self.module, dtype=self.config.dtype, head=self.head)
            # The folder's other tensors, for example those for images, stay as they are.
            others = self.names.unused if self.head == "lm" else ()
            kept = ((name, self.names.read(name)) for name in others)
            write_weights(temp, chain(weights, kept))
        else:
            deque(weights, maxlen=0)
        if self.adapter is not None:
            folder = temp / "adapter" if temp else None
            lora.write(self.module, self.full, self.adapter, folder, base=self.source)
        if temp:
            checkpoint.commit(path, {"world_size": dist.get_world_size(), **checkpoint.versions()})
            log.info("model exported", path=str(path))
        dist.barrier()

    def stream_weights(self, *, on_device: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights in the compute dtype, tied ones once, adapters merged; see TrainEngine."""
        weights = lora.merged(self.module, self.full, self.dtype)
        if dist.get_rank() != 0:
            deque(weights, maxlen=0)
            return
        for name, full in self.names.to_folder(weights):
            yield name, full if on_device else full.to("cpu", copy=True)

    def fingerprint(self) -> str:
        """Return the fingerprint of the float32 masters, as this world size shards them."""
        return fingerprint(dict(lora.state_tensors(self.module)), self.device)

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a whole parameter on the engine's device, gathered from all ranks."""
        tensor = tensor.to(self.device)
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _collate(self, rows: list[Sequence]) -> MicroBatch:
        """Return the micro-batch of `rows`; set the experts of its forward and backward pass."""
        batch = self._context.split(collate(rows, self.device, self.layout))
        if self.routing is not None:
            self.routing.replay(batch.routing_BWR, replaces=self.replays_routing)
        return batch

    def _routing_stats(self) -> dict[str, float]:
        """End the replay of a batch; return the counts of recorded choices on this rank."""
        return {} if self.routing is None else self.routing.stats()

    def _live_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors that training changes, to save them or to load into them."""
        model = {
            name: tensor.detach()
            for name, tensor in lora.state_tensors(self.module)
            if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
        }
        return {"model": model, "optimizer": self.optimizer.state()}

    def _plan(self, rows: list[Sequence], rows_per_example: int = 1) -> Plan:
        """Return the row indices of each micro-batch; the rows of an example stay together.

        The plans of all ranks have equally many micro-batches, so that collectives stay aligned. A
        shorter plan ends with empty micro-batches.
        """
        budget = self.config.max_tokens_per_microbatch * self._context.size
        plan = LAYOUTS[self.layout](input_items(rows), budget, rows_per_example=rows_per_example)
        longest = max((len(row.tokens) for row in rows), default=0)
        most = torch.tensor([max(1, len(plan)), longest], device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        needed, longest = most.tolist()
        limit = exact_length(self.module.config.get_text_config().to_dict())
        if limit and longest > limit:
            what = f"Positions of '{self.source}' beyond {limit} depend on the rows beside it"
            fix = f"use llm_server.context_length={limit}, or shorter rows."
            raise UserError(f"A row has {longest} tokens. {what}: {fix}")
        return plan + [[]] * (needed - len(plan))

    def _compute(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Return the outputs of all loss tokens of a micro-batch, on every rank of its group."""
        return self._context.gather(self._model(batch), batch)


def backward(
    model: Callable[[MicroBatch], dict[str, torch.Tensor]],
    batch: MicroBatch,
    loss_fn: LossFn,
    record: Mapping[str, str] | None = None,
    *,
    scale: float = 1.0,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Run one micro-batch forward and backward; gradients are added to those of the parameters.

    Args:
        record: {output: field}: outputs of the model that the loss function also gets as
            fields, without gradient.
        scale: The loss is multiplied by it before the backward pass.

    Returns:
        (stats of the loss, the recorded outputs by field, float32 [N] each).
    """
    outputs = model(batch)
    recorded = {field: outputs[name].detach() for name, field in (record or {}).items()}
    loss, stats = loss_fn(LossInput(outputs, batch.rows_N, batch.fields | recorded))
    (loss * scale).backward()
    return stats, recorded


def _sum_over_ranks(stats: dict[str, float]) -> dict[str, float]:
    """Add the stats of all ranks; a rank without rows has fewer names."""
    if dist.get_world_size() == 1:
        return stats
    gathered: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, stats)
    names = dict.fromkeys(name for part in gathered for name in part)
    return {name: sum(part.get(name, 0.0) for part in gathered) for name in names}
