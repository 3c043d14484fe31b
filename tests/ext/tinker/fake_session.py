"""A session that computes nothing, and notes its calls."""

import asyncio
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np

from arealite.api.engine import Sequence as Row
from arealite.ext.session.sample_rows import PromptScores, Sample
from arealite.ext.tinker.named_losses import OUTPUT

VOCABULARY = 100


def write(file: Path, text: str) -> None:
    """Write a file into a new folder."""
    file.parent.mkdir()
    file.write_text(text)


class FakeCall:
    """A call that was begun: as with a session's, a wait that is cancelled does not cancel it."""

    def __init__(self, note: Callable[[str], None], call: str) -> None:
        async def work() -> None:
            note(call)

        self._task = asyncio.ensure_future(work())

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.shield(self._task).__await__()

    def done(self) -> bool:
        return self._task.done()


class FakeSession:
    """Answers as a session does: the log-probability of each target is -1."""

    vocabulary_size = VOCABULARY
    context_length = 64

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails_with: Exception | None = None

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.fails_with is not None:
            raise self.fails_with

    async def add_adapter(self, name: str, **options: Any) -> None:
        self._note(f"add {name} rank={options['rank']} targets={options['targets']}")

    def remove_adapter(self, name: str) -> FakeCall:
        return FakeCall(self._note, f"remove {name}")

    async def drop_gradient(self, *, adapter: str) -> None:
        self._note(f"drop_gradient {adapter}")

    async def forward_backward(self, rows: list[Row], loss: Any, **_: Any) -> dict[str, float]:
        self._note(f"forward_backward {rows[0].adapter}")
        return self._pass(rows)

    async def evaluate(self, rows: list[Row], loss: Any, **_: Any) -> dict[str, float]:
        self._note(f"evaluate {rows[0].adapter}")
        return self._pass(rows)

    def _pass(self, rows: list[Row]) -> dict[str, float]:
        for row in rows:
            shape = row.loss_mask.shape if row.top_ids is None else row.top_ids.shape
            row.fields[OUTPUT] = np.full(shape, -1, np.float32)
        return {"loss": 3.0}

    async def optim_step(self, lr: float, *, adapter: str, **_: Any) -> dict[str, float]:
        self._note(f"optim_step {adapter} lr={lr}")
        return {"grad_norm": 1.0, "skipped_update": 0.0}

    async def export(self, folder: Path, *, adapter: str) -> None:
        self._note(f"export {adapter}")
        write(folder / "adapter_model.safetensors", adapter)

    async def save(self, folder: Path, *, adapter: str) -> None:
        self._note(f"save {adapter}")
        write(folder / "extra.json", "{}")

    async def load(self, folder: Path, *, adapter: str) -> None:
        assert (folder / "extra.json").exists()
        self._note(f"load {adapter}")

    async def publish(self, *, adapter: str) -> None:
        self._note(f"publish {adapter}")

    def serve(self, name: str, folder: Path) -> FakeCall:
        assert (folder / "adapter_model.safetensors").exists()
        return FakeCall(self._note, f"serve {name}")

    async def sample(self, prompt: list[int], *, n: int, adapter: str, **options: Any) -> Any:
        self._note(f"sample {adapter}")
        num_top = options["top_logprobs"]
        sample = Sample(
            prompt=prompt,
            prompt_ids=prompt,
            output_ids=[5, 2],
            logprobs=[-1.0, -2.0],
            versions=[0, 0],
            stop_reason="stop",
            text="x",
            temperature=options["temperature"],
            group="g",
            top_ids=np.full((2, num_top), 7, np.int32),
            top_logprobs=np.full((2, num_top), -3, np.float32),
        )
        return [sample] * n

    async def score(
        self, prompt: list[int], *, adapter: str, top: int, targets: list[list[int]]
    ) -> PromptScores:
        self._note(f"score {adapter}")
        num_scored = len(prompt) - 1
        return PromptScores(
            logprobs=np.full(num_scored, -4, np.float32),
            top_ids=np.full((num_scored, top), 9, np.int32),
            top_logprobs=np.full((num_scored, top), -5, np.float32),
            target_logprobs=np.array(targets, np.float32) / -10,
        )
