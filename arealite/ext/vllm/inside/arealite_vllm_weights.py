# pyright: reportMissingImports=false
"""Loads new weights into a running vLLM server, from a folder or from a process group.

vLLM loads the module into each worker process:

    --worker-extension-cls arealite_vllm_weights.Extension
    --weight-transfer-config '{"backend": "arealite"}'

The server must start from a local folder with safetensors. An update is a series of POST requests:

    /pause?mode=keep                 or another mode; the gate answers 409 to an update without it
    /collective_rpc                  {"method": "arealite_check_weights", "kwargs": KWARGS}
    /start_weight_update
    /update_weights                  {"update_info": INFO}, once for a folder, else once per bucket
    /finish_weight_update            {"weight_version": "7"}
    /reset_prefix_cache              vLLM keeps cached prompts of the earlier weights
    /resume

* KWARGS is {"path": FOLDER} or {"shapes": {NAME: SHAPE}}, with the names of the model folder, and
  optionally "unused": names of tensors that no model uses. The answer has one object per worker:
  {"results": [{"refusal": ""}]}. A refusal is one line. The server then has its earlier weights.
* INFO is {"path": FOLDER}, or {"names": […], "dtypes": […], "shapes": […]} and optionally
  "load_format": "flattened_bucket". Rank 0 of the group broadcasts the tensors in this order, or
  their bytes as one tensor. The group exists from /init_weight_transfer_engine {"init_info": …}
  (fields: GroupInfo) to /shutdown_weight_transfer_engine. After a /finish_weight_update that
  failed, vLLM refuses to shut it down until the next check.
* vLLM answers 500 to an update that fails. If the model was already changed, it then has weights
  of two versions. The server stays paused (/resume: 409) until a whole update has succeeded; such
  an update begins with a new check. The method arealite_state gives the reason as "obstacle".
"""

import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from arealite_vllm_checkpoint import (
    CODE_OF_DTYPE,
    ServedCheckpoint,
    TensorHeader,
    UpdateRefused,
    read_headers,
)
from safetensors import safe_open
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
)
from vllm.version import __version__ as VERSION

NamedTensor = tuple[str, torch.Tensor]

START_ID = uuid.uuid4().hex
"""Differs in each process, so a client recognizes a restarted server."""
FLAT = "flattened_bucket"


@dataclass(kw_only=True)
class GroupInfo(WeightTransferInitInfo):
    """Describes the process group of a sender and the workers of its servers."""

    master_address: str
    master_port: int
    group_name: str
    rank_offset: int
    """Rank of the server's first worker."""
    world_size: int
    backend: str = "gloo"
    timeout_s: float = 60.0
    """Limit of the wait for all ranks, and of each broadcast."""

    def __post_init__(self) -> None:
        """Check the numbers: with wrong ones, the engine would wait for ranks until `timeout_s`.

        Rank 0 is the trainer's. Sizes of groups and ports are below 2**16.

        Raises:
            ValueError: A number is out of its range.
        """
        if not 0 < self.rank_offset < self.world_size < 2**16 > self.master_port > 0:
            raise ValueError(f"{self} is not a group of a trainer and servers")


@dataclass(kw_only=True)
class TensorsInfo(WeightTransferUpdateInfo):
    """Describes the tensors of one request: those of a folder, or some from the group."""

    path: str = ""
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    """Without "torch.": float32, bfloat16, …"""
    shapes: list[list[int]] = field(default_factory=list)
    load_format: str | None = None


@dataclass(kw_only=True)
class WeightUpdate:
    """An update between its check and its end."""

    headers: Mapping[str, TensorHeader]
    """All tensors of the update."""
    path: str
    """"": the tensors come from the group."""
    missing_names: set[str]
    """Tensors that the model reads and that have not arrived."""
    loaded_parameters: set[str] = field(default_factory=set)
    """Names in vLLM's model."""
    has_changed_model: bool = False


class ModelWeights(WeightTransferEngine[GroupInfo, TensorsInfo]):
    """A worker's weights, which updates replace."""

    init_info_cls = GroupInfo
    update_info_cls = TensorsInfo
    supports_draft_weight_update = False

    obstacle = ""
    """Why the server must not sample; "" if it may."""
    is_broken = False
    """Whether only a restart helps."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._served = served_checkpoint(self.model_config)
        self._parameters = parameter_names(model)
        self._update: WeightUpdate | None = None
        self._group: dist.ProcessGroup | None = None

    # ------------------------------------------------------------ the process group

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        worker_rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = join_group(init_info, init_info.rank_offset + worker_rank)

    def shutdown(self) -> None:
        group = self._group
        self._group = None
        if group is not None:
            dist.destroy_process_group(group)

    # ------------------------------------------------------------ the update

    def check(
        self,
        path: str,
        shapes: Mapping[str, Sequence[int]],
        unused: Collection[str],
    ) -> None:
        """Check all tensors of the next update. An unfinished update ends.

        Args:
            path: Folder with the new weights; "" if they come from the group.
            shapes: Shape of each tensor from the group.
            unused: Names of tensors of the model folder that no model uses.

        Raises:
            UpdateRefused: The tensors do not fit, or the server needs a restart.
        """
        self._give_up("its sender began another update")
        if self.is_broken:
            raise UpdateRefused(self.obstacle)
        headers = read_headers(Path(path)) if path else self._announced(shapes)
        self._served.check(headers, unused)
        self._update = WeightUpdate(
            headers=headers,
            path=path,
            missing_names={name for name in headers if self._served.is_read(name)},
        )

    def _announced(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, TensorHeader]:
        """Return headers of tensors whose types are checked when they arrive."""
        headers = dict[str, TensorHeader]()
        for name, shape in shapes.items():
            served = self._served.headers.get(name)
            code = served.code if served else "F32"
            headers[name] = TensorHeader(shape=tuple(shape), code=code)
        return headers

    def start_weight_update(self) -> None:
        if self._update is None:
            raise ValueError("call arealite_check_weights before /start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
        except Exception as error:
            self._give_up(str(error))
            raise

    def receive_weights(self, update_info: TensorsInfo) -> None:
        update = self._started_update()
        if update_info.path != update.path:
            raise UpdateRefused(f"path {update_info.path!r} is not the checked {update.path!r}")
        if update.path:
            update.missing_names.clear()
            self._load(update, folder_tensors(update.headers))
            return
        if self._group is None:
            raise UpdateRefused("call /init_weight_transfer_engine before /update_weights")
        self._check_arrival(update, update_info)
        tensors = receive_tensors(update_info, self._group, self.device)
        self._load(update, iter(tensors))

    def _check_arrival(self, update: WeightUpdate, info: TensorsInfo) -> None:
        """Compare tensors with the check before they arrive, and note their arrival."""
        if not len(info.names) == len(info.dtypes) == len(info.shapes):
            raise UpdateRefused("names, dtypes and shapes differ in length")
        for name, dtype_name, shape in zip(info.names, info.dtypes, info.shapes, strict=True):
            header = TensorHeader(
                shape=tuple(shape),
                code=CODE_OF_DTYPE.get(dtype_name, f"torch.{dtype_name}"),
            )
            checked = update.headers.get(name)
            if checked is None or checked.shape != header.shape:
                raise UpdateRefused(f"tensor '{name}' {shape} is not the checked one")
            self._served.check_tensor(name, header)
            update.missing_names.discard(name)

    def _load(self, update: WeightUpdate, tensors: Iterator[NamedTensor]) -> None:
        """Load tensors into the model."""
        if not update.has_changed_model:
            self.obstacle = "a weight update is not finished"
            update.has_changed_model = True
            initialize_layerwise_reload(self.model)
        # vLLM expects the embedding in the same call as a tied head, so the head is left out.
        used = ((name, tensor) for name, tensor in tensors if self._served.is_read(name))
        update.loaded_parameters |= self.model.load_weights(used) or set()

    def finish_weight_update(self) -> None:
        try:
            update = self._started_update()
            if update.missing_names:
                names = ", ".join(sorted(update.missing_names)[:5])
                raise UpdateRefused(f"tensors did not arrive: {names}")
            is_quantized = self.model_config.quantization is not None
            if not is_quantized:
                self._check_parameters(update)
            finalize_layerwise_reload(self.model, self.model_config)
            if not is_quantized:
                process_tied_layers(self.model)
        except Exception as error:
            self._give_up(str(error))
            raise
        self._update = None
        self.obstacle = ""

    def _check_parameters(self, update: WeightUpdate) -> None:
        """Check that each parameter of vLLM's model has a new value, as vLLM does at its start."""
        # Before the update, a tied head is the embedding; during it, they are two parameters.
        parameters = self._parameters & parameter_names(self.model)
        stale_parameters = parameters - update.loaded_parameters
        if stale_parameters:
            names = ", ".join(sorted(stale_parameters)[:5])
            raise UpdateRefused(f"no tensor of the update belongs to {names}")

    def _started_update(self) -> WeightUpdate:
        if self._update is None:
            raise UpdateRefused("no update has been started")
        return self._update

    def _give_up(self, reason: str) -> None:
        """End an unfinished update; a changed model then has weights of two versions."""
        update = self._update
        self._update = None
        if update is None or not update.has_changed_model:
            return
        line = " ".join(reason.split())
        try:
            put_tensors_back(self.model)
            self.obstacle = f"a weight update failed ({line}); update all weights again"
        except Exception as error:  # noqa: BLE001  (layers fail in many ways)
            self.is_broken = True
            self.obstacle = f"a weight update failed ({line}); restart the server ({error})"


WeightTransferEngineFactory.register_engine("arealite", ModelWeights)


class Extension:
    """Methods of each worker for /collective_rpc; vLLM adds the class to its worker's bases."""

    weight_transfer_engine: ModelWeights
    vllm_config: Any
    _weight_update_active: bool

    def arealite_check_weights(
        self,
        path: str = "",
        shapes: Mapping[str, Sequence[int]] | None = None,
        unused: Collection[str] = (),
    ) -> dict[str, str]:
        """Check the tensors of the next update; return why it is refused, as {"refusal": …}."""
        self._weight_update_active = False  # vLLM would refuse the next start
        try:
            self.weight_transfer_engine.check(path, shapes or {}, unused)
        except UpdateRefused as error:
            return {"refusal": str(error)}
        except Exception as error:  # noqa: BLE001  (the folder may have any content)
            return {"refusal": f"the weights cannot be read: {error!r:.500}"}
        return {"refusal": ""}

    def arealite_state(self) -> dict[str, Any]:
        """Return why the server must not sample ("obstacle"), and facts about the process."""
        model_config = self.vllm_config.model_config
        return {
            "obstacle": self.weight_transfer_engine.obstacle,
            "needs_restart": self.weight_transfer_engine.is_broken,
            "start_id": START_ID,
            "version": VERSION,
            "dtype": str(model_config.dtype).removeprefix("torch."),
            "logprobs_mode": str(model_config.logprobs_mode),
        }


def parameter_names(model: torch.nn.Module) -> set[str]:
    """Return the names of a model's parameters; of a shared parameter, the first name.

    A layer beside which an adapter may be loaded has its own parameters in `base_layer`.
    """
    return {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}


def served_checkpoint(model_config: Any) -> ServedCheckpoint:
    """Return the tensors of the folder that the server starts from.

    Raises:
        UpdateRefused: It is not a local folder with safetensors.
    """
    text_config = model_config.hf_text_config
    return ServedCheckpoint(
        headers=read_headers(Path(model_config.model)),
        is_tied=bool(getattr(text_config, "tie_word_embeddings", False)),
    )


def folder_tensors(headers: Mapping[str, TensorHeader]) -> Iterator[NamedTensor]:
    """Yield each tensor of a folder, file by file."""
    names_of_file = dict[Path, list[str]]()
    for name, header in headers.items():
        assert header.file is not None
        names_of_file.setdefault(header.file, []).append(name)
    for path, names in names_of_file.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                yield name, file.get_tensor(name)


def receive_tensors(
    info: TensorsInfo,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[NamedTensor]:
    """Receive the tensors of one request from rank 0 of the group."""
    dtypes: list[torch.dtype] = [getattr(torch, dtype_name) for dtype_name in info.dtypes]
    columns = list(zip(info.names, dtypes, info.shapes, strict=True))
    tensors = list[NamedTensor]()
    if info.load_format != FLAT:
        for name, dtype, shape in columns:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor, src=0, group=group)
            tensors.append((name, tensor))
        return tensors
    sizes = [dtype.itemsize * prod(shape) for _, dtype, shape in columns]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.broadcast(flat, src=0, group=group)
    for (name, dtype, shape), tensor_bytes in zip(columns, flat.split(sizes), strict=True):
        aligned_bytes = tensor_bytes.clone()
        tensors.append((name, aligned_bytes.view(dtype).view(shape)))
    return tensors


def join_group(info: GroupInfo, rank: int) -> dist.ProcessGroup:
    """Join the sender's process group, beside the groups of vLLM; blocks until all have joined."""
    timeout = timedelta(seconds=info.timeout_s)
    store = TCPStore(info.master_address, info.master_port, info.world_size, timeout=timeout)
    group: Any
    group_name: Any = info.group_name
    group, *_ = c10d._new_process_group_helper(
        info.world_size,
        rank,
        [],
        c10d.Backend(info.backend),
        c10d.PrefixStore(group_name, store),
        group_name=group_name,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(info.world_size)}
    return group


def process_tied_layers(model: torch.nn.Module) -> None:
    """Process the new values in each layer that shares a parameter with an earlier layer.

    On a CPU, a tied head multiplies with a packed copy of the embedding. vLLM loads the embedding
    only into its own layer, so the head would keep the copy of the earlier weights.
    """
    seen_parameters = set[int]()
    for layer in model.modules():
        parameters = {id(parameter) for parameter in layer.parameters(recurse=False)}
        is_tied = not seen_parameters.isdisjoint(parameters)
        seen_parameters |= parameters
        method = getattr(layer, "quant_method", None)
        if is_tied and method is not None:
            method.process_weights_after_loading(layer)


def put_tensors_back(model: torch.nn.Module) -> None:
    """Undo `initialize_layerwise_reload` in each layer that has no complete new weights.

    vLLM has no function for it. Without it, these layers have no memory, and every later update
    fails, too.
    """
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if not info.can_load():
            continue
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        for tensor in layerwise.get_layer_tensors(layer).values():
            tensor.weight_loader = layerwise._get_original_loader(tensor)
        info.reset()
