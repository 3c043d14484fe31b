"""Controls vLLM servers: pauses and weight updates.

A server that AReaLite starts loads modules of ours (ext/vllm/inside), which check new weights
before vLLM changes the model, and receive weights over a process group. A server without them takes
weights from a folder by vLLM's own `reload_weights`.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from arealite.api.llm_server import UNTRUSTED
from arealite.base.errors import RoleError
from arealite.base.model_folder import Shapes, read_json
from arealite.ext.server_processes.named_adapters import AdapterControl, Post
from arealite.ext.vllm.vllm_protocol import INFO_PATH, NEEDS_RESTART
from arealite.impl.publisher.control import (
    Capabilities,
    ServerRefusal,
    WeightGroup,
)

PAUSES = {
    "abort": "/pause?mode=abort",
    "retract": "/pause?mode=keep",
    "in_place": "/pause?mode=keep&clear_cache=false",
}
ONE_TOKEN = {
    "token_ids": [1],
    "sampling_params": {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "detokenize": False},
}
"""Request for a generation of one token."""


@dataclass(eq=False, kw_only=True)
class VLLMControl(AdapterControl):
    """One vLLM server."""

    load_adapter_path = "/v1/load_lora_adapter"
    unload_adapter_path = "/v1/unload_lora_adapter"
    abort_all: ClassVar[Post] = ("/abort_requests", {})
    has_our_modules: bool = False
    """Whether the server checks weights before it changes the model."""

    async def probe(self) -> Capabilities:
        """Read the server's capabilities. A paused server stays paused until it has new weights.

        A token that it sampled from incomplete weights could end its process.
        """
        has_spans = True
        if await self.reports_pause():
            self.broken = await self.version() in (UNTRUSTED, NEEDS_RESTART)
        else:
            has_spans = await self._generates_spans()
        version = msgspec.json.decode(await self.request_ok("/version"))["version"]
        tp = await self._world_size("?include_dp=false")
        world_size = await self._world_size("")
        if world_size != tp:
            raise RoleError(
                f"{self.address} has several copies of the model, of which only one would report "
                "failed updates; start servers of one copy (num_servers instead of dp)"
            )
        with suppress(ServerRefusal):
            await self._call("arealite_state", {})
            self.has_our_modules = True
        if not self.has_our_modules:
            await self._check_reload()
        return Capabilities(
            version=f"vllm-{version}",
            pause_modes=frozenset(PAUSES),
            spans=has_spans,
            sessions=self.has_our_modules,
            buckets=self.has_our_modules,
            relabel=True,
            distributed=self.has_our_modules,
            tp=tp,
            dp=1,
            names_adapters=self.serves_adapters,
        )

    async def send_pause(self, mode: str) -> None:
        await self.request_ok(PAUSES[mode], {})
        self.flush = mode != "in_place"

    async def send_continue(self) -> None:
        await self.request_ok("/resume", {})

    async def begin(self, shapes: Shapes) -> None:
        """Check names and shapes at the server; a refused update leaves its weights as they are.

        Raises:
            ServerRefusal: The tensors are not those of the server's model.
        """
        await self._start_update({"shapes": shapes})

    async def end(self) -> None:
        """Return at once: the last tensors have ended the update."""

    async def load_folder(self, folder: Path, version: int) -> None:
        if self.has_our_modules:
            info = {"path": str(folder)}
            await self._start_update(info)
            await self.request_ok("/update_weights", {"update_info": info}, is_slow=True)
            await self._finish_update(version)
            return
        self.broken = True  # a failed load leaves parts of the model without weights
        # The label comes first: if the server is restarted now, the new process does not get it.
        await self.relabel(str(version), abort=False)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self.request_ok("/collective_rpc", body, is_slow=True)
        await self._drop_prefixes()
        self.broken = False

    async def join_group(self, group: WeightGroup, rank_offset: int) -> None:
        info = vars(group) | {"rank_offset": rank_offset}
        body = {"init_info": info}
        await self.request_ok("/init_weight_transfer_engine", body, is_slow=True)

    async def receive(
        self,
        layout: Mapping[str, object],
        group_name: str,
        *,
        is_flat: bool,
        version: int | None,
    ) -> None:
        info = dict(layout)
        if is_flat:
            info["load_format"] = "flattened_bucket"
        await self.request_ok("/update_weights", {"update_info": info}, is_slow=True)
        if version is not None:
            await self._finish_update(version)

    async def leave_group(self, group_name: str) -> None:
        await self.request("/shutdown_weight_transfer_engine", {}, is_slow=True)

    async def mark_broken(self) -> bool:
        """Set a label for a server without complete weights, and end its requests; it stays paused.

        A token that it sampled now could end its process. An update of all weights repairs most
        servers; the supervisor of a server restarts it if it has the label NEEDS_RESTART.
        """
        label = UNTRUSTED
        if self.has_our_modules:
            states = await self._call("arealite_state", {})
            if not any(state["obstacle"] for state in states):
                self.broken = False
                return True
            if any(state["needs_restart"] for state in states):
                label = NEEDS_RESTART
        await self.relabel(label, abort=True)
        await self.request_ok("/abort_requests", {})
        return False

    async def reports_pause(self) -> bool | None:
        answer = await self.request_ok("/is_paused")
        return msgspec.json.decode(answer)["is_paused"]

    # ------------------------------------------------------------ internals

    async def _check_reload(self) -> None:
        """Check that vLLM's own reload is right: on a CPU, a tied head would keep old weights.

        Raises:
            RoleError: It is not.
        """
        info = msgspec.json.decode(await self.request_ok(INFO_PATH, is_slow=True))
        is_on_cpu = info["vllm_config"]["device_config"]["device"] == "cpu"
        if is_on_cpu and read_json(self.folder).get("tie_word_embeddings", True):
            raise RoleError(
                f"{self.address} is vLLM on a CPU, whose reload leaves the old weights in a head "
                "that is tied to the embedding; start it with llm_server.type=vllm, or with the "
                "modules of arealite/ext/vllm/inside (docs/servers.md)"
            )

    async def _generates_spans(self) -> bool:
        """Return whether an answer has the version of each token."""
        answer = await self.request_ok("/inference/v1/generate", ONE_TOKEN, is_slow=True)
        (choice,) = msgspec.json.decode(answer)["choices"]
        return choice.get("weight_versions") is not None

    async def _start_update(self, weights: Mapping[str, object]) -> None:
        """Compare tensors with the model of each worker, and begin an update.

        Raises:
            ServerRefusal: They differ. The server still has its earlier weights.
        """
        kwargs = {**weights, "unused": sorted(self.unused)}
        results = await self._call("arealite_check_weights", kwargs)
        for result in results:
            if result["refusal"]:
                raise ServerRefusal(f"{self.address} refuses the weights: {result['refusal']}")
        self.broken = True
        await self.request_ok("/start_weight_update", {}, is_slow=True)

    async def _finish_update(self, version: int) -> None:
        await self._drop_prefixes()
        body = {"weight_version": str(version)}
        await self.request_ok("/finish_weight_update", body, is_slow=True)
        self.broken = False

    async def _drop_prefixes(self) -> None:
        """Drop cached prefixes of earlier weights, which vLLM keeps.

        Raises:
            RoleError: Requests that run hold them; so requests that begin later would use them.
        """
        answer = await self.request_ok("/reset_prefix_cache", {})
        is_dropped = msgspec.json.decode(answer).get("success")
        if not is_dropped and self.flush:
            raise RoleError(f"{self.address} has new weights, but does not drop cached prompts")

    async def _world_size(self, query: str) -> int:
        answer = await self.request_ok(f"/get_world_size{query}")
        return int(msgspec.json.decode(answer)["world_size"])

    async def _call(self, method: str, kwargs: Mapping[str, object]) -> list[dict[str, Any]]:
        """Call a method of each worker; return their results."""
        body = {"method": method, "kwargs": kwargs}
        answer = await self.request_ok("/collective_rpc", body, is_slow=True)
        return msgspec.json.decode(answer)["results"]
