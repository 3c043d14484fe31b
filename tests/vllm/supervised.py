"""A trial with a vLLM server that `serve-llm` starts and restarts, for tests that kill it.

The trial may have an embedded server, too. Each server has its own command.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.llm import LLMResponse
from arealite.api.publisher import DiskPublisherConfig
from arealite.system.names.name_registry import NameRegistry, create_secret
from tests.impl.publisher.sites import publishing
from tests.vllm.real import PYTHON, ROOT, START_S, hold_environment, vllm_model
from tests.waiting import until, until_exited

SERVE = """
import sys
from arealite.cli.main import run
from arealite.ext.server_processes import server_process
server_process.STEADY_S = 0.0
sys.exit(run("arealite.cli.serve_llm", sys.argv[1:]))
"""
"""The command `serve-llm`, which does not count deaths of a server that was healthy."""
TITLES = {"engine": "VLLM::EngineCore", "worker": "VLLM::Worker"}
"""How vLLM names its processes."""
EOS = 2
PUBLISH_S = 300.0
"""Longer than a restart: without another server, a publish waits for it."""


@dataclass(kw_only=True)
class SupervisedTrial:
    """The folder, the models and the servers of a trial."""

    folder: Path
    folders: list[Path] = field(init=False)
    """Two models of one shape. The servers start with the first."""
    version: int = 0
    """The version that was published last, by any publisher."""

    def __post_init__(self) -> None:
        self.folders = [vllm_model(self.folder / f"m{seed}", seed=seed) for seed in range(2)]
        self.hold_folder = self.folder / "hold"
        self.hold_folder.mkdir()
        self.registry = NameRegistry.of(self.config())
        self.token = create_secret(self.registry.root).token

    def config(self, **publisher: Any) -> ExperimentConfig:
        """Return the config of a run; `publisher` are fields of PublisherConfig."""
        disk = DiskPublisherConfig(dir=str(self.folder / "staged"))
        config = publishing(
            self.folder, self.folders[0], timeout_s=PUBLISH_S, disk=disk, **publisher
        )
        return replace(
            config,
            cluster=replace(config.cluster, security=True, ttl_s=5.0),
            server_wait_s=START_S,
        )

    @contextmanager
    def served(self, kind: str, *overrides: str) -> Iterator[None]:
        """Run a server of a kind, from its registration to the end of the body."""
        config = self.config()
        words = [
            f"llm_server.type={kind}",
            f"model.path={self.folders[0]}",
            "model.dtype=float32",
            f"cluster.name_root={config.cluster.name_root}",
            f"cluster.run_root={config.cluster.run_root}",
            f"cluster.user={config.cluster.user}",
            f"experiment_name={config.experiment_name}",
            f"trial_name={config.trial_name}",
            *overrides,
        ]
        environment = os.environ | hold_environment(self.hold_folder, ROOT)
        log = self.folder / f"{kind}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", SERVE, *words],
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        try:
            until(
                lambda: process.poll() is not None or self.entry(kind),
                what=f"a server of type {kind}",
                seconds=START_S,
            )
            assert process.poll() is None, log.read_text(errors="replace")
            yield
        finally:
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
            until_exited(*family)

    def entry(self, kind: str = "vllm") -> dict[str, Any] | None:
        """Return the registry entry of the server of a kind; None while it has none."""
        for entry in self.registry.list("llm_server"):
            if entry.value.get("type") == kind:
                return entry.value
        return None

    def process(self, name: str) -> psutil.Process:
        """Return a process of the vLLM server: api, engine or worker."""
        entry = self.entry()
        assert entry is not None
        server = psutil.Process(entry["pid"])
        if name == "api":
            return server
        (process,) = (
            process
            for process in server.children(recursive=True)
            if " ".join(process.cmdline()).startswith(TITLES[name])
        )
        return process


@contextmanager
def supervised_trial(folder: Path, *, has_embedded: bool) -> Iterator[SupervisedTrial]:
    """Run the servers of a trial."""
    trial = SupervisedTrial(folder=folder)
    with ExitStack() as servers:
        servers.enter_context(
            trial.served(
                "vllm",
                f"llm_server.vllm.python={PYTHON}",
                "llm_server.vllm.device=cpu",
                "llm_server.vllm.kv_cache_gb=1",
                "llm_server.context_length=512",
            )
        )
        if has_embedded:
            servers.enter_context(trial.served("embedded", "llm_server.context_length=512"))
        yield trial


class Weights:
    """The weights of each version, between a first and a second model. No two are equal."""

    def __init__(self, folders: list[Path]) -> None:
        from transformers import AutoModelForCausalLM

        self._first, self._last = (load_file(folder / "model.safetensors") for folder in folders)
        self._model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
        self._loaded = 0

    def of(self, version: int) -> dict[str, torch.Tensor]:
        share = version * 0.618 % 1
        return {
            name: torch.lerp(tensor, self._last[name], share)
            for name, tensor in self._first.items()
        }

    @torch.no_grad()
    def largest_difference(
        self,
        prompt: list[int],
        response: LLMResponse,
        *,
        temperature: float,
        has_eos: bool,
    ) -> float:
        """Return the largest difference of a logprob from that of its version's model.

        Args:
            prompt: Token ids.
            response: Its answer.
            temperature: Of the sampling.
            has_eos: Whether the end token could be sampled.
        """
        row = torch.tensor([prompt + response.output_ids])
        sampled = row[0, len(prompt) :, None]
        versions = torch.tensor(response.versions)
        logprobs = torch.tensor(response.logprobs)
        largest = 0.0
        for version in {*response.versions}:
            if version != self._loaded:
                self._model.load_state_dict(self.of(version), strict=False)
                self._loaded = version
            logits = self._model(row).logits[0, len(prompt) - 1 : -1] / temperature
            if not has_eos:
                logits[:, EOS] = -torch.inf
            expected = logits.log_softmax(-1).gather(1, sampled)[:, 0]
            differences = (expected - logprobs)[versions == version].abs()
            largest = max(largest, float(differences.max()))
        return largest
