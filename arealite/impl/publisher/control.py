"""Controls one server: pause, update weights, continue, confirm. It does not depend on the run.

A subclass of `ServerControl` has the routes of one kind of server.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from arealite.api.llm_server import UNTRUSTED
from arealite.api.publisher import PublishReport
from arealite.api.server_protocol import (
    GenerateRequest,
    ServerAnswer,
    ServerProtocol,
    adapter_of,
    part_of_entry,
    version_text,
)
from arealite.base import log
from arealite.base.errors import RoleError
from arealite.base.model_folder import ModelTensors, Shapes, read_shapes
from arealite.impl.http_client import Pool
from arealite.system.health.waits import PAUSE_OBSERVER, Wait, table

logger = log.get(__name__)

CONTINUE_S = 5.0
"""Shortest limit of a continue request and of status requests. It does not count towards
`timeout_s`: a server whose update timed out is still continued."""


class ServerRefusal(RoleError):
    """A live server answered with a status other than 200."""


FAILURES = (OSError, RoleError, ValueError)
"""Errors of one server; each quarantines the server."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities of one server process."""

    version: str
    """Version of the server's program, for logs."""
    pause_modes: frozenset[str]
    spans: bool
    """The server reports the version of every token; else one answer must have one version."""
    sessions: bool
    """Weights are sent between the begin and the end of a session."""
    buckets: bool
    """The server accepts many tensors in one broadcast."""
    relabel: bool
    """The reported version can be changed without new weights."""
    distributed: bool
    tp: int
    dp: int
    names_adapters: bool = False
    """The server loads an adapter beside generation, and requests name it."""

    def pause_mode(self, mode: str) -> str:
        """Return `mode`, or abort if the server cannot split an answer into versions.

        Return abort, too, if the server does not support `mode`.
        """
        is_supported = self.spans and mode in self.pause_modes
        return mode if is_supported else "abort"


@dataclass(frozen=True, kw_only=True)
class WeightGroup:
    """A process group of the trainer, as rank 0, and servers."""

    master_address: str
    master_port: int
    world_size: int
    group_name: str
    backend: str
    """gloo or nccl."""
    timeout_s: float
    """Limit of the wait for all ranks, and of each broadcast."""


@dataclass(eq=False, kw_only=True)
class ServerControl(ABC):
    """One server process: its routes, and its state in this publisher."""

    id: str
    address: str
    pool: Pool
    protocol: ServerProtocol
    unused: Collection[str] = ()
    """Tensors of the model folder that the model does not use."""
    folder: str = ""
    """The folder of its model; "" if the name entry has none."""
    serves_adapters: bool = False
    """Whether it takes adapters of `folder`, and has refused none."""
    adapter: str = ""
    """The adapter that requests must name, which is also the version label; "": none."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Sent with every request: the bearer token."""
    confirmed_version: int | None = None
    """The version that the server confirmed last; None before the first and after a failure."""
    listed_version: str = ""
    """The version in its name entry."""
    report: PublishReport = field(default_factory=lambda: PublishReport(version=-1))
    """Times of its last update."""
    error: str | None = None
    """Why it is quarantined; None if it is not."""
    failures: int = 0
    """Failed updates since the last confirmed one."""
    proven_at: float | None = None
    """Monotonic time at which its weights were proven; None: not yet, or not since they were
    wrong."""
    refuted_versions: list[int] = field(default_factory=list[int])
    """Versions that it confirmed with other weights, once for each time."""
    retry_at: float = 0.0
    """Monotonic time before which no process group includes it."""
    broken: bool = False
    """The server has partial weights, so it must not generate under a version's label."""
    is_paused: bool = False
    """This publisher has paused the server and not continued it yet."""
    flush: bool = True
    """Whether the update during this pause flushes the cache."""
    foreign_pause: Wait | None = None
    """The pause by another client, as a wait in vitals; None: not paused at the last check."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    capabilities: Capabilities | None = None
    _pause_began: float = 0.0
    _pause_ended: float = 0.0

    @property
    def role(self) -> str:
        """The server's name in vitals."""
        return f"llm_server-{self.id}"

    @property
    def status_s(self) -> float:
        """Limit of a request to continue, and of status requests."""
        return max(CONTINUE_S, self.protocol.status_s)

    @property
    def can(self) -> Capabilities:
        """The server's capabilities, which `connect` reads."""
        assert self.capabilities is not None, "connect first"
        return self.capabilities

    # ------------------------------------------------------------ the routes of one kind of server

    @abstractmethod
    async def probe(self) -> Capabilities:
        """Read the server's capabilities.

        A publisher that crashed may have left the server paused.
        """

    @abstractmethod
    async def send_pause(self, mode: str) -> None:
        """Pause in a mode that the server supports, and set `flush`."""

    @abstractmethod
    async def send_continue(self) -> None:
        """Continue the server, whether it is paused or not."""

    @abstractmethod
    async def begin(self, shapes: Shapes) -> None:
        """Begin to send weights in several parts, and mark the server as broken.

        Args:
            shapes: Shapes of all tensors that will be sent.
        """

    @abstractmethod
    async def end(self) -> None:
        """Finish an update that `begin` announced: the weights are complete."""

    @abstractmethod
    async def load_folder(self, folder: Path, version: int) -> None:
        """Load a version from a Hugging Face folder."""

    def takes_adapter(self, config: Mapping[str, object]) -> bool:
        """Return whether `load_adapter` takes an adapter with this adapter_config.json."""
        return self.serves_adapters

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Load a version that is an adapter of `folder`.

        The server is not paused before if it has the capability `names_adapters`.
        """
        await self.load_folder(folder, version)

    @abstractmethod
    async def join_group(self, group: WeightGroup, rank_offset: int) -> None:
        """Join a process group; the server's first rank is `rank_offset`."""

    @abstractmethod
    async def receive(
        self,
        layout: Mapping[str, object],
        group_name: str,
        *,
        is_flat: bool,
        version: int | None,
    ) -> None:
        """Receive some tensors over the group.

        Args:
            layout: `names`, `dtypes` and `shapes` of the tensors.
            group_name: The group.
            is_flat: The tensors are sent as one tensor of bytes.
            version: The version of the weights, with the last tensors; None with all others.
        """

    @abstractmethod
    async def leave_group(self, group_name: str) -> None:
        """Destroy the process group at the server."""

    @abstractmethod
    async def reports_pause(self) -> bool | None:
        """Return whether the server is paused now; None if it does not report that."""

    # ------------------------------------------------------------ before the first update

    async def connect(self, shapes: Shapes) -> Capabilities:
        """Compare the server's model with `shapes`, and read its capabilities.

        Raises:
            RoleError: The server's model has other tensors.
        """
        if self.capabilities is not None:
            return self.capabilities
        if Path(self.folder).is_absolute():
            served = ModelTensors(
                shapes=await asyncio.to_thread(read_shapes, Path(self.folder)),  # {}: elsewhere
                owner=f"{self.address}, which serves {self.folder}",
                unused=self.unused,
            )
            difference = served.difference(shapes)
            if difference:
                raise RoleError(f"the trainer's tensors differ: {difference}")
        self.capabilities = await self.probe()
        logger.info("server probed", server=self.id, **msgspec.to_builtins(self.capabilities))
        return self.capabilities

    # ------------------------------------------------------------ one update

    async def pause(self, mode: str) -> None:
        """Pause in `mode`, or in mode abort if the server does not support `mode`."""
        self._pause_began = time.perf_counter()
        self.is_paused = True
        self.adapter = ""
        await self.send_pause(self.can.pause_mode(mode))
        self._pause_ended = time.perf_counter()

    async def finish(self, version: int) -> None:
        """Close the update, continue the server, and confirm that it reports `version`.

        Raises:
            RoleError: The server reports another version.
        """
        await self.end()
        loaded = time.perf_counter()
        await self.resume()
        continued = time.perf_counter()
        confirmed = await self.version()
        if confirmed != (self.adapter or str(version)):
            raise RoleError(f"{self.address} holds version {confirmed}, not {version}")
        self.confirmed_version = version
        self.error = None
        self.failures = 0
        self.report = PublishReport(
            version=version,
            pause_s=self._pause_ended - self._pause_began,
            load_s=loaded - self._pause_ended,
            continue_s=continued - loaded,
            stall_s=continued - self._pause_ended,
        )

    async def resume(self) -> None:
        """Continue the server; a broken one only if `mark_broken` allows it."""
        with self.time_limit("a continue", self.status_s):
            if self.broken and not await self.mark_broken():
                return
            await self.send_continue()
            self.is_paused = False

    async def mark_broken(self) -> bool:
        """Set the label `UNTRUSTED` of a broken server; return whether it may be continued."""
        if not self.can.relabel:
            return False
        await self.relabel(UNTRUSTED, abort=True)
        return True

    async def relabel(self, version: str, *, abort: bool) -> None:
        """Set the version that the server reports, without new weights."""
        path, body = self.protocol.relabel_request(version, abort=abort)
        await self.request_ok(path, body)

    async def generate(self, request: GenerateRequest) -> ServerAnswer:
        """Return the answer to a request for tokens."""
        named = replace(request, adapter=self.adapter)
        body = msgspec.Raw(self.protocol.encode_request(named))
        path = self.protocol.generate_path
        status, answer = await self.request(path, body, is_slow=True)
        return self.protocol.decode_answer(self.checked(path, status, answer).encode())

    # ------------------------------------------------------------ status

    async def holds(self, version: int, *, verify: bool) -> bool:
        """Return whether the server has confirmed a version.

        Args:
            verify: also compare the version in its name entry, or else the one that it reports.
        """
        if self.confirmed_version != version:
            return False
        if not verify or version_text(self.listed_version) == str(version):
            return True
        return version_text(await self.version()) == str(version)

    async def version(self) -> str | None:
        """Return the version label that the server reports; None if it reports none."""
        with self.time_limit("model info", self.status_s):
            answer = await self.request_ok(self.protocol.version_path)
            version = self.protocol.read_version(answer.encode())
        return None if version is None else str(version)

    async def end_foreign_pause(self, *, resume: bool) -> None:
        """Check for a pause by another client; continue the server or show the pause in vitals.

        The caller holds `lock`, so this publisher is not updating the server. A server that does
        not report pauses is continued by each call, which has no effect unless it is paused.

        Args:
            resume: Continue the server; False only shows the pause.
        """
        with self.time_limit("readiness", self.status_s):
            is_paused = await self.reports_pause()
        if not is_paused:
            self.clear_foreign_pause()
        elif self.foreign_pause is None:
            cause = "by a client that is not this trial's publisher"
            if not resume:
                cause += " (trainer.ppo.publisher.continue_paused=false)"
            self.foreign_pause = Wait(
                event="its continuation",
                owner=PAUSE_OBSERVER,
                on=self.role,
                detail=cause,
            )
            logger.warning(f"server is paused {cause}", server=self.id, continued=resume)
        if resume and is_paused is not False:
            with self.time_limit("a continue", self.status_s):
                await self.send_continue()
        elif self.foreign_pause is not None:
            table.add(self.foreign_pause)

    def clear_foreign_pause(self) -> None:
        """Remove the pause by another client from vitals."""
        if self.foreign_pause is not None:
            table.discard(self.foreign_pause)
            self.foreign_pause = None

    # ------------------------------------------------------------ internals

    def time_limit(self, event: str, seconds: float) -> Wait:
        """Return a wait of at most `seconds` for this server; see `Wait`."""
        return Wait(event=event, owner="publisher", on=self.role, seconds=seconds)

    async def request_ok(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        is_slow: bool = False,
    ) -> str:
        """Send a request that must succeed; return the text of the answer.

        Raises:
            ServerRefusal: The status is not 200.
        """
        status, answer = await self.request(path, body, is_slow=is_slow)
        return self.checked(path, status, answer)

    async def request(
        self,
        path: str,
        body: Mapping[str, object] | msgspec.Raw | None = None,
        *,
        is_slow: bool = False,
    ) -> tuple[int, str]:
        """POST `body`, or GET without one; return status and text of the answer.

        Args:
            is_slow: The server may need long to answer, so `arealite why` does not blame it.
        """
        reply = Wait(
            event=f"an answer of {path}",
            owner="publisher",
            on=self.role,
            replies_soon=not is_slow,
        )
        with reply:
            status, answer = await self.pool.request(self.address + path, self.headers, body)
            return status, answer.decode(errors="replace")

    def checked(self, path: str, status: int, answer: str) -> str:
        """Return an answer with status 200.

        Raises:
            ServerRefusal: The status is another one.
        """
        if status != 200:
            raise ServerRefusal(f"{self.address}{path} answered {status}: {answer[:300]}")
        return answer


def control_of(entry: Mapping[str, Any], **fields: Any) -> ServerControl:
    """Return the control of a server.

    Args:
        entry: Content of the server's entry in the name registry.
        fields: The fields of `ServerControl` that an entry does not tell.
    """
    control_type: type[ServerControl] = part_of_entry("server_control", entry)
    protocol: ServerProtocol = part_of_entry("server_protocol", entry)()
    return control_type(
        address=str(entry["address"]),
        protocol=protocol,
        adapter=adapter_of(entry.get("version")),
        **fields,
    )
