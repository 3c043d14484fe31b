"""Scripted components of a trainer that record all calls in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arealite.api.engine import Sequence, TrainEngine
from arealite.api.logger import MetricLogger
from arealite.api.publisher import PublishReport, WeightPublisher
from arealite.api.trainer_messages import (
    Batch,
    Checkpointed,
    EvalResult,
    Finish,
    FromTrainer,
    Published,
    StepReport,
    TrainerReady,
    Unusable,
    Waiting,
)
from arealite.impl.trainer.base import Components
from arealite.impl.trainer.rank_group import World
from tests.impl.trainer.trajectories import batch, group
from tests.payloads import GARBAGE


class Events:
    """Record of events as strings; thread-safe."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.threads: dict[str, str] = {}

    def add(self, word: str) -> None:
        self.words.append(word)
        self.threads[word] = threading.current_thread().name

    def order(self, *words: str) -> None:
        """Assert that these events occurred in this order."""
        places = [self.words.index(word) for word in words]
        assert places == sorted(places), self.words


class ScriptedEngine(TrainEngine):
    """A model of one number. `name` is the prefix of its events, empty for the policy."""

    def __init__(self, events: Events, name: str = "") -> None:
        self.events, self.updates, self.name = events, 0, name
        self.extra: dict[str, Any] = {}
        self.trained_fields = set[str]()
        """Fields of the first row of the last update."""
        self.on_update: Callable[[int], None] = lambda count: None

    def without_adapter(self) -> TrainEngine:
        return self

    def forward(self, rows: list[Sequence]) -> dict[str, list[np.ndarray]]:
        self.events.add(f"{self.name}forward")
        if self.name == "critic ":
            return {"values": [row.loss_mask * np.float32(0.25) for row in rows]}
        return {
            "logprobs": [row.loss_mask * np.float32(-1.0) for row in rows],
            "entropy": [row.loss_mask * np.float32(0.5) for row in rows],
            "top_logprobs": [row.loss_mask[:, None] * np.float32([[-1.0, -2.0]]) for row in rows],
        }

    def forward_backward(
        self,
        rows: list[Sequence],
        loss_fn: Any,
        *,
        rows_per_example: int = 1,
        record_outputs: Mapping[str, str] | None = None,
    ) -> dict[str, float]:
        assert all(("prox_logprobs" in row.fields) != bool(record_outputs) for row in rows)
        for row in rows if record_outputs else []:
            row.fields["prox_logprobs"] = row.loss_mask * np.float32(-1.0)
            row.fields["entropy"] = row.loss_mask * np.float32(0.5)
        self.trained_fields = set(rows[0].fields) if rows else set()
        return {"loss": 0.0, "weight": 1.0}

    def optim_step(self, *, lr: float | None = None, optimizer: object = None) -> dict[str, float]:
        self.updates += 1
        self.events.add(f"{self.name}update {self.updates}")
        self.on_update(self.updates)
        return {"grad_norm": 1.0, "lr": lr or 1e-3, "skipped_update": 0.0}

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        self.events.add(f"{self.name}save step-{extra['step']:06d}")
        path.mkdir(exist_ok=True)
        (path / "extra").write_text(f"{extra['step']} {self.updates}")
        self.extra = extra

    def drop_gradient(self) -> None:
        self.events.add(f"{self.name}drop_gradient")

    def load(self, path: Path) -> dict[str, Any]:
        step, self.updates = map(int, (path / "extra").read_text().split())
        self.events.add(f"{self.name}load step-{step:06d}")
        return {"step": step, "interruptions": 5}

    def export(self, path: Path) -> None:
        self.events.add("export")

    def fingerprint(self) -> str:
        return f"{self.updates:016x}"

    def stream_weights(self, *, on_device: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        self.events.add("gather")
        yield "weight", torch.tensor([float(self.updates)])


class ScriptedPublisher(WeightPublisher):
    """Remembers the weights of each version; `gate` holds a push until it is set."""

    def __init__(self, events: Events) -> None:
        self.events, self.weights = events, dict[int, float]()
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.is_stale = self.shares = False
        self.on_second_push: Callable[[], None] = lambda: None
        """Called when a version is pushed again."""

    @property
    def needs_republish(self) -> bool:
        return self.is_stale

    def pause_generation(self) -> None:
        if self.shares:
            self.events.add("pause")

    def stage(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> bool:
        self.staged = float(dict(weights)["weight"])
        return False

    def push(self, version: int) -> PublishReport:
        assert self.gate.wait(60.0)
        if self.failure is not None:
            raise self.failure
        if version in self.weights:
            self.on_second_push()
        self.weights[version] = self.staged
        self.events.add(f"push {version}")
        return PublishReport(
            version=version,
            stage_s=0.1,
            pause_s=0.01,
            load_s=0.02,
            continue_s=0.01,
            stall_s=0.03,
            num_bytes=4,
            servers=1,
            quarantined=[],
        )

    def close(self) -> None:
        self.events.add("publisher closed")
        self.gate.set()


class ScriptedPipe:
    """A datapipe with one batch of two groups for each step."""

    def __init__(self, events: Events, *, minibatches: int = 1) -> None:
        self.events, self.minibatches = events, minibatches
        self.rewards = [1.0, 0.0]
        self.finished = threading.Event()
        self.failure: Exception | None = None
        """The error that a wait for a batch raises."""
        self.empty_from: int | None = None
        """The first step without a batch; requests for it wait."""
        self.eval_hangs: int | None = None
        """The evaluation that gets no answer."""
        self.garbled: list[int] = []
        """Steps whose batch has an unreadable payload, once for each occurrence."""
        self.published = -1
        self.reports: list[StepReport] = []
        self.waiting = threading.Event()

    def connect(self) -> ScriptedLink:
        return ScriptedLink(self)

    def is_empty(self, step: int) -> bool:
        first = self.empty_from  # read once: another thread may change it
        return first is not None and step >= first


class ScriptedLink:
    """A link to the scripted datapipe that fails if two threads use it."""

    ticket = 0

    def __init__(self, pipe: ScriptedPipe) -> None:
        self.pipe, self.events = pipe, pipe.events
        self.results: list[EvalResult] = []
        self.thread: int | None = None

    def _mine(self) -> None:
        here = threading.get_ident()
        assert self.thread in (None, here), "a link belongs to one thread"
        self.thread = here

    def start(self, step: int) -> TrainerReady:
        self._mine()
        self.events.add(f"start {step}")
        return TrainerReady(step=step, rolled_back_groups=0)

    def next_batch(
        self, step: int, *, on_wait: Callable[[Waiting], bool] | None = None
    ) -> tuple[Batch, list[bytes]] | None:
        self._mine()
        self.events.add(f"ask {step}")
        while self.pipe.is_empty(step):
            self.pipe.waiting.set()
            if self.pipe.failure is not None:
                raise self.pipe.failure
            if self.pipe.finished.wait(0.01):
                return None
            if on_wait is not None and on_wait(
                Waiting(request="BatchRequest", detail="2 groups in flight")
            ):
                self.report(Finish(reason="asked to stop"))
        groups = group("a", self.pipe.rewards, version=step) + group(
            "b", self.pipe.rewards, version=step
        )
        updates = [0, 0, 1, 1] if self.pipe.minibatches == 2 else [0] * 4
        made, payloads = batch(groups, step=step, minibatches=updates)
        if step in self.pipe.garbled:
            payloads[2] = GARBAGE
        return made, payloads

    def report(self, message: FromTrainer) -> None:
        if not isinstance(message, Finish):
            self._mine()
        match message:
            case Unusable():
                self.events.add(f"set aside {message.step}: {', '.join(message.groups)}")
                self.pipe.garbled.remove(message.step)
            case StepReport():
                self.pipe.reports.append(message)
                self.events.add(f"report {message.step}")
            case Published():
                self.pipe.published = message.version
                self.events.add(f"published {message.version}")
            case Checkpointed():
                self.events.add(f"checkpointed {message.step}")
            case Finish():
                self.events.add(f"finish: {message.reason}")
                self.pipe.finished.set()
            case _:
                raise AssertionError(message)

    def evaluate(self, eval_id: int) -> None:
        self._mine()
        self.events.add(f"evaluate {eval_id}")
        self.results.append(EvalResult(eval_id=eval_id, metrics={"reward": float(eval_id)}))

    def eval_result(
        self, *, wait: bool, on_wait: Callable[[Waiting], bool] | None = None
    ) -> EvalResult | None:
        self._mine()
        while wait and self.results and self.results[0].eval_id == self.pipe.eval_hangs:
            self.pipe.waiting.set()
            if on_wait is not None and on_wait(
                Waiting(request="EvalRequest", detail="8 samples left")
            ):
                return None
            self.pipe.finished.wait(0.01)
        return self.results.pop(0) if self.results else None

    def close(self) -> None:
        pass


class ListLogger(MetricLogger):
    """A logger that keeps the lines."""

    def __init__(self, run_root: Path) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.rewound: int | None = None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.lines.append((step, dict(metrics)))

    def rewind(self, step: int) -> None:
        self.rewound = step

    def close(self) -> None:
        pass


class Stage:
    """All scripted components of one trainer."""

    def __init__(self, *, minibatches: int = 1, actors: Seq[str] = ()) -> None:
        """Create a stage. `actors` may name critic and reference."""
        self.events = Events()
        self.engine = ScriptedEngine(self.events)
        self.others = {name: ScriptedEngine(self.events, f"{name} ") for name in actors}
        self.pipe = ScriptedPipe(self.events, minibatches=minibatches)
        self.publisher = ScriptedPublisher(self.events)
        self.logger = ListLogger(Path())

    def components(self) -> Components:
        connect: Any = self.pipe.connect
        others: Any = self.others
        return Components(
            world=World(),
            engine=self.engine,
            connect=connect,
            publisher=self.publisher,
            loggers=[self.logger],
            **others,
        )
