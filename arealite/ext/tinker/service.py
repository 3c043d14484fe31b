"""The tenants of the service, their client sessions, models and sampling clients.

The key of a request names its tenant. Every object belongs to one tenant. To another tenant, the
service answers as if the object did not exist.
"""

import asyncio
import hmac
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from arealite.base import log
from arealite.base.errors import UserError
from arealite.ext.session.training_session import Session
from arealite.ext.tinker import bodies
from arealite.ext.tinker.checkpoints import ADAPTER, PREFIX, Checkpoints, ModelSpec
from arealite.ext.tinker.config import TinkerConfig
from arealite.ext.tinker.results import FutureResult, Results, Unavailable
from arealite.ext.tinker.sampling import MAX_SAMPLES, LoadedAdapters, SamplingClient
from arealite.ext.tinker.training import TrainedModel

logger = log.get(__name__)
T = TypeVar("T")
Answer = dict[str, object]
"""An answer, which is sent as JSON."""
SWEEP_S = 10.0
"""Time between two checks for client sessions without heartbeat."""
MAX_ENDED = 1000
"""Ended sessions that a tenant keeps, so that their clients are told."""
LAST_STATE = "when-ended"
"""Name of the checkpoint of a model whose session ended without notice."""


@dataclass(eq=False)
class ClientSession:
    """A session of a client."""

    id: str
    last_heartbeat: float
    is_ended: bool = False
    model_numbers: set[int] = field(default_factory=set[int])
    """The numbers of the models that were made; each makes one model."""


class Tenant:
    """The objects of one tenant."""

    def __init__(self, name: str, folder: Path, options: TinkerConfig) -> None:
        self.name = name
        self.checkpoints = Checkpoints(folder)
        self.results = Results(max_pending=options.max_pending)
        self.sessions = dict[str, ClientSession]()
        self.models = dict[str, TrainedModel]()
        self.samplers = dict[str, SamplingClient]()

    def session_or_ended(self, session_id: str) -> ClientSession:
        """Return a session, also one that has ended.

        Raises:
            Unavailable: There is none.
        """
        return _one_of(self.sessions, "session", session_id)

    def session(self, session_id: str) -> ClientSession:
        """Return a session that has not ended.

        Raises:
            Unavailable: There is none.
        """
        session = self.session_or_ended(session_id)
        if session.is_ended:
            raise Unavailable(410, f"session {session_id} has ended. Make a new client.")
        return session

    def model(self, model_id: str) -> TrainedModel:
        """Return a model.

        Raises:
            Unavailable: There is none.
        """
        return _one_of(self.models, "model", model_id)

    def sampler(self, sampler_id: str) -> SamplingClient:
        """Return a sampling client.

        Raises:
            Unavailable: There is none.
        """
        return _one_of(self.samplers, "sampler", sampler_id)


def _one_of(objects: Mapping[str, T], kind: str, object_id: str) -> T:
    if object_id not in objects:
        raise Unavailable(404, f"there is no {kind} {object_id!r:.100}. Make a new one.")
    return objects[object_id]


def _of_session(objects: Mapping[str, T], session: ClientSession) -> list[T]:
    """Return the models, or the sampling clients, of a session."""
    prefix = f"{session.id}:"
    return [item for object_id, item in objects.items() if object_id.startswith(prefix)]


class Service:
    """Answers requests, each with its parsed and its raw body; see the routes of TinkerServer."""

    def __init__(
        self,
        session: Session,
        options: TinkerConfig,
        *,
        base_model: str,
        tenants: Mapping[str, Tenant],
    ) -> None:
        """Initialize the service.

        Args:
            session: A session whose base model is frozen.
            options: The options.
            base_model: Name of the base model for clients.
            tenants: The tenants by their keys.
        """
        self.base_model = base_model
        self._session = session
        self._options = options
        self._tenants = tenants
        self._loaded = LoadedAdapters(session, limit=options.max_samplers)
        self._adapter_numbers = itertools.count()
        self._endings = set[asyncio.Task[None]]()
        """Sessions that are ending."""

    def tenant_of(self, key: str) -> Tenant:
        """Return the tenant of a key.

        Raises:
            Unavailable: No tenant has this key.
        """
        owner = None
        for tenant_key, tenant in self._tenants.items():  # all: the time tells nothing of a match
            if hmac.compare_digest(key.encode(errors="replace"), tenant_key.encode()):
                owner = tenant
        if owner is None:
            raise Unavailable(401, "the API key is missing or wrong. Set TINKER_API_KEY.")
        return owner

    def capabilities(self) -> Answer:
        """Return the base model and what clients can do with it."""
        model = {
            "model_name": self.base_model,
            "max_context_length": self._session.context_length,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    # ------------------------------------------------------------ client sessions

    def create_session(self, tenant: Tenant, body: bodies.Body, raw: bytes) -> Answer:
        """Begin a client's session."""
        session = ClientSession(uuid4().hex, time.monotonic())
        tenant.sessions[session.id] = session
        return {
            "type": "create_session",
            "session_id": session.id,
            "warning_message": (
                "AReaLite trains no adapter of the unembedding (train_unembed is ignored)."
            ),
        }

    def heartbeat(self, tenant: Tenant, body: bodies.SessionOnly, raw: bytes) -> Answer:
        """Note that a client lives."""
        tenant.session(body.session_id).last_heartbeat = time.monotonic()
        return {"type": "session_heartbeat"}

    async def finish_session(self, tenant: Tenant, session_id: str) -> None:
        """End a session; it goes on if the client does not wait for it."""
        session = tenant.session_or_ended(session_id)
        ending = asyncio.create_task(self.end_session(tenant, session))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        await asyncio.shield(ending)

    async def end_session(self, tenant: Tenant, session: ClientSession) -> None:
        """Remove the models and sampling clients of a session; their checkpoints stay."""
        session.is_ended = True
        for sampler in _of_session(tenant.samplers, session):
            tenant.samplers.pop(sampler.id, None)
        for model in _of_session(tenant.models, session):
            tenant.models.pop(model.id, None)
            await model.close("the session of this model has ended")
        ended = [item.id for item in tenant.sessions.values() if item.is_ended]
        for session_id in ended[:-MAX_ENDED]:
            del tenant.sessions[session_id]

    async def watch(self) -> None:
        """End sessions without heartbeat, until cancelled; save the weights of their models."""
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.end_silent_sessions(time.monotonic() - self._options.idle_s)

    async def end_silent_sessions(self, last_heartbeat_before: float) -> None:
        """End sessions that have sent no heartbeat since then, in seconds of time.monotonic."""
        for tenant in self._tenants.values():
            for session in [*tenant.sessions.values()]:
                if session.is_ended or session.last_heartbeat >= last_heartbeat_before:
                    continue
                try:
                    await self._end_silent(tenant, session)
                except Exception:
                    logger.exception("a silent session did not end", session=session.id)

    async def _end_silent(self, tenant: Tenant, session: ClientSession) -> None:
        """Save the models of a session, and end it."""
        saved = list[str]()
        try:
            for model in _of_session(tenant.models, session):
                saved.append(await model.write("weights", LAST_STATE, overwrite=True))
        finally:
            logger.warning("session ended without heartbeat", tenant=tenant.name, saved=saved)
            await self.end_session(tenant, session)

    # ------------------------------------------------------------ models

    def create_model(self, tenant: Tenant, body: bodies.CreateModel, raw: bytes) -> Answer:
        """Begin to make a model; return the id of the result."""
        _check_optimizer(body.optimizer_config)
        lora = body.lora_config or bodies.LoraOptions(rank=32)
        spec = ModelSpec(
            base_model=body.base_model,
            rank=lora.rank,
            train_mlp=lora.train_mlp,
            train_attn=lora.train_attn,
        )
        session = tenant.session(body.session_id)
        make = partial(self._make_model, tenant, session, spec=spec, seed=lora.seed)
        return self._begin_model(tenant, session, body.model_seq_id, raw, make)

    def load_weights(self, tenant: Tenant, body: bodies.LoadWeights, raw: bytes) -> Answer:
        """Begin to load a checkpoint into a model, or into a new one; return the result's id."""
        if body.model_id is not None:
            model = tenant.model(body.model_id)
            job = partial(model.load, body.path, with_optimizer=body.optimizer)
            return {"request_id": model.submit(body.seq_id or 0, raw, job)}
        _check_optimizer(body.optimizer_config)
        session = tenant.session(body.session_id or "")
        make = partial(
            self._make_model,
            tenant,
            session,
            spec=tenant.checkpoints.read(body.path).spec,
            path=body.path,
            with_optimizer=body.optimizer,
        )
        return self._begin_model(tenant, session, body.model_seq_id or 0, raw, make)

    def _begin_model(
        self,
        tenant: Tenant,
        session: ClientSession,
        number: int,
        raw: bytes,
        make: Callable[[str], Awaitable[FutureResult]],
    ) -> Answer:
        """Begin to make the model of a number, once; return the id of the result."""
        model_id = f"{session.id}:train:{number}"
        request_id = f"{model_id}:create"
        pending = tenant.results.begin(request_id, raw)
        if pending is not None:
            is_new = number not in session.model_numbers
            session.model_numbers.add(number)
            job = partial(make, model_id) if is_new else partial(_refuse_again, number)
            tenant.results.start(pending, job)
        return {"request_id": request_id}

    async def _make_model(
        self,
        tenant: Tenant,
        session: ClientSession,
        model_id: str,
        *,
        spec: ModelSpec,
        seed: int | None = None,
        path: str | None = None,
        with_optimizer: bool = False,
    ) -> FutureResult:
        """Make a model, which begins with the checkpoint of a path."""
        self._check_base_model(spec.base_model)
        if not 1 <= spec.rank <= self._options.max_rank:
            raise UserError(f"rank={spec.rank}: use 1 to {self._options.max_rank}.")
        if len(tenant.models) >= self._options.max_models:
            raise UserError(
                f"you train {len(tenant.models)} models, the limit. Close a client "
                "(ServiceClient.close), or raise tinker.max_models."
            )
        model = TrainedModel(
            model_id,
            f"model{next(self._adapter_numbers)}",
            spec,
            session=self._session,
            checkpoints=tenant.checkpoints,
            results=tenant.results,
        )
        tenant.models[model_id] = model
        try:
            await model.add(seed)
            if path is not None:
                await model.load(path, with_optimizer=with_optimizer)
            if session.is_ended:
                raise UserError("the session of this model has ended.")
        except BaseException:
            tenant.models.pop(model_id, None)
            await model.close("the model could not be made")
            raise
        return FutureResult.of({"model_id": model_id, "path": path})

    def _check_base_model(self, name: str | None) -> None:
        if name != self.base_model:
            raise UserError(f"base_model={name!r:.200}: this service has {self.base_model!r}.")

    def model_info(self, tenant: Tenant, body: bodies.ModelOnly, raw: bytes) -> Answer:
        """Describe a model."""
        spec = tenant.model(body.model_id).spec
        return {
            "type": "get_info",
            "model_id": body.model_id,
            "model_data": {"model_name": spec.base_model},
            "model_name": spec.base_model,
            "is_lora": True,
            "lora_rank": spec.rank,
        }

    def unload_model(self, tenant: Tenant, body: bodies.ModelOnly, raw: bytes) -> Answer:
        """Begin to remove a model; return the id of the result."""
        model = tenant.model(body.model_id)
        request_id = f"{model.id}:unload"
        tenant.results.submit(request_id, raw, partial(_unload, tenant, model))
        return {"request_id": request_id}

    # ------------------------------------------------------------ sampling clients

    def save_for_sampler(self, tenant: Tenant, body: bodies.SaveForSampler, raw: bytes) -> Answer:
        """Begin to write weights for sampling; return the id of the result."""
        model = tenant.model(body.model_id)
        if body.path is None and body.sampling_session_seq_id is None:
            raise UserError("save_weights_for_sampler: send path or sampling_session_seq_id.")
        job = partial(self._save_for_sampler, tenant, model, body)
        return {"request_id": model.submit(body.seq_id, raw, job)}

    async def _save_for_sampler(
        self,
        tenant: Tenant,
        model: TrainedModel,
        body: bodies.SaveForSampler,
    ) -> FutureResult:
        """Write the weights; without a name, make a sampling client of them."""
        if body.path is not None:
            path = await model.write("sampler_weights", body.path, metadata=body.user_metadata)
            return FutureResult.of({"path": path, "type": "save_weights_for_sampler"})
        session_id, _, _ = model.id.partition(":")
        session = tenant.session(session_id)
        path = None
        if body.kind == "inflight":
            await self._session.publish(adapter=model.adapter)
        else:
            path = await model.save_snapshot(body.seq_id, keep=self._options.max_samplers)
        sampler = self._new_sampler(
            tenant,
            session,
            body.sampling_session_seq_id,
            path=path,
            adapter=model.adapter,
        )
        return FutureResult.of(
            {"sampling_session_id": sampler.id, "type": "save_weights_for_sampler"}
        )

    def create_sampler(
        self, tenant: Tenant, body: bodies.CreateSamplingSession, raw: bytes
    ) -> Answer:
        """Make a sampling client of the base model or of a checkpoint.

        Raises:
            UserError: There is no such model or checkpoint.
        """
        session = tenant.session(body.session_id)
        if body.model_path is None:
            self._check_base_model(body.base_model)
        else:
            self._check_base_model(tenant.checkpoints.read(body.model_path).spec.base_model)
        sampler = self._new_sampler(
            tenant,
            session,
            body.sampling_session_seq_id,
            path=body.model_path,
        )
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    def _new_sampler(
        self,
        tenant: Tenant,
        session: ClientSession,
        number: int | None,
        *,
        path: str | None,
        adapter: str = "",
    ) -> SamplingClient:
        """Return the sampling client of this number; the same one if it was made before.

        Args:
            tenant: The tenant.
            session: The client's session.
            number: The number.
            path: Path of the checkpoint that it samples from; None: it samples from `adapter`.
            adapter: An adapter that the session keeps loaded; "": the base model.
        """
        sampler_id = f"{session.id}:sample:{number}"
        if sampler_id in tenant.samplers:
            return tenant.samplers[sampler_id]
        folder = None
        if path is not None:
            folder = tenant.checkpoints.folder(path) / ADAPTER
            # Another checkpoint may get this path later.
            created = tenant.checkpoints.read(path).created
            adapter = f"{tenant.name}.{path.removeprefix(PREFIX).replace('/', '.')}.{created}"
        sampler = SamplingClient(
            sampler_id,
            base_model=self.base_model,
            path=path,
            adapter=adapter.replace(":", "-"),
            folder=folder,
            session=self._session,
            loaded=self._loaded,
        )
        tenant.samplers[sampler_id] = sampler
        return sampler

    def sample(self, tenant: Tenant, body: bodies.SampleBody, raw: bytes) -> Answer:
        """Begin to sample; return the id of the result and one for each sample."""
        sampler = tenant.sampler(body.sampling_session_id)
        if not 1 <= body.num_samples <= MAX_SAMPLES:
            raise UserError(f"num_samples={body.num_samples}: use 1 to {MAX_SAMPLES}.")
        request_id = f"{sampler.id}:{body.seq_id}"
        tenant.results.submit(request_id, raw, partial(sampler.sample, body))
        ids = [f"{request_id}:{number}" for number in range(body.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}


async def _refuse_again(number: int) -> FutureResult:
    raise UserError(f"model_seq_id={number}: this session has made that model already.")


def _check_optimizer(choice: bodies.OptimizerChoice | None) -> None:
    if choice is not None and choice.type != "adamw":
        raise UserError(f"optimizer {choice.type!r:.40}: this service has adamw only.")


async def _unload(tenant: Tenant, model: TrainedModel) -> FutureResult:
    tenant.models.pop(model.id, None)
    await model.close("the model was unloaded")
    return FutureResult.of({"model_id": model.id, "type": "unload_model"})
