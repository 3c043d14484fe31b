"""Takes the trainer's requests: each is noted, made durable, and then answered.

Beside the datapipe's loop, because what a request means to the ledger has nothing to do with
workers, and what a rank gets must be identical however often it asks, also after a restart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from itertools import count

import msgspec

from arealite.algo.partition import partition
from arealite.algo.staleness import blocks
from arealite.api import trainer_messages as messages
from arealite.api.config import ExperimentConfig
from arealite.api.trainer_messages import BatchRequest, EvalRequest, FromTrainer, TrainerStart
from arealite.api.trajectory import TrajectoryHeader
from arealite.base import log
from arealite.base.errors import InvariantError
from arealite.system.datapipe.eval_book import EvalBook
from arealite.system.datapipe.group_book import GroupBook
from arealite.system.datapipe.workers import Workers
from arealite.system.health import vitals
from arealite.system.ledger.writer import LedgerWriter
from arealite.system.links.wire import STOP_WAITING, request_name

logger = log.get(__name__)

PACE_WINDOW_S = 30.0
"""Over how long the share of time lost to pacing is taken, and how often it is reported."""
GONE_S = 15.0
"""A trainer that waits asks again every few seconds; one silent for this long waits no more."""
NAMED = 5
"""Slow episodes named in a report."""


class IdleClock:
    """Adds up the trainer's idle time by what it waits for: episodes (groups), or pace."""

    def __init__(self) -> None:
        self.seconds = {"groups": 0.0, "pace": 0.0}
        """Since the last `take`."""
        self.cause: str | None = None
        """What the trainer waits for now; None while it does not."""
        self.pace_share = 0.0
        """Of the time lost to pacing, as an exponential average over `PACE_WINDOW_S`."""
        self._since = time.monotonic()

    def mark(self, cause: str | None) -> None:
        """Attribute the time since the last mark to the cause named then."""
        now = time.monotonic()
        passed, self._since = now - self._since, now
        if self.cause is not None:
            self.seconds[self.cause] += passed
        is_pace = self.cause == "pace"
        self.pace_share += (is_pace - self.pace_share) * -math.expm1(-passed / PACE_WINDOW_S)
        self.cause = cause

    def take(self) -> dict[str, float]:
        """Return the seconds by cause, and begin again."""
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return {f"{cause}_wait_s": seconds for cause, seconds in taken.items()}


class OutOfStep(InvariantError):
    """A request of steps that the ledger does not stand at: who sent it is wrong, or is of a
    trainer that is no more."""


class TrainerDesk:
    """What the trainer asked for and has not been given, and what its words change."""

    def __init__(
        self,
        book: GroupBook,
        evals: EvalBook,
        *,
        config: ExperimentConfig,
        send: Callable[[bytes, msgspec.Struct], None],
        workers: Workers,
        writer: LedgerWriter,
    ) -> None:
        self.book = book
        self.evals = evals
        self.finish: messages.Finish | None = None
        self.heard = self.asked = time.monotonic()
        """When the trainer last spoke, and when it last began to wait for episodes."""
        self.changed = True
        """Something happened since the last attempt to compose a batch."""
        self._batch_requests: dict[int, tuple[bytes, BatchRequest]] = {}
        """By rank: (whom to answer, what is asked)."""
        self._eval_requests: dict[int, tuple[bytes, EvalRequest]] = {}
        self._start: tuple[bytes, TrainerStart] | None = None
        self._tickets = count(book.ledger.boot << 20)
        self._ticket = 0
        """Of the trainer that runs."""
        self._config = config
        self._send = send
        self._workers = workers
        self._writer = writer
        self._idle = IdleClock()
        self._reported = -math.inf
        """When slow episodes were last named in a warning."""
        self._waits: dict[int, dict[str, float]] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether the trainer waits for episodes."""
        asks = self.finish is None and bool(self._batch_requests or self._eval_requests)
        return asks and time.monotonic() - self.heard < GONE_S

    def take(self, route: bytes, request: FromTrainer) -> None:
        """Take in a request; answers leave once its changes are durable.

        Raises:
            InvariantError: it contradicts the ledger.
        """
        self.heard = time.monotonic()
        self.changed = True
        match request:
            case BatchRequest():
                self._take_batch_request(route, request)
            case EvalRequest():
                self._take_eval_request(route, request)
            case TrainerStart(ticket=0):
                self._send(route, messages.Ticket(next(self._tickets)))
            case TrainerStart(ticket=ticket) if ticket <= self._ticket:
                if ticket == self._ticket:  # else of a trainer that is no more
                    self._send(route, messages.TrainerReady(request.step, 0))
            case TrainerStart():
                self._start = (route, request)
                self._writer.after_commit(self._begin, hurry=True)
            case _:
                self._note(request)
                done = messages.Done(request_name(request))
                self._writer.after_commit(partial(self._send, route, done), hurry=True)

    def answer_evals(self) -> None:
        """Send the scores of finished evaluations, once the ledger has them."""
        for eval_id, metrics in self.evals.take_finished():
            self.book.ledger.add_eval(eval_id, metrics)
            answer = messages.EvalResult(eval_id, metrics)
            route, _ = self._eval_requests.pop(eval_id)
            self._writer.after_commit(partial(self._send, route, answer), hurry=True)

    def tell_waiting(self) -> None:
        """Tell everyone who waits what for, and who runs what."""
        in_flight = self._workers.describe()
        self._warn_of_pacing()
        for route, request in self._batch_requests.values():
            detail = f"{self._describe(request.step)}, {in_flight}"
            self._send(route, messages.Waiting(request_name(request), detail))
        for eval_id, (route, request) in self._eval_requests.items():
            left = self.evals.runs[eval_id].left
            detail = f"evaluation {eval_id}: {left} samples left, {in_flight}"
            self._send(route, messages.Waiting(request_name(request), detail))

    def refuse(self, reason: str) -> None:
        """Tell everyone who waits that the run stops."""
        starts = [self._start] if self._start is not None else []
        for route, request in (
            *self._batch_requests.values(), *self._eval_requests.values(), *starts
        ):  # fmt: skip
            self._send(route, messages.Refused(request_name(request), reason))

    # ------------------------------------------------------------ batches

    def take_ready(self) -> list[tuple[bytes, BatchRequest]]:
        """Return the batch requests that can be answered, and forget them.

        Composes the next batch where it is asked for and may be released.
        """
        if not (self._batch_requests and self.changed):
            return []
        self.changed = False
        if any(r.step == self.book.next_step for _, r in self._batch_requests.values()):
            self._compose()
        ready = [
            pair for pair in self._batch_requests.values() if pair[1].step in self.book.batches
        ]
        for _, request in ready:
            del self._batch_requests[request.rank]
        return ready

    def shard(self, request: BatchRequest) -> messages.Batch:
        """Return a composed batch for one rank; a pure function of the batch and the world size."""
        groups = self.book.batches[request.step]
        headers = [header for group in groups for header in group.headers]
        updates, seed = self.book.ppo.updates, self._config.seed
        waits = self._waits.get(request.step, {})
        return shard(request, headers, updates=updates, seed=seed, waits=waits)

    def _compose(self) -> None:
        book, step = self.book, self.book.next_step
        groups = book.compose()
        if groups is None:
            self._mark()
            return
        self._idle.mark(None)
        oldest = step - book.ppo.max_staleness
        stale = sum(h.oldest_version < oldest for group in groups for h in group.headers)
        numbers = {
            **self._idle.take(),
            "pace_wait_share": self._idle.pace_share,
            "ledger_busy_s": self._writer.take_busy_s(),
            "buffered_groups": book.counts["complete"],
            "leased_groups": book.counts["leased"],
            "late_results": book.too_late,
            "stale_trajectories": stale,
            **{k.replace(":", "_"): v for k, v in book.counts.items() if ":" in k},
            **{f"stale_below_{k}": v for k, v in book.dropped_lengths.items()},
            "loop_lag_max_s": vitals.lag_max_s(),
            **self._workers.metrics(),
            **(book.curriculum.metrics() if book.curriculum else {}),
        }
        self._waits = {step: {name: float(number) for name, number in numbers.items()}}

    def _mark(self) -> None:
        """Note what holds the next batch back: pace (it is full), groups, or nothing yet.

        Not while an earlier batch is trained: that is no idle time, even if the next is asked for.
        """
        book = self.book
        is_idle = bool(self._batch_requests) and book.known_steps() == book.next_step
        is_full = book.counts["complete"] >= book.ppo.num_groups
        self._idle.mark(("pace" if is_full else "groups") if is_idle else None)

    def _describe(self, step: int) -> str:
        book = self.book
        text = f"batch {step}: {book.counts['complete']} of {book.ppo.num_groups} groups"
        if book.version is None:
            return text + ", no policy version is published yet"
        if slow := self._slow_episodes():
            text += f", kept back for slow episodes: {'; '.join(slow)}"
        return text

    def _slow_episodes(self) -> list[str]:
        """Name the episodes of which the next batch has to wait for some, oldest first."""
        book, eta, size = self.book, self.book.ppo.max_staleness, self.book.ppo.num_groups
        if book.ppo.staleness_policy != "pace" or book.counts["complete"] < size:
            return []
        now = time.monotonic()
        runs = {
            lease_id: f"on {worker.worker_id} since {now - held.given:.1f} s"
            for worker in self._workers.by_id.values()
            for lease_id, held in worker.held.items()
        }
        names: list[str] = []
        for late in blocks(list(book.candidates()), book.next_step, eta=eta, num_groups=size):
            group = book.groups[f"g{late.seq}"]
            states = dict.fromkeys(group.missing(book.ppo.max_attempts), "waits for a worker")
            for lease_id, lease in group.leases.items():
                states |= dict.fromkeys(group.due(lease), runs.get(lease_id, "on a lost worker"))
            about = f"({group.task.task_id}) of version {late.start}"
            names += [f"{group.group_id}/{m} {about} {state}" for m, state in states.items()]
        return names[:NAMED] + [f"and {len(names) - NAMED} more"] * (len(names) > NAMED)

    def _warn_of_pacing(self) -> None:
        """Name the slow episodes once pacing costs more of the time than was allowed."""
        self._mark()
        share, now = self._idle.pace_share, time.monotonic()
        allowed = self._config.datapipe.pace_report_share
        if self._idle.cause != "pace" or share <= allowed or now - self._reported < PACE_WINDOW_S:
            return
        self._reported = now
        logger.warning(
            "slow episodes hold the trainer",
            share=round(share, 2),
            allowed=allowed,
            episodes=self._slow_episodes(),
            ended_by=f"collector.episode_timeout_s={self.book.ppo.collector.episode_timeout_s:g}",
        )

    # ------------------------------------------------------------ requests

    def _take_batch_request(self, route: bytes, request: BatchRequest) -> None:
        step, due = request.step, self.book.next_step
        if self.finish is not None:
            self._send(route, messages.Finished(self.finish.reason))
        elif step > due:
            raise OutOfStep(f"rank {request.rank} asks for batch {step}, but the next one is {due}")
        elif step == due or step in self.book.batches:
            if not self.is_waiting:
                self.asked = time.monotonic()
            self._batch_requests[request.rank] = (route, request)

    def _take_eval_request(self, route: bytes, request: EvalRequest) -> None:
        if (metrics := self.evals.results.get(request.eval_id)) is not None:
            self._send(route, messages.EvalResult(request.eval_id, metrics))
            return
        if not self.is_waiting:
            self.asked = time.monotonic()
        self.evals.begin(request.eval_id)
        self._eval_requests[request.eval_id] = (route, request)

    def _begin(self) -> None:
        """Roll the ledger back: between two commits, when nobody else uses the connection."""
        if self._start is None:
            return
        route, start = self._start
        known = self.book.known_steps()
        if start.step > known:
            raise InvariantError(
                f"the trainer begins at step {start.step}, but {self.book.ledger.path} knows only "
                f"{known} trained steps: checkpoint and ledger are not of one trial"
            )
        newest = "SELECT MAX(step) FROM checkpoints"
        (saved,) = self.book.ledger.connection.execute(newest).fetchone()
        if start.step < (saved or 0):
            raise InvariantError(
                f"the trainer begins at step {start.step}, but the checkpoint of step {saved} was "
                "durable: it is missing or broken. Put it back; or start the same trial again with "
                f"resume=step-{start.step:06d} to go back, or resume=never to begin anew"
            )
        rolled = self.book.roll_back(start.step)
        self._batch_requests.clear()
        self._eval_requests.clear()
        self.evals.forget(after=start.step)
        self._start, self._ticket = None, start.ticket
        self.changed = True
        logger.info("training begins", step=start.step, rolled_back_groups=rolled)
        self._send(route, messages.TrainerReady(start.step, rolled))

    def _note(self, request: FromTrainer) -> None:
        match request:
            case messages.StepReport():
                self._note_step(request)
            case messages.Published():
                self._note_version(request.version)
            case messages.Checkpointed():
                self.book.mark_durable(request.step)
                self.book.ledger.checkpoint(request.step, request.path)
            case _:
                assert isinstance(request, messages.Finish)
                self._note_finish(request)

    def _note_version(self, version: int) -> None:
        """Take a newer version; one that is older, or of steps rolled back, came late."""
        if (self.book.version or 0) <= version <= self.book.known_steps():
            self.book.version = version
            self.book.ledger.set_meta("version", str(version))

    def _note_step(self, report: messages.StepReport) -> None:
        due = self.book.known_steps()
        if report.step < due:
            return  # the answer to the first report was lost
        if report.step > due or due == self.book.next_step:
            raise OutOfStep(f"step {report.step} is reported, but only {due} steps are trained and "
                            f"{self.book.next_step} batches are made")  # fmt: skip
        groups = self.book.batches[due]
        expected = sorted(h.trajectory_id for group in groups for h in group.headers)
        if sorted(report.trained) != expected:
            wrong = set(report.trained) ^ set(expected)
            raise InvariantError(
                f"step {report.step}: the trainer trained {len(report.trained)} trajectories, the "
                f"batch has {len(expected)}; they differ in {sorted(wrong)[:3]}"
            )
        self.book.mark_trained(report.step)
        self.book.ledger.train(report)

    def _note_finish(self, finish: messages.Finish) -> None:
        logger.info("finishing", reason=finish.reason)
        if self.finish is None or self.finish.reason == STOP_WAITING:
            self.finish = finish
        for route, _ in self._batch_requests.values():
            self._send(route, messages.Finished(finish.reason))
        self._batch_requests.clear()


def shard(
    request: BatchRequest,
    headers: list[TrajectoryHeader],
    *,
    updates: int,
    seed: int,
    waits: dict[str, float],
) -> messages.Batch:
    """Deal a batch to updates and ranks: the same for all who ask, also when it is replayed."""
    group_ids = [header.group_id for header in headers]
    minibatches, ranks = partition(
        group_ids,
        [header.num_tokens for header in headers],
        updates=min(updates, len(set(group_ids))),
        ranks=request.world_size,
        seed=seed + request.step,
    )
    mine = [index for index, rank in enumerate(ranks) if rank == request.rank]
    return messages.Batch(request.step, headers, ranks, minibatches, mine, waits)
