"""Controls one server through SGLang's protocol: pause, update weights, continue, confirm.

Every special case of the protocol is here. The module does not depend on the run.
"""

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from arealite.api.llm_server import UNTRUSTED
from arealite.api.publisher import PublishReport
from arealite.base import log
from arealite.base.errors import RoleError
from arealite.base.model_folder import ModelTensors, Shapes, read_shapes
from arealite.impl.http_client import Pool
from arealite.impl.publisher.capabilities import Capabilities
from arealite.system.health.waits import PAUSE_OBSERVER, Wait, table

logger = log.get(__name__)

CONTINUE_S = 5.0
"""Limit of a continue request and of status requests. It does not count towards `timeout_s`: a
server whose update timed out is still continued."""
ONE_TOKEN = {
    "input_ids": [1],
    "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
}
"""Request for a generation of one token."""


class ServerRefusal(RoleError):
    """A live server answered with a status other than 200."""


FAILURES = (OSError, RoleError, ValueError)
"""Errors of one server; each quarantines the server."""


@dataclass(eq=False, kw_only=True)
class ServerControl:
    """One server process: its routes, and its state in this publisher."""

    id: str
    address: str
    pool: Pool
    folder: str = ""
    """The folder of its model; "" if the name entry has none."""
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
    retry_at: float = 0.0
    """Monotonic time before which no process group includes it."""
    broken: bool = False
    """The server has partial weights, so it must not generate under a version's label."""
    is_open: bool = False
    """A weight-update session is open."""
    is_paused: bool = False
    """This publisher has paused the server and not continued it yet."""
    flush: bool = True
    """Whether the update during this pause flushes the cache."""
    foreign_pause: Wait | None = None
    """The pause by another client, as a wait in vitals; None: not paused at the last check."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    capabilities: Capabilities | None = None
    _session_reset: bool = False
    _pause_began: float = 0.0
    _pause_ended: float = 0.0

    @property
    def role(self) -> str:
        """The server's name in vitals."""
        return f"llm_server-{self.id}"

    @property
    def can(self) -> Capabilities:
        """The server's capabilities, which `connect` reads."""
        assert self.capabilities is not None, "connect first"
        return self.capabilities

    # ------------------------------------------------------------ before the first update

    async def connect(self, shapes: Shapes, unused: Collection[str] = ()) -> Capabilities:
        """Continue the server, read its capabilities, and compare its model with `shapes`.

        A publisher that crashed may have left the server paused.

        Raises:
            RoleError: The server's model has other tensors.
        """
        if self.capabilities is not None:
            return self.capabilities
        if Path(self.folder).is_absolute():
            served = ModelTensors(
                shapes=await asyncio.to_thread(read_shapes, Path(self.folder)),  # {}: elsewhere
                owner=f"{self.address}, which serves {self.folder}",
                unused=unused,
            )
            difference = served.difference(shapes)
            if difference:
                raise RoleError(f"the trainer's tensors differ: {difference}")
        with self.time_limit("the answer to a continue", CONTINUE_S):
            await self.request_ok("/continue_generation", {})
        spec_answer = await self.request("/openapi.json")
        info_answer = await self.request("/server_info")
        output_answer = await self.request("/generate", ONE_TOKEN)
        output = _json_if_ok(output_answer)
        self.capabilities = Capabilities.read(
            spec=_json_if_ok(spec_answer),
            info=_json_if_ok(info_answer),
            meta=output.get("meta_info", {}),
        )
        logger.info("server probed", server=self.id, **msgspec.to_builtins(self.capabilities))
        return self.capabilities

    # ------------------------------------------------------------ one update

    async def pause(self, mode: str) -> None:
        """Pause in `mode`, or in mode abort if the server does not support `mode`."""
        self._pause_began = time.perf_counter()
        self.is_paused = True
        supported_mode = self.can.pause_mode(mode)
        status, answer = await self.request("/pause_generation", {"mode": supported_mode})
        if status != 200 and supported_mode != "abort":
            logger.warning("pause refused", server=self.id, mode=mode, status=status)
            supported_mode = "abort"
            status, answer = await self.request("/pause_generation", {"mode": supported_mode})
        self._check("/pause_generation", status, answer)
        if self.can.sessions and not self._session_reset:
            # Close a session that a crashed publisher left open. The call blocks unless paused.
            await self.request("/end_weight_update", {})
        self._session_reset = True
        self.flush = supported_mode != "in_place"
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
        if confirmed != str(version):
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

    async def begin(self) -> None:
        """Open a weight-update session if the server supports them; mark the server as broken."""
        if self.can.sessions and not self.is_open:
            status, _ = await self.request("/begin_weight_update", {})
            if status != 200:  # a session is open: the answer to its end was lost
                await self.request("/end_weight_update", {})
                await self.request_ok("/begin_weight_update", {})
            self.is_open = True
        self.broken = True

    async def end(self) -> None:
        """Close the session: the weights are complete."""
        if self.is_open:
            self.is_open = False
            await self.request_ok("/end_weight_update", {})
        self.broken = False

    async def update(self, path: str, body: Mapping[str, object], *, version: int | None) -> None:
        """Post new weights or a part of them.

        Args:
            path: The route.
            body: Describes the weights.
            version: Their version, with the last part; None with every other part.
        """
        label = None if version is None else str(version)
        body = {
            **body,
            "weight_version": label,
            "flush_cache": self.flush and version is not None,
            "abort_all_requests": False,
        }
        status, answer = await self.request(path, body)
        if status == 400 and "not flushed" in answer:
            # The server has new weights with the old version and prefix cache.
            await self._flush()
            if self.can.relabel and version is not None:
                await self.relabel(str(version), abort=False)
                return
            status, answer = await self.request(path, body)
        self._check(path, status, answer)

    async def resume(self) -> None:
        """Continue the server.

        A broken server is labelled `UNTRUSTED` first. It stays paused if it has no route for that.
        """
        with self.time_limit("a continue", CONTINUE_S):
            if self.broken:
                if not self.can.relabel:
                    return
                if self.is_open:
                    self.is_open = False
                    await self.request("/end_weight_update", {})
                await self.relabel(UNTRUSTED, abort=True)
            await self.request_ok("/continue_generation", {})
            self.is_paused = False

    async def relabel(self, version: str, *, abort: bool) -> None:
        """Set the version that the server reports, without new weights."""
        body = {
            "new_version": version,
            "abort_all_requests": abort,
        }
        await self.request_ok("/update_weight_version", body)

    # ------------------------------------------------------------ status

    async def holds(self, version: int, *, verify: bool) -> bool:
        """Return whether the server has confirmed a version.

        Args:
            verify: also compare the version in its name entry, or else the one that it reports.
        """
        if self.confirmed_version != version:
            return False
        if not verify or self.listed_version == str(version):
            return True
        return await self.version() == str(version)

    async def version(self) -> str | None:
        """Return the version that the server reports; None if it reports none."""
        with self.time_limit("model info", CONTINUE_S):
            answer = await self.request_ok("/model_info")
            return msgspec.json.decode(answer).get("weight_version")

    async def end_foreign_pause(self, *, resume: bool) -> None:
        """Check for a pause by another client; continue the server or show the pause in vitals.

        The caller holds `lock`, so this publisher is not updating the server. SGLang 0.5.9 has no
        /ready: each call continues it, which has no effect unless it is paused.

        Args:
            resume: Continue the server; False only shows the pause.
        """
        with self.time_limit("readiness", CONTINUE_S):
            status, _ = await self.request("/ready")
        if status != 503:
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
        if resume and status != 200:
            with self.time_limit("a continue", CONTINUE_S):
                await self.request_ok("/continue_generation", {})
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

    async def _flush(self) -> None:
        """Empty the cache while paused: retract running requests, or else abort them."""
        for mode in ("retract", "abort"):
            await self.request_ok("/pause_generation", {"mode": mode})
            status, _ = await self.request("/flush_cache", {})
            if status == 200:
                return
        raise RoleError(f"{self.address} has new weights, but does not flush its old cache")

    async def request_ok(self, path: str, body: Mapping[str, object] | None = None) -> str:
        """Send a request that must succeed; return the text of the answer.

        Raises:
            ServerRefusal: The status is not 200.
        """
        return self._check(path, *await self.request(path, body))

    async def request(self, path: str, body: Mapping[str, object] | None = None) -> tuple[int, str]:
        """POST `body`, or GET without one; return status and text of the answer."""
        reply = Wait(
            event=f"an answer of {path}",
            owner="publisher",
            on=self.role,
            replies_soon="weights" not in path and path != "/generate",
        )
        with reply:
            status, answer = await self.pool.request(self.address + path, self.headers, body)
            return status, answer.decode(errors="replace")

    def _check(self, path: str, status: int, answer: str) -> str:
        """Return an answer with status 200.

        Raises:
            ServerRefusal: The status is another one.
        """
        if status != 200:
            raise ServerRefusal(f"{self.address}{path} answered {status}: {answer[:300]}")
        return answer


def _json_if_ok(reply: tuple[int, str]) -> dict[str, Any]:
    """Return the JSON of a reply (status, answer) with status 200; {} for another status."""
    status, answer = reply
    return msgspec.json.decode(answer) if status == 200 else {}
