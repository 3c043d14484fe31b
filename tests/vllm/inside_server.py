"""A real vLLM server with the modules of arealite/ext/vllm/inside, and requests to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arealite.system.names.name_registry import create_secret
from tests.sglang.real import Real
from tests.sglang.shared import Answer, call
from tests.vllm.real import INSIDE, hold_environment, real_vllm, vllm_model


@dataclass(kw_only=True)
class Generation:
    """Sampled tokens with their log-probabilities and spans of weight versions."""

    tokens: list[int]
    logprobs: list[float]
    spans: list[tuple[str, int, int]]
    """(version, first token, end) of each span."""


@dataclass(kw_only=True)
class InsideServer:
    """The server; a request has the token unless a test passes another one."""

    real: Real
    token: str
    folders: list[Path]
    """Two models of one shape. The server starts with the first."""
    hold_folder: Path
    """Generations wait while it has a file `generate`."""
    reply_s: float = 120.0
    """Time limit of a request."""

    @property
    def is_alive(self) -> bool:
        return self.real.process.poll() is None

    def get(self, path: str, *, token: str | None = None) -> Answer:
        token = self.token if token is None else token
        return call(self.real.address, path, token=token, seconds=self.reply_s)

    def post(self, path: str, *, token: str | None = None, **body: Any) -> Answer:
        token = self.token if token is None else token
        return call(self.real.address, path, body, token=token, seconds=self.reply_s)

    def post_ok(self, path: str, **body: Any) -> Any:
        """Post a request that must succeed; return its answer."""
        status, answer = self.post(path, **body)
        assert status == 200, (path, answer, self.real.tail())
        return answer

    def on_worker(self, method: str, **kwargs: Any) -> dict[str, Any]:
        """Call a method of the worker's extension."""
        (answer,) = self.post_ok("/collective_rpc", method=method, kwargs=kwargs)["results"]
        return answer

    def check(self, **kwargs: Any) -> str:
        """Check the tensors of the next update; return the refusal."""
        return self.on_worker("arealite_check_weights", **kwargs)["refusal"]

    @property
    def obstacle(self) -> str:
        """Why the server must not sample."""
        return self.on_worker("arealite_state")["obstacle"]

    def load(self, folder: Path, version: str) -> None:
        """Update a paused server from a folder."""
        assert self.check(path=str(folder)) == ""
        self.post_ok("/start_weight_update")
        self.post_ok("/update_weights", update_info={"path": str(folder)})
        self.post_ok("/finish_weight_update", weight_version=version)

    def update(self, folder: Path, version: str) -> None:
        """Pause the server, update it from a folder, and resume it."""
        self.post_ok("/pause?mode=abort")
        self.load(folder, version)
        self.post_ok("/reset_prefix_cache")
        self.post_ok("/resume")

    def reset(self) -> None:
        self.update(self.folders[0], "default")

    def generate(
        self, prompt: Sequence[int], *, max_tokens: int = 16, temperature: float = 1.0
    ) -> Generation:
        """Sample with seed 0."""
        answer = self.post_ok(
            "/inference/v1/generate",
            token_ids=[*prompt],
            sampling_params={
                "max_tokens": max_tokens,
                "temperature": temperature,
                "logprobs": 0,
                "seed": 0,
                "ignore_eos": True,
                "detokenize": False,
            },
        )
        (choice,) = answer["choices"]
        return Generation(
            tokens=choice["token_ids"],
            logprobs=[entry["logprob"] for entry in choice["logprobs"]["content"]],
            spans=[
                (span["version"], span["start"], span["end"]) for span in choice["weight_versions"]
            ],
        )


@contextmanager
def inside_server(root: Path, *arguments: str, **overrides: object) -> Iterator[InsideServer]:
    """Run a server with a trial's secret; `overrides` are fields of the models' config."""
    folders = [vllm_model(root / f"m{seed}", seed=seed, **overrides) for seed in range(2)]
    secret = create_secret(root / "names")
    hold_folder = root / "hold"
    hold_folder.mkdir()
    environment = hold_environment(hold_folder, INSIDE)
    environment["AREALITE_SECRET_FILE"] = str(root / "names" / "secret")
    with real_vllm(folders[0], root, *arguments, environment=environment) as real:
        yield InsideServer(real=real, token=secret.token, folders=folders, hold_folder=hold_folder)
