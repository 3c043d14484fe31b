"""Speaks SGLang's protocol with one server: pause, change its weights, continue, confirm.

Apart from the publishers, because every trap of the protocol is here and nothing of the run is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from arealite.api.llm_server import UNTRUSTED
from arealite.base import log
from arealite.base.errors import RoleError
from arealite.base.model_folder import read_shapes
from arealite.impl.publisher.capabilities import Capabilities
from arealite.impl.publisher.shapes import Shapes, check_shapes
from arealite.system.health.waits import PAUSER, Wait, table

logger = log.get(__name__)

CONTINUE_S = 5.0
"""For the continue call: time of its own, so that also a load that ran out of it is continued."""


class Refused(RoleError):
    """A server answered, but not 200: it lives."""


FAILURES = (aiohttp.ClientError, OSError, TimeoutError, RoleError, ValueError)
"""What a server may do to us; each quarantines it."""


@dataclass(frozen=True)
class PushTimes:
    """Seconds one server took."""

    pause_s: float
    load_s: float
    continue_s: float
    stall_s: float


@dataclass(eq=False)
class Server:
    """One incarnation of a server, and which version it holds as far as this publisher knows."""

    id: str
    address: str
    session: aiohttp.ClientSession
    folder: str = ""
    """Where its model came from, if it says so."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Of every request: the token that the server asks for."""
    held: int | None = None
    """Version this publisher saw it confirm last; None before the first and after a failure."""
    listed: str = ""
    """Version that its name says."""
    times: PushTimes = PushTimes(0.0, 0.0, 0.0, 0.0)
    """What the newest version cost, whoever asked for it."""
    error: str | None = None
    """Why it is quarantined; None while it is in traffic."""
    broken: bool = False
    """Only a part of a version has come: it must not generate under a version's name."""
    is_open: bool = False
    """In a weight-update session."""
    foreign_pause: Wait | None = None
    """The pause by another client, as a wait in vitals; None: none was seen when last asked."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    known: Capabilities | None = None
    _greeted: bool = False

    @property
    def role(self) -> str:
        """Its name in vitals."""
        return f"llm_server-{self.id}"

    @property
    def can(self) -> Capabilities:
        """What it can do; after `connect`."""
        assert self.known is not None, "connect first"
        return self.known

    # ------------------------------------------------------------ before the first update

    async def connect(self, shapes: Shapes) -> Capabilities:
        """Free it from what a dead publisher left, learn what it can do, compare its model.

        Raises:
            RoleError: it holds another model than `shapes`.
        """
        if self.known is not None:
            return self.known
        if Path(self.folder).is_absolute():
            held = await asyncio.to_thread(read_shapes, Path(self.folder))  # {} if it is elsewhere
            check_shapes(shapes, held, where=f"{self.address}, which serves {self.folder}")
        with self.bounded("an answer to a greeting", CONTINUE_S):
            await self.demand("/continue_generation", {})  # so that it can generate
        spec, info = await self._get("/openapi.json"), await self._get("/server_info")
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        status, text = await self.post("/generate", body)
        meta = msgspec.json.decode(text)["meta_info"] if status == 200 else {}
        self.known = Capabilities.read(spec, info, meta)
        logger.info("server probed", server=self.id, **msgspec.to_builtins(self.known))
        return self.known

    # ------------------------------------------------------------ one update

    async def bring(
        self,
        version: int,
        load: Callable[[Server, bool], Awaitable[None]],
        *,
        mode: str,
        seconds: float,
    ) -> None:
        """Pause, await `load(self, flush)`, continue and confirm; the caller holds `lock`.

        Raises:
            RoleError: it refused, confirmed another version, or took longer than `seconds`.
            aiohttp.ClientError, OSError: it could not be reached.
        """
        begin = paused = time.perf_counter()
        try:
            with self.bounded(f"version {version}", seconds):
                flush = await self.pause(mode)
                paused = time.perf_counter()
                await load(self, flush)
        finally:
            loaded = time.perf_counter()
            await self.resume()
        await self.confirm(version, (begin, paused, loaded, time.perf_counter()))

    async def confirm(self, version: int, moments: tuple[float, float, float, float]) -> None:
        """Ask whether it holds `version` now; note when it began, paused, loaded and continued."""
        begin, paused, loaded, continued = moments
        confirmed = await self.version()
        if confirmed != str(version):
            raise RoleError(f"{self.address} holds version {confirmed}, not {version}")
        self.held, self.error = version, None
        self.times = PushTimes(
            paused - begin, loaded - paused, continued - loaded, continued - paused
        )

    async def pause(self, mode: str) -> bool:
        """Pause in `mode`, or by aborting; return whether an update can flush the cache."""
        known = self.can.pause_mode(mode)
        status, text = await self.post("/pause_generation", {"mode": known})
        if status != 200 and known != "abort":
            logger.warning("pause refused", server=self.id, mode=mode, status=status)
            known = "abort"
            status, text = await self.post("/pause_generation", {"mode": known})
        self._check("/pause_generation", status, text)
        if self.can.sessions and not self._greeted:
            await self.post("/end_weight_update", {})  # of a dead publisher; waits while not paused
        self._greeted = True
        return known != "in_place"

    async def begin(self) -> None:
        """Open a weight-update session, where there are any; from here on it is broken."""
        if self.can.sessions and not self.is_open:
            status, _ = await self.post("/begin_weight_update", {})
            if status != 200:  # one is open whose end was not heard
                await self.post("/end_weight_update", {})
                await self.demand("/begin_weight_update", {})
            self.is_open = True
        self.broken = True

    async def end(self) -> None:
        """Close the session: the weights are whole."""
        if self.is_open:
            self.is_open = False
            await self.demand("/end_weight_update", {})
        self.broken = False

    async def update(
        self, path: str, body: dict[str, Any], *, version: int | None, flush: bool
    ) -> None:
        """Send new weights, or a part of them; `version` comes with the last part."""
        label = None if version is None else str(version)
        body = body | {"weight_version": label, "flush_cache": flush, "abort_all_requests": False}
        status, text = await self.post(path, body)
        if status == 400 and "not flushed" in text:
            # The weights are new, version and prefix cache old.
            await self._flush()
            if self.can.relabel and version is not None:
                await self.relabel(str(version), abort=False)
                return
            status, text = await self.post(path, body)
        self._check(path, status, text)

    async def resume(self) -> None:
        """Continue; a broken server loses its version first, and stays paused if it cannot."""
        with self.bounded("a continue", CONTINUE_S):
            if self.broken:
                if not self.can.relabel:
                    return
                if self.is_open:
                    self.is_open = False
                    await self.post("/end_weight_update", {})
                await self.relabel(UNTRUSTED, abort=True)
            await self.demand("/continue_generation", {})

    async def relabel(self, version: str, *, abort: bool) -> None:
        """Change its version, not its weights."""
        body = {"new_version": version, "abort_all_requests": abort}
        await self.demand("/update_weight_version", body)

    # ------------------------------------------------------------ questions

    async def holds(self, version: int, *, ask: bool) -> bool:
        """Return whether it confirmed a version; `ask`: and its name or its answer says so now."""
        if self.held != version or not ask:
            return self.held == version
        return self.listed == str(version) or await self.version() == str(version)

    async def version(self) -> str | None:
        """Ask which version it holds; None where the server does not say."""
        with self.bounded("model info", CONTINUE_S):
            return (await self._get("/model_info", needed=True)).get("weight_version")

    async def end_foreign_pause(self, *, resume: bool) -> None:
        """Look for a pause by another client. Continue the server, or show the pause in vitals.

        The caller holds `lock`, so no update of this trial is under way. SGLang 0.5.9 has no
        /ready: it is continued at each call, which has no effect unless it is paused.

        Args:
            resume: Whether to continue the server.
        """
        get = self.session.get(url := self.address + "/ready", headers=self.headers)
        with self.bounded(url, CONTINUE_S):
            async with get as response:
                status = response.status
        if status != 503:
            self.forget_pause()
        elif self.foreign_pause is None:
            why = "by a client that is not this trial's publisher"
            why += "" if resume else " (trainer.ppo.publisher.continue_paused=false)"
            self.foreign_pause = Wait("its continuation", owner=PAUSER, on=self.role, detail=why)
            logger.warning("server is paused " + why, server=self.id, continued=resume)
        if resume and status != 200:
            with self.bounded("a continue", CONTINUE_S):
                await self.demand("/continue_generation", {})
        elif self.foreign_pause is not None:
            table.add(self.foreign_pause)

    def forget_pause(self) -> None:
        """Remove the pause by another client from vitals."""
        if self.foreign_pause is not None:
            table.discard(self.foreign_pause)
            self.foreign_pause = None

    # ------------------------------------------------------------ inside

    def bounded(self, what: str, seconds: float) -> Wait:
        """Bound a wait for this server; see `Wait`."""
        return Wait(what, owner="publisher", on=self.role, seconds=seconds)

    async def _flush(self) -> None:
        """Empty the cache while paused; requests in its way are retracted, then aborted."""
        for mode in ("retract", "abort"):
            await self.demand("/pause_generation", {"mode": mode})
            status, _ = await self.post("/flush_cache", {})
            if status == 200:
                return
        raise RoleError(f"{self.address} holds new weights and an old cache, and does not flush it")

    async def demand(self, path: str, body: dict[str, Any]) -> None:
        """Post; Refused: it did not answer 200."""
        self._check(path, *await self.post(path, body))

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """Return status and text of the answer."""
        prompt = "weights" not in path and path != "/generate"
        with Wait(f"an answer of {path}", owner="publisher", on=self.role, prompt=prompt):
            url, headers = self.address + path, self.headers
            async with self.session.post(url, json=body, headers=headers) as response:
                return response.status, await response.text()

    async def _get(self, path: str, *, needed: bool = False) -> dict[str, Any]:
        with Wait(f"an answer of {path}", owner="publisher", on=self.role, prompt=True):
            response = await self.session.get(self.address + path, headers=self.headers)
        async with response:
            if needed:
                response.raise_for_status()
            return msgspec.json.decode(await response.read()) if response.status == 200 else {}

    def _check(self, path: str, status: int, text: str) -> None:
        if status != 200:
            raise Refused(f"{self.address}{path} answered {status}: {text[:300]}")
