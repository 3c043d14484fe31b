"""Registers external servers: servers that AReaLite did not start.

The servers do not register themselves. The datapipe's process polls each server and writes its
name while it replies; it never stops a server. Two trials that publish to one server would
overwrite each other's weights, so `examine` refuses a server that has a live name in another trial.
Trials with another `cluster.name_root` are not found: use a server in one trial only.
"""

import asyncio
import glob
import math
import os
import re
from collections.abc import Coroutine, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.llm_server import UNTRUSTED
from arealite.api.server_protocol import (
    Json,
    Load,
    ServerDescription,
    ServerProtocol,
    part_of_entry,
)
from arealite.base import entries, log, model_folder
from arealite.base.errors import DeadlineError, RoleError, UserError
from arealite.base.model_folder import read_json, vocab_size
from arealite.ext.server_processes.follow import (
    adapters_entry,
    describe,
    follow,
    json_object,
)
from arealite.impl.http_client import Pool
from arealite.system.health.waits import Wait
from arealite.system.names.name_registry import Entry, NameRegistry

logger = log.get(__name__)

ANSWER_S = 10.0
"""Time limit of a request; a loaded server may need seconds."""
DESCRIBE_S = 60.0
"""Time limit of a request for facts, if the kind of the server is known. vLLM collects facts about
its machine first, which took 19 s on a loaded machine."""
SILENT = (OSError, RoleError)


class ExternalServers:
    """Writes the names of the servers in `llm_server.addresses` while `run` runs."""

    def __init__(self, config: ExperimentConfig, *, updates: bool = True) -> None:
        self.updates = updates
        """False: the run does not publish to the servers and does not change their version."""
        self.addresses = config.llm_server.addresses
        self.registry = NameRegistry.of(config)
        self.headers = self.registry.headers("external")
        self.model = read_json(config.model.path)
        self.pool = Pool(ANSWER_S)
        self._pid_of_address: dict[str, str] = {}
        """Process id last seen at each address."""

    async def run(self) -> None:
        """Register every server until cancelled."""
        with closing(self.pool):
            async with asyncio.TaskGroup() as tasks:
                for address in self.addresses:
                    tasks.create_task(self._register(address), name=f"external server {address}")

    async def _register(self, address: str) -> None:
        """Write a server's name while the server replies. Waits for: the server, and the clock."""
        last_error = None
        num_silences = 0
        while True:
            try:
                entry = await self.describe(address)
                entry["pid"] = entry["pid"] or f"seen {num_silences}"
                await self._check(address, entry)
            except (*SILENT, UserError) as error:
                if str(error) != last_error:  # log an error once, not every second
                    last_error = str(error)
                    logger.warning(
                        "external server not in use",
                        address=address,
                        error=last_error,
                    )
                await asyncio.sleep(self.registry.heartbeat_s)
                continue
            changed = asyncio.Event()
            registered = self.registry.registered(
                "llm_server",
                entry_id(address),
                entry.copy,
                changed=changed,
            )
            async with registered:
                logger.info("external server in use", address=address, version=entry["version"])
                last_error = await self._until_silent(entry, changed)
            num_silences += 1
            logger.warning("external server lost", address=address, error=last_error)

    async def _check(self, address: str, entry: dict[str, Any]) -> None:
        """Check a server's model, and mark its weights as untrusted if it is new to this run.

        The same version number of an earlier run means other weights.
        """
        difference = other_model(entry, self.model)
        if difference:
            raise UserError(difference)
        if not entry["architectures"] and not read_json(entry["model_path"]):
            logger.warning(
                "the server's model was not compared: its folder cannot be read here",
                address=address,
                folder=entry["model_path"],
            )
        entry["vocab_size"] = vocab_size(self.model)
        if not self.updates or self._pid_of_address.get(address) == entry["pid"]:
            return
        protocol: ServerProtocol = part_of_entry("server_protocol", entry)()
        path, body = protocol.relabel_request(UNTRUSTED, abort=False)
        url = entry["address"] + path
        with bounded(url, ANSWER_S):
            status, _ = await self.pool.request(url, self.headers, body)
        if status == 200:
            entry["version"] = UNTRUSTED
        elif status != 404:  # a server without this route keeps its version
            raise RoleError(f"{url} answered {status}, so its version cannot be marked as unknown")
        self._pid_of_address[address] = entry["pid"]

    async def _until_silent(self, entry: dict[str, Any], changed: asyncio.Event) -> str:
        """Update version and load of a registered server; return the error that ended it."""
        protocol: ServerProtocol = part_of_entry("server_protocol", entry)()
        url = entry["address"]
        heartbeat_s = self.registry.heartbeat_s

        async def version() -> str | int | None:
            while True:
                wait_s = max(self.registry.ttl_s, protocol.status_s)
                try:
                    raw = await self._get(url + protocol.version_path, wait_s)
                except DeadlineError:
                    health_url = protocol.health_path and url + protocol.health_path
                    if health_url and await self._get(health_url, self.registry.ttl_s) is not None:
                        continue  # it is busy
                    raise
                if raw is None:
                    raise RoleError(f"{url}{protocol.version_path} answered an error")
                return protocol.read_version(raw)

        async def load() -> Load | None:
            with suppress(*SILENT, UserError, msgspec.MsgspecError):
                raw = await self._get(url + protocol.load_path, heartbeat_s)
                return protocol.read_load(raw or b"{}")

        try:
            await follow(
                entry,
                changed,
                version,
                load,
                heartbeat_s=heartbeat_s,
            )
        except (*SILENT, UserError, msgspec.MsgspecError) as error:
            return str(error) or repr(error)

    async def describe(self, address: str) -> dict[str, Any]:
        """Return the content of a server's name, without the size of its vocabulary.

        Raises:
            UserError: the server is of no known kind, cannot be used, or requires another key.
            DeadlineError, OSError: the server does not reply.
        """
        for name in [*entries.own("server_protocol"), *entries.installed("server_protocol")]:
            entry: dict[str, Any] = {
                "address": f"http://{address}",
                "type": "external",
                "protocol": name,
            }
            description = await self._description(entry)
            if description is not None:
                return {
                    **entry,
                    "model_path": description.model_path,
                    "model_type": description.model_type,
                    "architectures": description.architectures,
                    "context_length": description.context_length,
                    "dtype": description.dtype,
                    **adapters_entry(description),
                    "version": description.version,
                    "host": address.rpartition(":")[0],
                    "pid": description.start_id,
                }
        raise UserError("it is no server of a kind that is known here. Correct the address.")

    async def _description(self, entry: dict[str, Any]) -> ServerDescription | None:
        """Return what a server says of itself; None if it is not of the kind in its entry."""
        protocol: ServerProtocol = part_of_entry("server_protocol", entry)()
        first_path, *_ = protocol.describe_paths

        async def get(path: str) -> Json:
            wait_s = ANSWER_S if path == first_path else DESCRIBE_S
            return json_object(await self._get(entry["address"] + path, wait_s))

        return await describe(protocol, get)

    async def _get(self, url: str, wait_s: float) -> bytes | None:
        """Return the answer at `url`; None if the status is not 200.

        Raises:
            UserError: the server requires another key.
            DeadlineError: the server does not reply within `wait_s`.
        """
        with bounded(url, wait_s):
            status, raw = await self.pool.request(url, self.headers)
        if status in (401, 403):
            raise UserError(
                "the server requires another key. "
                "Set llm_server.api_key_env to the environment variable with its key."
            )
        return raw if status == 200 else None


def examine(config: ExperimentConfig, model: dict[str, Any]) -> list[Entry]:
    """Check every external server; return the names that they will have. Hook `server_finder`.

    Args:
        config: Experiment of the run.
        model: The trainer's config.json.

    Raises:
        UserError: a server cannot be used; the error has a line for each such server.
    """
    addresses = config.llm_server.addresses
    if not addresses:
        return []
    for address in addresses:
        check_form(address, addresses)
    key_variable = config.llm_server.api_key_env
    if key_variable and not os.environ.get(key_variable, "").strip():
        raise UserError(
            f"the environment has no {key_variable}, which llm_server.api_key_env names. "
            "Set it, or set llm_server.api_key_env= for servers without a key."
        )
    return asyncio.run(_examine(config, model))


def keep_registered(
    config: ExperimentConfig, *, updates: bool
) -> Coroutine[object, object, None] | None:
    """Return what keeps the names of the external servers up to date. Hook `server_registrar`.

    Args:
        config: The experiment.
        updates: Whether the run publishes weights to the servers.

    Returns:
        The coroutine; None without servers.
    """
    if not config.llm_server.addresses:
        return None
    return ExternalServers(config, updates=updates).run()


async def _examine(config: ExperimentConfig, model: dict[str, Any]) -> list[Entry]:
    addresses = config.llm_server.addresses
    servers = ExternalServers(config)
    with closing(servers.pool):
        requests = (servers.describe(address) for address in addresses)
        answers = await asyncio.gather(*requests, return_exceptions=True)
    problems: list[str] = []
    entries: list[Entry] = []
    for address, answer in zip(addresses, answers, strict=True):
        problem = _unusable_reason(config, model, address, answer)
        if problem:
            problems.append(f"llm_server.addresses: {address}: {problem}")
        elif isinstance(answer, BaseException):
            raise answer
        else:
            answer["vocab_size"] = vocab_size(model)
            entry = Entry(
                role="llm_server",
                id=entry_id(address),
                value=answer,
                age_s=0.0,
            )
            entries.append(entry)
    if problems:
        raise UserError("\n".join(problems))
    return entries


def _unusable_reason(
    config: ExperimentConfig,
    model: dict[str, Any],
    address: str,
    answer: dict[str, Any] | BaseException,
) -> str | None:
    """Return an error if the run cannot use a server; None if it can, or for an unexpected error.

    Args:
        config: Experiment of the run.
        model: The trainer's config.json.
        address: Address of the server.
        answer: Description of the server, or the error of the request for it.
    """
    if isinstance(answer, UserError):
        return str(answer)
    if isinstance(answer, RoleError):
        return f"the server did not answer: {answer}. Start it, or correct the address."
    if isinstance(answer, SILENT):
        return f"the server cannot be reached: {answer}. Start it, or correct the address."
    if isinstance(answer, BaseException):
        return None
    return other_model(answer, model) or taken(config, address)


def check_form(address: str, addresses: Sequence[str]) -> None:
    """Check that an address is host:port and is given only once.

    Raises:
        UserError: it is not.
    """
    host = r"\[[0-9a-fA-F:.]+\]|[\w.-]+"
    match = re.fullmatch(rf"(?:{host}):(\d{{1,5}})", address)
    if match is None or not 0 < int(match[1]) < 2**16:
        raise UserError(
            f"llm_server.addresses: {address!r} is not host:port, as in 10.0.0.7:30000."
        )
    if [entry_id(other) for other in addresses].count(entry_id(address)) > 1:
        raise UserError(f"llm_server.addresses: {address} is given twice. Give it once.")


def taken(config: ExperimentConfig, address: str) -> str | None:
    """Return an error if another trial has a live name for this server; else None."""
    names = NameRegistry.of(config)
    for root, entry in _live_everywhere(names, entry_id(address)):
        if root != names.root or entry.value.get("type") != "external":
            trial = "/".join(root.parts[-2:])
            return f"{trial} uses this server already. Remove the address, or end that trial."
    return None


def entry_id(address: str) -> str:
    """Return the name under which the server at `address` is registered."""
    return address.replace("localhost", "127.0.0.1").replace(":", "-")


def bounded(url: str, seconds: float) -> Wait:
    """Return a wait for the reply to a request of `url`."""
    _, _, address, *_ = url.split("/")
    return Wait(
        event=f"an answer of {url}",
        owner="external servers",
        on=f"llm_server-{entry_id(address)}",
        seconds=seconds,
        replies_soon=True,
    )


def other_model(entry: dict[str, Any], model: dict[str, Any]) -> str | None:
    """Return an error if a server's model differs from the trainer's; else None.

    Sizes are compared only if the server's model folder can be read here, because the server
    reports only the type of its model.

    Args:
        entry: Content of the server's name.
        model: The trainer's config.json.
    """
    folder = Path(str(entry["model_path"]))
    served_model = read_json(folder) if folder.is_absolute() else {}
    for key in ("architectures", "model_type"):
        if entry[key]:
            served_model[key] = entry[key]
    difference = model_folder.model_difference(served_model, model)
    if difference:
        return f"{difference} Correct the address, or restart it with this model."
    served_length = entry["context_length"] or 0
    max_length = _max_context_length(model)
    if served_length > max_length:
        return (
            f"it serves another model: its context is {served_length}, "
            f"the model's is {max_length:g}."
        )
    return None


def _max_context_length(model: dict[str, Any]) -> float:
    """Return the longest context that a config.json allows, in tokens; infinity if unknown."""
    rope = model.get("rope_scaling") or model.get("rope_parameters") or {}
    num_positions = model.get("max_position_embeddings") or math.inf
    return num_positions * (rope.get("factor") or 1)


def _live_everywhere(names: NameRegistry, server_id: str) -> list[tuple[Path, Entry]]:
    """Return the live servers with this id in all trials of name_root, each with its root."""
    name_root = names.root.parents[2]
    live: list[tuple[Path, Entry]] = []
    for file in name_root.glob(f"*/*/*/llm_server/{glob.escape(server_id)}.json"):
        root = file.parents[1]
        for entry in NameRegistry(root=root, ttl_s=names.ttl_s).list("llm_server"):
            if entry.id == server_id:
                live.append((root, entry))
    return live
