"""Registry in which the processes of a trial find each other, and their secret.

A name is a small JSON file that heartbeats renew. Files need no service: a laptop, Slurm and Ray
all have a folder that every host can read. The secret of a trial is 32 random bytes in a file that
only its owner can read. The processes of a trial derive their token and their ZeroMQ keys from it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from arealite.api.experiment_config import ExperimentConfig, ServerConfig, name_dir
from arealite.api.hooks import ServerRegistrar
from arealite.base import entries, log
from arealite.base.errors import UserError
from arealite.base.files import folder_time
from arealite.base.folder_checks import check_folder
from arealite.system.health.waits import Wait

logger = log.get(__name__)

POLL_S = 0.1
"""Seconds between two polls of `wait`; no file event works on every file system."""

SECRET_FILE = "secret"
SECRET_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Secret:
    """The secret of one trial."""

    key: bytes = field(repr=False)

    @property
    def token(self) -> str:
        """The bearer token of the trial's HTTP servers."""
        return self.derive("http").hex()

    def derive(self, purpose: str) -> bytes:
        """Return 32 bytes for a purpose; they reveal neither the secret nor bytes derived for
        another purpose."""
        return hmac.digest(self.key, purpose.encode(), "sha256")


def read_secret(folder: Path) -> Secret | None:
    """Return the secret of the trial whose names are in `folder`; None if it has none.

    Raises:
        UserError: the file is not a secret, or other users can read it.
    """
    path = folder / SECRET_FILE
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="ascii") as file:
            status = os.fstat(file.fileno())
            digits = file.read(1024)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the secret {path} cannot be read: {error}. Use another user.") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UserError(
            f"{path} must be yours and of mode 0600. Run chmod 600, then arealite secret --rotate."
        )
    if not re.fullmatch(rf"[0-9a-f]{{{2 * SECRET_BYTES}}}\s*", digits):
        raise UserError(f"{path} is not a secret of {SECRET_BYTES} bytes. Remove it.")
    return Secret(key=bytes.fromhex(digits))


def create_secret(folder: Path) -> Secret:
    """Return the trial's secret; create it if there is none. Processes may call this in parallel.

    Raises:
        UserError: the folder cannot be written.
    """
    return read_secret(folder) or put_secret(folder, os.link)


def put_secret(folder: Path, put: Callable[[str, Path], None]) -> Secret:
    """Write a new secret to a temporary file; `put` (os.link or os.replace) moves it in place."""
    name = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".secret-")  # mode 0600
        with open(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
        with suppress(FileExistsError):  # another process of the trial was faster
            put(name, folder / SECRET_FILE)
    except OSError as error:
        raise UserError(
            f"cannot write the secret in {folder}: {error.strerror}. "
            "Set cluster.name_root to a folder that is writable."
        ) from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)
    secret = read_secret(folder)
    assert secret is not None
    return secret


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One live name."""

    role: str
    id: str
    value: dict[str, Any]
    """Description of the process: address, pid, …"""
    age_s: float
    """Seconds since its last heartbeat."""


class _Reading(NamedTuple):
    """The last reading of a name's file."""

    written: float
    """Modification time of the file, by the clock of its file system."""
    changed: float
    """When this modification time was first seen, by the monotonic clock."""
    at: float
    """When the file was last read, by the monotonic clock."""


@dataclass(eq=False, kw_only=True)
class NameRegistry:
    """The names of one trial. A name that was not renewed for `ttl_s` is dead and is not listed."""

    root: Path
    """The trial's folder."""
    ttl_s: float = 5.0
    heartbeat_s: float = 1.0
    """Seconds between two writes of a name."""
    is_secured: bool = False
    """Whether the trial has a secret."""
    key_env: str = ""
    """Name of the environment variable with the API key of external servers."""
    _readings: dict[Path, _Reading] = field(default_factory=dict[Path, _Reading])

    @classmethod
    def of(
        cls, config: ExperimentConfig | ServerConfig, *, ttl_s: float | None = None
    ) -> NameRegistry:
        """Return the registry of a config's trial."""
        cluster = config.cluster
        return cls(
            root=name_dir(config),
            ttl_s=cluster.ttl_s if ttl_s is None else ttl_s,
            heartbeat_s=cluster.heartbeat_s,
            is_secured=cluster.security,
            key_env=getattr(config.llm_server, "api_key_env", ""),
        )

    @cached_property
    def secret(self) -> Secret | None:
        """The trial's secret, created if there is none yet; None if security is off.

        Raises:
            UserError: the secret cannot be read or written.
        """
        return create_secret(self.root) if self.is_secured else None

    def headers(self, kind: str = "") -> dict[str, str]:
        """Return the HTTP headers that a server of type `kind` requires."""
        token = self.secret.token if self.secret else ""
        if kind == "external":
            token = os.environ.get(self.key_env, "").strip()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def check(self) -> None:
        """Check that the folder of names is writable, and that live processes have the secret.

        Raises:
            UserError: the folder cannot be made or written, or has live names of processes without
                a secret.
        """
        check_folder(self.root, "folder of names", "cluster.name_root")
        if not self.is_secured:
            logger.warning("cluster.security is off: anyone who reaches a port controls the run")
        elif read_secret(self.root) is None:
            self._check_no_process_lacks_secret()

    def _check_no_process_lacks_secret(self) -> None:
        """Check that no process of the trial is live; called if the trial has no secret yet."""
        for role in ("llm_server", "datapipe"):
            for entry in self.list(role):
                if entry.value.get("type") != "external":
                    raise UserError(
                        f"{role} {entry.id} in {self.root} runs without a secret: "
                        "it has cluster.security=off. Stop it, or set trial_name."
                    )

    def put(
        self,
        role: str,
        entry_id: str,
        value: Mapping[str, object],
    ) -> None:
        """Write or renew a name, atomically.

        Raises:
            UserError: the folder cannot be written.
        """
        folder = self.root / role
        name = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=folder, prefix=f".{entry_id}-")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(value, file)
            os.replace(name, folder / f"{entry_id}.json")
        except OSError as error:
            with suppress(OSError):
                os.unlink(name)  # else each heartbeat would leave a temporary file
            raise UserError(
                f"Cannot write the name '{role}/{entry_id}' below {self.root}: {error.strerror}. "
                "Set cluster.name_root to a folder that every role can write."
            ) from error

    def remove(self, role: str, entry_id: str) -> None:
        """Remove a name. Does nothing if there is no such name."""
        with suppress(OSError):
            (self.root / role / f"{entry_id}.json").unlink()

    def list(self, role: str) -> list[Entry]:
        """Return the live names of a role, sorted by id."""
        entries: list[Entry] = []
        folder_now = cache(partial(folder_time, self.root / role))
        for path in sorted((self.root / role).glob("*.json")):
            try:
                with path.open(encoding="utf-8") as file:
                    written = os.fstat(file.fileno()).st_mtime
                    value = json.load(file)
            except (OSError, ValueError):
                continue  # removed in the meantime, or a foreign file
            age_s = self._age(path, written, folder_now)
            if age_s > self.ttl_s or not isinstance(value, dict):
                continue
            entry = Entry(
                role=role,
                id=path.stem,
                value=cast(dict[str, object], value),
                age_s=age_s,
            )
            entries.append(entry)
        return entries

    def _age(
        self,
        path: Path,
        written: float,
        folder_now: Callable[[], float],
    ) -> float:
        """Return the seconds since a file was written, without the time of day of a host.

        If the file has changed since a recent reading, its age is 0. If the last reading is older
        than `ttl_s`, the age is computed by the folder's clock.
        """
        now = time.monotonic()
        last = self._readings.get(path)
        if last is not None and last.written == written:
            changed = last.changed
        elif last is not None and now - last.at <= self.ttl_s:
            changed = now
        else:
            changed = now - max(0.0, folder_now() - written)
        self._readings[path] = _Reading(written=written, changed=changed, at=now)
        return now - changed

    def address(self, role: str) -> str | None:
        """Return the address of the first live name of a role; None if there is no live name."""
        entries = self.list(role)
        return str(entries[0].value["address"]) if entries else None

    @asynccontextmanager
    async def registered(
        self,
        role: str,
        entry_id: str,
        value: Callable[[], Mapping[str, object] | None],
        *,
        changed: asyncio.Event | None = None,
    ) -> AsyncGenerator[None, None]:
        """Write a name, renew it during the body, and remove it at the end.

        Args:
            role: The role of the process.
            entry_id: Unique among the names of the role.
            value: Returns the content of the name. If it returns None, the name is not renewed and
                dies after `ttl_s`.
            changed: When this event is set, the name is written at once.

        Raises:
            UserError: the folder cannot be written.
        """
        is_stopping = False
        wake = changed or asyncio.Event()

        async def put() -> None:
            description = value()
            if description is not None:
                await asyncio.to_thread(self.put, role, entry_id, description)

        async def beat() -> None:
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(wake.wait(), self.heartbeat_s)
                wake.clear()
                if is_stopping:
                    return
                try:
                    await put()
                except UserError as error:  # a full disk may get space again
                    logger.warning(
                        "heartbeat failed",
                        role=role,
                        id=entry_id,
                        error=str(error),
                    )

        first = asyncio.ensure_future(put())
        beating = asyncio.create_task(beat(), name=f"heartbeat of {role}/{entry_id}")
        try:
            await asyncio.shield(first)
            yield
        finally:
            is_stopping = True
            wake.set()  # no cancel: a write in a thread would continue and undo the removal
            await asyncio.gather(first, beating, return_exceptions=True)
            await asyncio.to_thread(self.remove, role, entry_id)

    async def wait(
        self,
        role: str,
        *,
        count: int = 1,
        seconds: float,
        owner: str,
    ) -> list[Entry]:
        """Wait until at least `count` live names of a role exist, and return them.

        Args:
            role: The role.
            count: The number of names.
            seconds: The deadline.
            owner: The role that waits.

        Raises:
            DeadlineError: they did not appear in time.
        """
        with Wait(
            event=f"{count} live '{role}' in {self.root}", owner=owner, on=role, seconds=seconds
        ):
            while True:  # files have no event
                entries = await asyncio.to_thread(self.list, role)
                if len(entries) >= count:
                    return entries
                await asyncio.sleep(POLL_S)


async def with_externals(
    config: ExperimentConfig, work: Coroutine[object, object, None], *, updates: bool = True
) -> None:
    """Await `work`; meanwhile keep the name entries of the external servers up to date."""
    registrars: list[ServerRegistrar] = entries.hooks("server_registrar")
    upkeeps = [registrar(config, updates=updates) for registrar in registrars]
    upkeeps = [upkeep for upkeep in upkeeps if upkeep is not None]
    if not upkeeps:
        await work
        return
    async with asyncio.TaskGroup() as tasks:
        externals = [tasks.create_task(upkeep, name="external servers") for upkeep in upkeeps]
        await work
        for external in externals:
            external.cancel()
