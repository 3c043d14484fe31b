"""Loads adapters at one server, by name, while requests of other adapters run.

An embedded server replaces an adapter and reports the version of each token. SGLang and vLLM report
no version of an adapter. There, each version has its own name, such as `up@3`, and requests name
it. The next version is loaded beside the old one and proven. Then requests name it, those of the
old version are aborted and continue under the new name, and the old version is unloaded.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
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
from arealite.base.errors import InvariantError, RoleError
from arealite.ext.served_policy.canary import tolerance_of
from arealite.ext.served_policy.scores import NotComparable, is_within, read_scores
from arealite.ext.server_processes.named_adapters import (
    MODELS_PATH,
    NAME_WITH_VERSION,
    AdapterControl,
    loaded_names,
    unload_and_abort,
)
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


class AdapterLost(AdapterRefused):
    """The server has no version of the adapter any more."""


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


class AdapterServer(ABC):
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
            switch: `LLMClient.switch_adapter` of the client that samples.
        """
        self.entry = entry
        self.process = str(entry.value["address"]), entry.value.get("pid")
        """Address and process id: a restarted server has another id."""
        self._control: type[AdapterControl] = part_of_entry("server_control", entry.value)
        self._config = config
        self._pool = pool
        self._headers = headers
        self._switch = switch

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
        """Load a version, compare the server's log-probabilities, and unload older versions.

        Raises:
            AdapterRefused: The server refused it, or has another version or other weights.
        """
        if self.obstacle:
            raise AdapterRefused(self.obstacle)
        await self._load(adapter)

    @abstractmethod
    async def _load(self, adapter: StagedAdapter) -> None:
        """Load a version; see `load`."""

    @abstractmethod
    async def holds(self, adapter: StagedAdapter) -> bool:
        """Return whether the server still has a version that it has confirmed."""

    @abstractmethod
    async def unload(self, adapter: str) -> None:
        """Unload all versions of an adapter.

        Raises:
            AdapterRefused: There is none.
        """

    async def _prove(self, adapter: StagedAdapter, name: str) -> None:
        """Compare the server's log-probabilities with the trainer's, unless the server is busy.

        Args:
            adapter: The version.
            name: Its name at the server.

        Raises:
            AdapterRefused: They differ, or are no numbers.
        """
        if adapter.scores_T is None or not self._config.trainer.ppo.publisher.canary:
            return
        protocol: ServerProtocol = part_of_entry("server_protocol", self.entry.value)()

        async def generate(request: GenerateRequest) -> ServerAnswer:
            body = protocol.encode_request(replace(request, adapter=name))
            raw = await self._request(protocol.generate_path, msgspec.Raw(body))
            answer = protocol.decode_answer(raw)
            if name != adapter.name:  # the answer has the version of the policy
                answer.newest_version = name
            return answer

        try:
            with self._wait(f"scores of adapter {name}", PROOF_S):
                scores = await read_scores(generate, adapter.row, adapter.version)
        except (InvariantError, msgspec.DecodeError) as error:
            raise AdapterRefused(f"{self.entry.id} with '{name}': {error}") from error
        except (NotComparable, *FAILURES) as error:
            logger.warning("adapter not proven", server=self.entry.id, reason=str(error))
            return
        folder = Path(self._config.model.path)
        tolerance = tolerance_of(self._config, folder, self.entry.value.get("dtype"))
        errors = tolerance.errors(scores.prompt_T, adapter.scores_T)
        if not is_within(errors, tolerance.bound(adapter.scores_T)):
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


class EmbeddedAdapterServer(AdapterServer):
    """An adapter has one name for all of its versions; the entry lists the newest one."""

    async def _load(self, adapter: StagedAdapter) -> None:
        body = {
            "lora_name": adapter.name,
            "lora_path": str(adapter.folder),
            "weight_version": str(adapter.version),
        }
        raw = await self._request("/load_lora_adapter", body)
        answer: dict[str, Any] = msgspec.json.decode(raw)
        confirmed = answer.get("loaded_adapters", {}).get(adapter.name)
        if confirmed != str(adapter.version):
            raise AdapterRefused(f"{self.entry.id} holds version {confirmed} of '{adapter.name}'")
        try:
            await self._prove(adapter, adapter.name)
        except AdapterRefused as error:
            await self.unload(adapter.name)
            raise AdapterLost(str(error)) from error

    async def holds(self, adapter: StagedAdapter) -> bool:
        return True  # a restarted server has another process id

    async def unload(self, adapter: str) -> None:
        await self._request("/unload_lora_adapter", {"lora_name": adapter})


class NamedVersionServer(AdapterServer):
    """Each version of an adapter has a name of its own."""

    _listed: Sequence[str] = ()
    """The names of all loaded models when the server was last asked for them."""

    async def _load(self, adapter: StagedAdapter) -> None:
        name = name_with_version(adapter.name, adapter.version)
        older_names = await self._names(adapter.name)
        if name in older_names:  # of an earlier session
            older_names.remove(name)
            await self._unload(name)
        body = {"lora_name": name, "lora_path": str(adapter.folder)}
        await self._request(self._control.load_adapter_path, body)
        try:
            await self._prove(adapter, name)
        except BaseException:
            await self._unload(name)  # no request has named it
            raise
        await self._announce(name)
        for older_name in older_names:
            with suppress(AdapterRefused):  # it is gone already
                unload = self._unload(older_name)
                await unload_and_abort(unload, partial(self._announce, name))

    async def holds(self, adapter: StagedAdapter) -> bool:
        """Return whether the server lists the version, and tell the client so.

        A server of `addresses` may restart so quickly that its entry does not change. The client
        may have seen the server refuse the name.
        """
        name = name_with_version(adapter.name, adapter.version)
        if name not in self._listed and name not in await self._names(adapter.name):
            return False
        await self._announce(name)
        return True

    async def unload(self, adapter: str) -> None:
        end_requests = partial(self._switch, self.entry.id, adapter, UNTRUSTED)
        for name in await self._names(adapter):
            await unload_and_abort(self._unload(name), end_requests)

    async def _names(self, adapter: str) -> list[str]:
        """Return the names of the loaded versions of an adapter."""
        self._listed = loaded_names(await self._request(MODELS_PATH))
        versions = [name for name in self._listed if NAME_WITH_VERSION.fullmatch(name)]
        return [name for name in versions if name.rpartition(MARK)[0] == adapter]

    async def _unload(self, name: str) -> None:
        await self._request(self._control.unload_adapter_path, {"lora_name": name})

    async def _announce(self, name: str) -> None:
        """Set the version that requests for the adapter name; abort those of others."""
        adapter, _, _ = name.rpartition(MARK)
        await self._switch(self.entry.id, adapter, name)


def adapter_server(entry: Entry, *arguments: Any) -> AdapterServer:
    """Return a registered server; see `AdapterServer` for the arguments."""
    is_embedded = entry.value.get("type") == "embedded"
    kind = EmbeddedAdapterServer if is_embedded else NamedVersionServer
    return kind(entry, *arguments)
