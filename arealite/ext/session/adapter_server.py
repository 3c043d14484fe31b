"""Loads adapters at one server, by name, while requests of other adapters run.

An embedded server replaces an adapter: it says the version of each token. SGLang and vLLM do not,
so each version has a name of its own there, `up@3`, which the server lists and requests name. The
next version is loaded beside it; then its requests are aborted, continue with the next version, and
it is unloaded.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.llm_server import UNTRUSTED
from arealite.api.server_protocol import (
    MARK,
    GenerateRequest,
    ServerAnswer,
    ServerProtocol,
    name_with_version,
    part_of_entry,
)
from arealite.base import log
from arealite.base.errors import RoleError
from arealite.ext.served_policy.canary import tolerance_of
from arealite.ext.served_policy.scores import NotComparable, is_within, read_scores
from arealite.ext.server_processes.follow import MODELS_PATH, loaded_names
from arealite.ext.server_processes.named_adapters import AdapterControl, unload_and_abort
from arealite.impl.http_client import Pool, error_message
from arealite.system.health.waits import Wait
from arealite.system.names.name_registry import Entry

logger = log.get(__name__)

PROOF_S = 5.0
"""Longest wait for a server's log-probabilities; a busy server may answer later."""
FAILURES = (OSError, RoleError)
"""Errors of one server."""


Switch = Callable[[str, str, str], Awaitable[None]]
"""`LLMClient.switch_adapter`."""


class AdapterRefused(RoleError):
    """A server refuses an adapter; it would do so again."""


@dataclass(frozen=True, kw_only=True)
class StagedAdapter:
    """The newest version of an adapter."""

    name: str
    version: int
    folder: Path
    row: list[int]
    """Tokens that trainer and servers score."""
    scores_T: np.ndarray | None
    """The trainer's log-probabilities of the row; None: the adapter comes from a folder of the
    user, which stays, and is not proven."""


class AdapterServer:
    """A registered server."""

    def __init__(
        self,
        entry: Entry,
        config: ExperimentConfig,
        pool: Pool,
        headers: dict[str, str],
        switch: Switch,
    ) -> None:
        """Make no request.

        Args:
            entry: Its entry in the name registry.
            config: The session's options.
            pool: Its connections.
            headers: Sent with each request.
            switch: Tells the client of the samples which version requests must name.
        """
        self.entry = entry
        self.process = str(entry.value["address"]), entry.value.get("pid")
        """Address and process id: a restarted server has another id."""
        self._control: type[AdapterControl] = part_of_entry("server_control", entry.value)
        self._config = config
        self._pool = pool
        self._headers = headers
        self._switch = switch
        self._replaces = entry.value.get("type") == "embedded"
        """Whether an adapter has one name for all of its versions."""

    @property
    def obstacle(self) -> str:
        """Why it cannot load adapters by name; "" if it can."""
        if "adapters" in self.entry.value and issubclass(self._control, AdapterControl):
            return ""
        return (
            f"the server at {self.entry.value['address']} cannot load adapters by name. Let the "
            "session start its servers (servers=1), or start it with adapters (docs/adapters.md)."
        )

    async def load(self, adapter: StagedAdapter) -> None:
        """Load an adapter, compare the server's log-probabilities, and unload older versions.

        Raises:
            AdapterRefused: The server refused it, or has another version or other weights.
        """
        if self.obstacle:
            raise AdapterRefused(self.obstacle)
        name = await self._send(adapter)
        if adapter.scores_T is not None and self._config.trainer.ppo.publisher.canary:
            await self._prove(adapter, name, adapter.scores_T)
        for older in await self._names(adapter.name):
            if older != name:
                await self._unload(older, newest=name)

    async def holds(self, adapter: StagedAdapter) -> bool:
        """Return whether the server still has a version that it has confirmed.

        A server of `addresses` may restart so quickly that its entry does not change.
        """
        if self._replaces:
            return True
        name = name_with_version(adapter.name, adapter.version)
        is_listed = self.entry.value["adapters"].get(adapter.name) == name
        return is_listed or name in await self._names(adapter.name)

    async def unload(self, adapter: str) -> None:
        """Unload all versions of an adapter, unless the server has ended."""
        with suppress(*FAILURES):
            for name in await self._names(adapter):
                await self._unload(name)

    async def _send(self, adapter: StagedAdapter) -> str:
        """Load an adapter; return its name at the server."""
        version = str(adapter.version)
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
        if self._replaces:
            body["weight_version"] = version
            raw = await self._request("/load_lora_adapter", body)
            answer: dict[str, Any] = msgspec.json.decode(raw)
            confirmed = answer.get("loaded_adapters", {}).get(adapter.name)
            if confirmed != version:
                text = f"{self.entry.id} holds version {confirmed} of '{adapter.name}'"
                raise AdapterRefused(text)
            return adapter.name
        name = name_with_version(adapter.name, adapter.version)
        if name in await self._names(adapter.name):  # of an earlier session
            await self._unload(name)
        await self._request(self._control.load_adapter_path, {**body, "lora_name": name})
        return name

    async def _names(self, adapter: str) -> list[str]:
        """Return the names of the loaded versions of an adapter."""
        if self._replaces:
            return [adapter]
        names = loaded_names(await self._request(MODELS_PATH))
        return [name for name in names if name.startswith(adapter + MARK)]

    async def _unload(self, name: str, *, newest: str = UNTRUSTED) -> None:
        """Unload a version; its requests continue with the newest one, or wait."""
        if self._replaces:
            await self._request("/unload_lora_adapter", {"lora_name": name})
            return

        adapter, _, _ = name.rpartition(MARK)
        unload = self._request(self._control.unload_adapter_path, {"lora_name": name})
        await unload_and_abort(unload, partial(self._switch, self.entry.id, adapter, newest))

    async def _prove(self, adapter: StagedAdapter, name: str, scores_T: np.ndarray) -> None:
        """Compare the server's log-probabilities with the trainer's, unless the server is busy.

        Raises:
            AdapterRefused: They differ. The adapter was unloaded.
        """
        protocol: ServerProtocol = part_of_entry("server_protocol", self.entry.value)()

        async def generate(request: GenerateRequest) -> ServerAnswer:
            body = protocol.encode_request(replace(request, adapter=name))
            answer = protocol.decode_answer(
                await self._request(protocol.generate_path, msgspec.Raw(body))
            )
            if not self._replaces:
                answer.newest_version = name
            return answer

        try:
            with self._wait(f"scores of adapter {name}", PROOF_S):
                scores = await read_scores(generate, adapter.row, adapter.version)
        except (NotComparable, *FAILURES) as error:
            logger.warning("adapter not proven", server=self.entry.id, reason=str(error))
            return
        folder = Path(self._config.model.path)
        tolerance = tolerance_of(self._config, folder, self.entry.value.get("dtype"))
        errors = tolerance.errors(scores.prompt_T, scores_T)
        if not is_within(errors, tolerance.bound(scores_T)):
            await self._unload(name)
            mean, largest = errors
            raise AdapterRefused(
                f"{self.entry.id} computes other log-probabilities with version {adapter.version} "
                f"of '{adapter.name}' than the trainer (mean {mean:.2g}, largest {largest:.2g} "
                "nats)"
            )

    def _wait(self, event: str, seconds: float) -> Wait:
        on = f"llm_server-{self.entry.id}"
        return Wait(event=event, owner="session", on=on, seconds=seconds)

    async def _request(self, path: str, body: dict[str, str] | msgspec.Raw | None = None) -> bytes:
        """Return the body of the server's answer.

        Raises:
            OSError: It cannot be reached in time.
            AdapterRefused: It refused the request.
        """
        url = f"{self.entry.value['address']}{path}"
        with self._wait(f"an answer of {path}", self._config.trainer.ppo.publisher.timeout_s):
            status, raw = await self._pool.request(url, self._headers, body)
        if status != 200:
            raise AdapterRefused(f"{self.entry.id}: {error_message(status, raw)}")
        return raw
