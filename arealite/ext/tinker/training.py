"""A model that a client trains: an adapter of the session, its requests in their order."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from arealite.api.engine import Sequence as Row
from arealite.base.errors import UserError
from arealite.ext.session.training_session import Session
from arealite.ext.tinker import bodies, messages
from arealite.ext.tinker.checkpoints import (
    ADAPTER,
    PREFIX,
    SNAPSHOTS,
    STATE,
    Checkpoint,
    Checkpoints,
    ModelSpec,
)
from arealite.ext.tinker.datums import (
    Datum,
    logprobs_of,
    read_datum,
    rows_of,
)
from arealite.ext.tinker.named_losses import SummedLoss, options_of
from arealite.ext.tinker.results import PROTOBUF, FutureResult, OrderedRequests, RequestJob, Results

ALPHA = 32.0
"""The product of an adapter is scaled by ALPHA / rank, as in the public service."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
OUTPUT_TYPE = "ArrayRecord"


def targets_of(spec: ModelSpec) -> list[str]:
    """Return the layers that get an adapter."""
    if spec.train_attn and spec.train_mlp:
        return ["all-linear"]
    if not spec.train_attn and not spec.train_mlp:
        raise UserError(
            "lora_config: train_attn or train_mlp must be true: no adapter of the head."
        )
    return ATTENTION if spec.train_attn else MLP


class TrainedModel:
    """One model of a tenant."""

    def __init__(
        self,
        model_id: str,
        adapter: str,
        spec: ModelSpec,
        *,
        session: Session,
        checkpoints: Checkpoints,
        results: Results,
    ) -> None:
        self.id = model_id
        self.adapter = adapter
        """Its name in the session."""
        self.spec = spec
        self._session = session
        self._checkpoints = checkpoints
        self._results = results
        self._requests_in_order = OrderedRequests(results)
        self._snapshots = deque[str]()
        self._has_failed_pass = False
        """Whether a forward_backward has failed since the last optim_step."""

    def submit(self, seq_id: int, body: bytes, job: RequestJob) -> str:
        """Run a job after the requests with smaller numbers; return the id of its result."""
        request_id = f"{self.id}:{seq_id}"
        pending = self._results.begin(request_id, body)
        if pending is not None:
            self._requests_in_order.add(seq_id, pending, job)
        return request_id

    async def close(self, reason: str) -> None:
        """Refuse all further requests; remove the snapshots and the adapter, if it was added."""
        await self._requests_in_order.close(reason)
        for path in self._snapshots:
            self._checkpoints.remove(path)
        with suppress(UserError):
            await self._session.remove_adapter(self.adapter)

    async def add(self, seed: int | None = None, folder: Path | None = None) -> None:
        """Make the adapter, which adds 0 at first, or is that of a folder."""
        await self._session.add_adapter(
            self.adapter,
            rank=self.spec.rank,
            alpha=ALPHA,
            targets=targets_of(self.spec),
            seed=seed,
            folder=folder,
        )

    # ------------------------------------------------------------ requests

    def read_data(self, request: Any) -> list[Datum]:
        """Return the data of a request.

        Raises:
            UserError: There is none, or a datum is wrong.
        """
        if not request.data:
            raise UserError("forward_backward: there is no data.")
        data = list[Datum]()
        for index, message in enumerate(request.data):
            try:
                datum = read_datum(
                    message,
                    request.loss_fn,
                    vocabulary=self._session.vocabulary_size,
                    longest=self._session.context_length,
                )
            except UserError as error:
                raise UserError(f"datum {index}: {error}") from error
            data.append(datum)
        return data

    async def forward_backward(self, request: Any) -> FutureResult:
        """Add the gradient of a loss, or only compute it; `request` is a ForwardBackwardRequest.

        If it fails, the next `optim_step` does not apply the gradient of the others.
        """
        try:
            return await self._pass(request)
        except BaseException:
            self._has_failed_pass |= not request.forward_only
            raise

    async def _pass(self, request: Any) -> FutureResult:
        sent = {**request.loss_fn_config}
        for name, value in request.loss_fn_config_v2.items():
            sent[name] = value.text if value.text else value.number
        options = options_of(request.loss_fn, sent)
        data = self.read_data(request)
        rows = rows_of(data, self.adapter)
        loss = SummedLoss(request.loss_fn, options, uses_top_ids=rows[0].top_ids is not None)
        if request.forward_only:
            total = await self._session.evaluate(rows, loss, record_outputs=loss.recorded)
        else:
            total = await self._session.forward_backward(rows, loss, record_outputs=loss.recorded)
        return _output(rows, data, total["loss"])

    async def optim_step(self, body: bodies.OptimStep) -> FutureResult:
        """Apply the gradient."""
        params = body.adam_params
        if params is None:
            raise UserError("optim_step: this service has AdamW only. Send AdamParams.")
        if self._has_failed_pass:
            self._has_failed_pass = False
            await self._session.drop_gradient(adapter=self.adapter)
            raise UserError("optim_step: a forward_backward has failed; its gradient was dropped.")
        stats = await self._session.optim_step(
            params.learning_rate,
            adapter=self.adapter,
            beta1=params.beta1,
            beta2=params.beta2,
            eps=params.eps,
            weight_decay=params.weight_decay,
            clip_grad_norm=params.grad_clip_norm,
        )
        norm = stats["grad_norm"]
        if stats["skipped_update"]:
            raise UserError(f"optim_step: the update was skipped: the gradient's norm is {norm}.")
        return FutureResult.of({"metrics": {"grad_norm": norm}})

    async def save(self, body: bodies.SaveWeights) -> FutureResult:
        """Write the checkpoint of a request."""
        name = body.path or f"{body.seq_id:06d}"
        path = await self.write(
            "weights", name, overwrite=body.overwrite, metadata=body.user_metadata
        )
        return FutureResult.of({"path": path, "type": "save_weights"})

    async def save_snapshot(self, number: int, *, keep: int) -> str:
        """Write the weights for a sampling client without a name; return their path.

        Args:
            number: The number of the request.
            keep: Number of the model's snapshots that are kept.
        """
        path = await self.write(SNAPSHOTS, f"{number:06d}", overwrite=True)
        self._snapshots.append(path)
        while len(self._snapshots) > keep:
            self._checkpoints.remove(self._snapshots.popleft())
        return path

    async def write(
        self,
        kind: str,
        name: str,
        *,
        overwrite: bool = False,
        metadata: dict[str, str] | None = None,
    ) -> str:
        """Write a checkpoint of one of KINDS; return its path."""
        path = f"{PREFIX}{self.id}/{kind}/{name}"
        begin = partial(self._checkpoints.begin, path, overwrite=overwrite)
        folder = await asyncio.to_thread(begin)
        await self._session.export(folder / ADAPTER, adapter=self.adapter)
        if kind == "weights":
            await self._session.save(folder / STATE, adapter=self.adapter)
        checkpoint = Checkpoint(path=path, spec=self.spec, created=0.0, user_metadata=metadata)
        await asyncio.to_thread(self._checkpoints.commit, checkpoint)
        return path

    async def load(self, path: str, *, with_optimizer: bool) -> FutureResult:
        """Read a checkpoint of this tenant.

        Raises:
            UserError: There is none, it is for sampling only, or of another kind of model.
        """
        checkpoint = self._checkpoints.read(path)
        if checkpoint.kind != "weights":
            raise UserError(f"{path} is for sampling. Load one that save_state has written.")
        if checkpoint.spec != self.spec:
            raise UserError(f"{path} is of another model: {checkpoint.spec}, not {self.spec}.")
        folder = self._checkpoints.folder(path)
        if with_optimizer:
            await self._session.load(folder / STATE, adapter=self.adapter)
        else:
            await self._session.remove_adapter(self.adapter)
            await self.add(folder=folder / ADAPTER)
        return FutureResult.of({"path": path, "model_id": self.id, "type": "load_weights"})


def _output(rows: Sequence[Row], data: Sequence[Datum], loss: float) -> FutureResult:
    """Return the result of a pass: the loss, and the log-probability of each target."""
    output = messages.make("ForwardBackwardOutput", loss_fn_output_type=OUTPUT_TYPE)
    output.metrics["loss:sum"] = loss
    arrays = logprobs_of(rows, data)
    for _, group in groupby(arrays, key=lambda array: array.shape[1:]):  # one width in a record
        output.loss_fn_outputs.append(messages.record_of({"logprobs": [*group]}))
    return FutureResult(body=messages.serialized(output), content_type=PROTOBUF)
