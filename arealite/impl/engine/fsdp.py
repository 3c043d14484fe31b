"""The train engine: one Hugging Face model, which FSDP2 shards over several ranks.

This module holds the collective operations and the checkpoints. The modules beside it hold the
model, the batches, the optimizer and the files of a Hugging Face folder.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from arealite.algo.partition import padded
from arealite.api.engine import (
    Head,
    LossFn,
    LossInput,
    Named,
    NewAdapter,
    Sequence,
    Stats,
    TrainedWeights,
    TrainEngine,
    Training,
)
from arealite.api.engine_config import FSDPConfig
from arealite.api.engine_extension import EngineSetup, MicroBatch, Plan
from arealite.api.hooks import Fingerprint
from arealite.base import entries
from arealite.base.errors import InvariantError, UserError
from arealite.base.log import get
from arealite.base.model_folder import exact_length
from arealite.impl.engine import checkpoint, loading
from arealite.impl.engine import model as models
from arealite.impl.engine.extensions import Extensions, exported_weights, state_tensors
from arealite.impl.engine.hf_folder import copy_small_files, write_config, write_weights
from arealite.impl.engine.micro_batches import collate, scatter
from arealite.impl.engine.optimizer import Optimizer
from arealite.impl.engine.training_state import OptimizedWeights
from arealite.impl.weights.tensor_names import SCORE, TensorNames, Tensors

log = get(__name__)
CPU = torch.device("cpu")


class FSDPEngine(OptimizedWeights, TrainEngine):
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
        self.dtype = loading.compute_dtype(config.dtype)
        self._scales_loss = self.dtype == torch.float16
        self.config = config
        self.device = _local_device()
        self.source = Path(model_path).expanduser()
        self.head: Head = head
        torch.manual_seed(seed + dist.get_rank())
        self.module = loading.empty_model(self.source, head)
        """The Hugging Face model whose parameters are trained in place."""
        self.names = TensorNames(self.module, self.source)
        self.unused_tensors = self.names.unused
        self.module.requires_grad_(training is not None)
        setup = EngineSetup(
            config=config,
            module=self.module,
            source=self.source,
            head=head,
            device=self.device,
            is_trained=training is not None,
            adapter=Path(adapter).expanduser() if adapter else None,
        )
        self._extensions = Extensions.of(setup)
        self.adapter_config = self._extensions.adapter_config
        own_parameters = self._extensions.own_parameters
        self._float32_names = own_parameters | {SCORE}
        is_uniform = loading.set_dtypes(self.module, self.dtype, own_parameters)
        self._build_root()
        is_sharded = self._shard()
        self.whole_module = self.module if is_uniform and not is_sharded else None
        offload = config.cpu_offload
        loading.load_weights(
            self.module,
            self.names,
            self.device,
            self._extensions,
            offload=offload,
            seed=seed,
        )
        self._extensions.finish_loading()
        self._optimizer = None
        self._adapters = dict[str, TrainedWeights]()
        """The adapters of `add_adapter`; a frozen engine of the same parameters knows them, too."""
        named = self.module.named_parameters()
        trained = {name: param for name, param in named if param.requires_grad}
        if training is not None and trained:
            self._optimizer = Optimizer(trained, training, scales_loss=self._scales_loss)

    def _build_root(self) -> None:
        """Put the head around the model, and change its layers as the config requires."""
        config = self.config
        if self.head == "value":
            self._model = models.ValueModel(self.module)
        else:
            self._model = models.LogprobModel(self.module, logits_chunk=config.logits_chunk)
        self._extensions.change_layers()
        self.layout = self._extensions.layout
        if config.gradient_checkpointing:
            models.recompute(self.module)

    def _shard(self) -> bool:
        """Shard the model over several ranks, or to offload it; return whether it is sharded."""
        offload = self.config.cpu_offload
        mesh = models.make_mesh(self.device, self.config.shard_size)
        is_sharded = dist.get_world_size() > 1 or offload
        if is_sharded:
            models.shard(
                self._model,
                mesh,
                dtype=self.dtype,
                offload=offload,
            )
        return is_sharded

    def without_adapter(self) -> "FSDPEngine":
        """Return a frozen engine on the same parameters; see TrainEngine."""
        engine = copy.copy(self)
        engine._optimizer = None
        engine._extensions = self._extensions.frozen()
        return engine

    def add_adapter(self, adapter: NewAdapter) -> TrainedWeights:
        """Add an adapter; see TrainEngine."""
        if adapter.name in self._adapters:
            raise UserError(f"add_adapter: the name '{adapter.name}' is taken. Use another.")
        weights = self._extensions.add_adapter(adapter)
        if weights is None:
            return super().add_adapter(adapter)
        self._adapters[adapter.name] = weights
        self._float32_names = self._extensions.own_parameters | {SCORE}
        return weights

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter; see TrainEngine."""
        del self._adapters[name]
        self._extensions.remove_adapter(name)
        self._float32_names = self._extensions.own_parameters | {SCORE}

    def _adapters_of(self, rows: list[Sequence]) -> list[str]:
        """Return the adapters of the rows of all ranks, sorted; [""] without rows.

        Raises:
            UserError: Rows name an adapter that was not added.
        """
        names = {row.adapter for row in rows}
        for name in names - {"", *self._adapters}:
            raise UserError(
                f"A row names the adapter '{name}', which the engine does not have. "
                f"Add it, or use one of: {', '.join(self._adapters) or '(none)'}."
            )
        if self._adapters and dist.get_world_size() > 1:
            names_of_ranks = [names] * dist.get_world_size()
            dist.all_gather_object(names_of_ranks, names)
            names = set[str]().union(*names_of_ranks)
        return sorted(names) or [""]

    def _weights(self, name: str) -> TrainedWeights:
        """Return the weights that rows with the adapter `name` train."""
        return self._adapters[name] if name else self

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
        adapter, *_ = self._adapters_of(rows)
        outputs_by_row: dict[str, list[np.ndarray]] = {}
        group_rows, first_row = self._extensions.gather_rows(rows)
        local_rows = slice(first_row, first_row + len(rows))
        with self._extensions.forward_passes(), torch.no_grad(), self._low_precision():
            for indices in self._plan(group_rows):
                part = [group_rows[index] for index in indices]
                outputs = self._compute(self._collate(part, adapter))
                for name, values_N in outputs.items():
                    no_values = [np.empty(0)] * len(group_rows)
                    row_values = outputs_by_row.setdefault(name, no_values)
                    part_values = scatter(values_N, part) if part else []
                    for index, values_T in zip(indices, part_values, strict=True):
                        row_values[index] = values_T
        # Without a backward pass gathered parameters stay in memory; `load` would not update them.
        models.reshard(self._model)
        self._extensions.take_stats()
        return {name: row_values[local_rows] for name, row_values in outputs_by_row.items()}

    def forward_backward(
        self,
        rows: list[Sequence],
        loss_fn: LossFn,
        *,
        rows_per_example: int = 1,
        record_outputs: Mapping[str, str] | None = None,
    ) -> Stats:
        """Add a gradient; see TrainEngine. Adds microbatches, tokens and computed_tokens."""
        adapters = self._adapters_of(rows)
        try:
            group_rows, _ = self._extensions.gather_rows(rows)
            plan = self._plan(group_rows, rows_per_example)
            stats = self._add_gradient(group_rows, plan, adapters[0], loss_fn, record_outputs)
        except BaseException:
            for name in adapters:
                self._weights(name).drop_gradient()
            models.reset(self._model)
            self._extensions.take_stats()
            raise
        if not self._extensions.is_counted:
            # All ranks that share rows have the same numbers: one of them counts.
            stats = {}
        return _sum_over_ranks(stats | self._extensions.take_stats())

    def _add_gradient(
        self,
        rows: list[Sequence],
        plan: Plan,
        adapter: str,
        loss_fn: LossFn,
        record_outputs: Mapping[str, str] | None,
    ) -> Stats:
        """Run the micro-batches of `plan`, empty ones with an adapter that rows of other ranks
        name; return the stats of this rank."""
        loss_fn = self._extensions.added_loss(loss_fn, rows)
        roots = models.fsdp_modules(self._model)[:1]
        totals = dict[str, torch.Tensor | float]()
        computed_tokens = 0
        with self._low_precision():
            for number, indices in enumerate(plan):
                models.set_last_backward(roots, is_last=number == len(plan) - 1)
                part = [rows[index] for index in indices]
                batch = self._collate(part, adapter)
                if not part:
                    self._backward_without_rows(batch)
                    continue
                computed_tokens += batch.input_ids_BW.numel() * self._extensions.num_sharing
                stats, recorded = backward(
                    self._compute,
                    batch,
                    loss_fn,
                    record_outputs,
                    scale=self._weights(part[0].adapter).loss_scale,
                )
                _add_to(totals, stats)
                _record(part, recorded)
        sums = {name: float(total) for name, total in totals.items()}
        return sums | {
            "microbatches": float(len(plan)),
            "tokens": float(sum(map(_length, rows))),
            "computed_tokens": float(computed_tokens),
        }

    def _backward_without_rows(self, batch: MicroBatch) -> None:
        """Compute gradients of 0: other ranks have rows, and their collectives need this rank."""
        outputs = self._model(batch)
        zeros = torch.cat([*outputs.values()])
        zeros.sum().backward()

    def load(self, folder: Path) -> dict[str, object]:
        """Read this rank's shards; see TrainEngine."""
        models.reshard(self._model)
        return super().load(folder)

    def export(self, path: Path) -> None:
        """Write the model in the compute dtype, with the files of the extensions."""
        temp = checkpoint.begin(path) if dist.get_rank() == 0 else None
        weights = self.stream_weights()
        if temp:
            copy_small_files(self.source, temp)
            write_config(
                temp,
                self.module,
                dtype=self.config.dtype,
                head=self.head,
            )
            # The folder's other tensors, for example those for images, stay as they are.
            unused_names = self.names.unused if self.head == "lm" else ()
            unused_weights = ((name, self.names.read(name)) for name in unused_names)
            write_weights(temp, chain(weights, unused_weights))
        else:
            deque(weights, maxlen=0)
        self._extensions.export(temp, self.full)
        if temp:
            facts = {"world_size": dist.get_world_size(), **checkpoint.versions()}
            checkpoint.commit(path, facts)
            log.info("model exported", path=str(path))
        dist.barrier()

    def stream_weights(self, *, on_device: bool = False) -> Iterator[Named]:
        """Yield weights in the compute dtype, tied ones once; see TrainEngine."""
        weights = exported_weights(
            self.module,
            self._extensions,
            self.full,
            self.dtype,
        )
        if dist.get_rank() != 0:
            deque(weights, maxlen=0)
            return
        for name, full in self.names.to_folder(weights):
            yield name, full if on_device else full.cpu().contiguous()

    def stream_adapter(self) -> Iterator[Named]:
        """Yield the adapter's matrices; see TrainEngine."""
        for name, full in self._extensions.stream_adapter(self.full):
            if dist.get_rank() == 0:
                yield name, full.cpu()

    def fingerprint(self) -> str:
        """Return the fingerprint of the float32 masters, as this world size shards them."""
        masters = dict(state_tensors(self.module))
        makers: list[Fingerprint] = entries.hooks("fingerprint")
        return entries.first_result(makers, masters, self.device) or ""

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a whole parameter on the engine's device, gathered from all ranks."""
        tensor = tensor.to(self.device)
        if isinstance(tensor, DTensor):
            return tensor.full_tensor()
        return tensor

    def _collate(self, rows: list[Sequence], adapter: str) -> MicroBatch:
        """Return the micro-batch of `rows` that this rank computes; without rows, of `adapter`."""
        batch = collate(rows, self.device, self.layout)
        if not rows:
            batch = replace(batch, adapters=(adapter,))
        if not self.replays_routing:
            batch = replace(batch, replays_routing=False)
        return self._extensions.changed_batch(batch)

    def live_weights(self) -> Tensors:
        """Return the tensors that training changes; see OptimizedWeights."""
        trained = Tensors()
        for name, tensor in state_tensors(self.module):
            is_buffer = not isinstance(tensor, nn.Parameter)
            if name in self.optimizer.parameters or is_buffer:
                trained[name] = tensor.detach()
        return trained

    def _plan(self, rows: list[Sequence], rows_per_example: int = 1) -> Plan:
        """Return the row indices of each micro-batch, those of one adapter side by side.

        The plans of all ranks have equally many micro-batches, so that collectives stay aligned. A
        shorter plan ends with empty micro-batches.
        """
        plan = Plan()
        for group in self._mixable(rows):
            group_plan = self._plan_group([rows[index] for index in group], rows_per_example)
            for part in group_plan:
                indices = [group[index] for index in part]
                plan.append(sorted(indices, key=lambda index: rows[index].adapter))
        local_sizes = [max(1, len(plan)), max(map(_length, rows), default=0)]
        sizes = torch.tensor(local_sizes, device=self.device)
        if dist.get_world_size() > 1:  # with one rank, it would take as long as a small model
            dist.all_reduce(sizes, dist.ReduceOp.MAX)
        num_microbatches, longest = sizes.tolist()
        config = self.module.config.get_text_config()
        limit = exact_length(config.to_dict())
        if limit and longest > limit:
            raise UserError(
                f"A row has {longest} tokens. "
                f"Positions of '{self.source}' beyond {limit} depend on the rows beside it: "
                f"use llm_server.context_length={limit}, or shorter rows."
            )
        num_missing = num_microbatches - len(plan)
        return plan + [[]] * num_missing

    def _mixable(self, rows: list[Sequence]) -> list[list[int]]:
        """Return the indices of rows that may be in one micro-batch.

        Packed rows have no axis by which a layer could tell them apart, and each adapter has a loss
        scale of its own in float16.
        """
        is_mixed = self.config.lora.mixed and self.layout is None and not self._scales_loss
        by_adapter = dict[str, list[int]]()
        for index, row in enumerate(rows):
            by_adapter.setdefault("" if is_mixed else row.adapter, []).append(index)
        return [*by_adapter.values()]

    def _plan_group(self, rows: list[Sequence], rows_per_example: int) -> Plan:
        """Return the row indices of each micro-batch; the rows of an example stay together."""
        budget = self.config.max_tokens_per_microbatch * self._extensions.num_sharing
        if self.layout is not None:
            return self.layout.plan(rows, budget, rows_per_example=rows_per_example)
        input_counts = [max(1, _length(row) - 1) for row in rows]
        return padded(input_counts, budget, rows_per_example=rows_per_example)

    def _compute(self, batch: MicroBatch) -> Tensors:
        """Return the outputs of all loss tokens of a micro-batch, on every rank of its group."""
        outputs = self._model(batch)
        return self._extensions.gather_outputs(outputs, batch)

    def _low_precision(self) -> AbstractContextManager[None]:
        """Return a context in which passes compute in the engine's dtype."""
        return models.low_precision(self._model, self.dtype, self._float32_names)


def backward(
    model: Callable[[MicroBatch], Tensors],
    batch: MicroBatch,
    loss_fn: LossFn,
    record: Mapping[str, str] | None = None,
    *,
    scale: float = 1.0,
) -> tuple[Tensors, Tensors]:
    """Run one micro-batch forward and backward; gradients are added to those of the parameters.

    Args:
        record: {output: field}: outputs of the model that the loss function also gets as
            fields, without gradient.
        scale: The loss is multiplied by it before the backward pass.

    Returns:
        (stats of the loss, the recorded outputs by field, float32 [N] each).
    """
    outputs = model(batch)
    recorded = Tensors()
    for output_name, field in (record or {}).items():
        recorded[field] = outputs[output_name].detach()
    loss_input = LossInput(
        outputs=outputs,
        rows_N=batch.rows_N,
        fields=batch.fields | recorded,
    )
    loss, stats = loss_fn(loss_input)
    (loss * scale).backward()
    return stats, recorded


def _length(row: Sequence) -> int:
    return len(row.tokens)


def _add_to(totals: dict[str, torch.Tensor | float], stats: Tensors) -> None:
    """Add the stats of a micro-batch to those of the micro-batches before."""
    for name, stat in stats.items():
        totals[name] = totals.get(name, 0.0) + stat


def _record(rows: list[Sequence], recorded: Tensors) -> None:
    """Add outputs of the rows' loss tokens, [N] each, to the fields of the rows."""
    for field, values_N in recorded.items():
        row_values = scatter(values_N, rows)
        for row, values_T in zip(rows, row_values, strict=True):
            row.fields[field] = values_T


def _local_device() -> torch.device:
    """Return this rank's CUDA device with nccl, else the CPU."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return CPU


def _sum_over_ranks(stats: Stats) -> Stats:
    """Add the stats of all ranks; a rank without rows has fewer names."""
    if dist.get_world_size() == 1:
        return stats
    stats_of_ranks: list[Stats] = [{}] * dist.get_world_size()
    dist.all_gather_object(stats_of_ranks, stats)
    names = dict.fromkeys(chain(*stats_of_ranks))
    totals = Stats()
    for name in names:
        totals[name] = sum(rank_stats.get(name, 0.0) for rank_stats in stats_of_ranks)
    return totals
