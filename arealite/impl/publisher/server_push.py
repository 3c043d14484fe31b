"""Brings one server to one version over SGLang's protocol: pause, load, continue at once, confirm.

Apart from the publisher, because every trap of the protocol is here and nothing of the run is.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from arealite.base import log
from arealite.base.errors import RoleError
from arealite.system.deadlines import deadline

logger = log.get(__name__)

CONTINUE_S = 5.0
"""For the continue call: time of its own, so that also a load that ran out of it is continued."""
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
    held: int | None = None
    """Version this publisher saw it confirm last; None before the first and after a failure."""
    times: PushTimes = PushTimes(0.0, 0.0, 0.0, 0.0)
    """What the newest version cost, whoever asked for it."""
    error: str | None = None
    """Why it is quarantined; None while it is in traffic."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _greeted: bool = False

    async def bring(self, version: int, folder: Path, *, mode: str, seconds: float) -> None:
        """Load `version` from `folder`; the caller holds `lock`.

        Raises:
            RoleError: it refused, confirmed another version, or took longer than `seconds`.
            aiohttp.ClientError, OSError: it could not be reached.
        """
        self.held = None
        try:
            if not self._greeted:
                await self._greet()
            self.times = await self._push(version, folder, mode=mode, seconds=seconds)
        except FAILURES as error:
            self.error = f"{type(error).__name__}: {error}"
            raise
        self.held, self.error = version, None

    async def _greet(self) -> None:
        """End the pause, or the open weight session, of a publisher that died in between."""
        async with deadline("an answer to a greeting", owner="publisher", seconds=CONTINUE_S):
            await self._demand("/continue_generation", {})
            await self._post("/end_weight_update", {})  # 404 where the server has no sessions
        self._greeted = True

    async def version(self) -> str | None:
        """Ask which version it holds; None where the server does not say."""
        async with (
            deadline("model info", owner="publisher", seconds=CONTINUE_S),
            self.session.get(f"{self.address}/model_info") as response,
        ):
            response.raise_for_status()
            return (await response.json()).get("weight_version")

    async def _push(self, version: int, folder: Path, *, mode: str, seconds: float) -> PushTimes:
        begin = time.perf_counter()
        paused = begin
        try:
            async with deadline(f"version {version}", owner="publisher", seconds=seconds):
                mode = await self._pause(mode)
                paused = time.perf_counter()
                await self._load(version, folder, flush=mode != "in_place")
        finally:
            loaded = time.perf_counter()
            async with deadline("a continue", owner="publisher", seconds=CONTINUE_S):
                await self._demand("/continue_generation", {})
            continued = time.perf_counter()
        confirmed = await self.version()
        if confirmed != str(version):
            raise RoleError(f"{self.address} holds version {confirmed}, not {version}")
        return PushTimes(paused - begin, loaded - paused, continued - loaded, continued - paused)

    async def _pause(self, mode: str) -> str:
        """Pause in `mode`, or by aborting where the server does not know the mode."""
        status, _ = await self._post("/pause_generation", {"mode": mode})
        if status != 200:
            logger.warning("pause refused", server=self.address, mode=mode, status=status)
            mode = "abort"
            await self._demand("/pause_generation", {"mode": mode})
        return mode

    async def _load(self, version: int, folder: Path, *, flush: bool) -> None:
        body = {
            "model_path": str(folder),
            "load_format": "auto",
            "weight_version": str(version),
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        status, text = await self._post("/update_weights_from_disk", body)
        if status == 400 and "not flushed" in text:
            # The weights are new, version and prefix cache old: flush, load again for the version.
            await self._flush()
            status, text = await self._post("/update_weights_from_disk", body)
        self._check("/update_weights_from_disk", status, text)

    async def _flush(self) -> None:
        """Empty the cache while paused; requests in its way are retracted, then aborted."""
        for mode in ("retract", "abort"):
            await self._demand("/pause_generation", {"mode": mode})
            status, _ = await self._post("/flush_cache", {})
            if status == 200:
                return
        raise RoleError(f"{self.address} holds new weights and an old cache, and does not flush it")

    async def _demand(self, path: str, body: dict[str, Any]) -> None:
        self._check(path, *await self._post(path, body))

    def _check(self, path: str, status: int, text: str) -> None:
        if status != 200:
            raise RoleError(f"{self.address}{path} answered {status}: {text[:300]}")

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        async with self.session.post(self.address + path, json=body) as response:
            return response.status, await response.text()
