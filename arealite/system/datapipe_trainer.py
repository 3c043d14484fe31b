"""Takes the trainer's requests: each is noted, made durable, and then answered.

Beside the datapipe's loop, because what a request means to the ledger has nothing to do with
workers, and what a rank gets must be identical however often it asks, also after a restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import msgspec

from arealite.algo.partition import partition
from arealite.algo.staleness import blocks
from arealite.api import trainer_messages as messages
from arealite.api.trainer_messages import BatchRequest, EvalRequest, FromTrainer, TrainerStart
from arealite.api.trajectory import TrajectoryHeader
from arealite.base import log
from arealite.base.errors import InvariantError
from arealite.system.datapipe_evals import EvalBook
from arealite.system.datapipe_groups import GroupBook
from arealite.system.ledger import LedgerWriter
from arealite.system.wire import STOP_WAITING, request_name

logger = log.get(__name__)


class TrainerDesk:
    """What the trainer asked for and has not been given, and what its words change."""

    def __init__(
        self,
        book: GroupBook,
        evals: EvalBook,
        *,
        seed: int,
        send: Callable[[bytes, msgspec.Struct], None],
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
        self._eval_requests: dict[int, bytes] = {}
        self._start: tuple[bytes, TrainerStart] | None = None
        self._seed = seed
        self._send = send
        self._writer = writer
        self._waited = {"groups": 0.0, "pace": 0.0}
        """Seconds by cause since the last batch was composed."""
        self._waits_for: tuple[str, float] | None = None
        """(cause, since when)."""
        self._waits: dict[int, dict[str, float]] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether the trainer waits for episodes."""
        return self.finish is None and bool(self._batch_requests or self._eval_requests)

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
                self._take_eval_request(route, request.eval_id)
            case TrainerStart():
                self._start = (route, request)
                self._writer.after_commit(self._begin)
            case _:
                self._note(request)
                done = messages.Done(request_name(request))
                self._writer.after_commit(partial(self._send, route, done))

    def answer_evals(self) -> None:
        """Send the scores of finished evaluations, once the ledger has them."""
        for eval_id, metrics in self.evals.take_finished():
            self.book.ledger.add_eval(eval_id, metrics)
            answer = messages.EvalResult(eval_id, metrics)
            route = self._eval_requests.pop(eval_id)
            self._writer.after_commit(partial(self._send, route, answer))

    def tell_waiting(self, in_flight: str) -> None:
        """Tell everyone who waits what for; `in_flight` says who runs what."""
        for route, request in self._batch_requests.values():
            detail = f"{self._describe(request.step)}, {in_flight}"
            self._send(route, messages.Waiting(request_name(request), detail))
        for eval_id, route in self._eval_requests.items():
            left = self.evals.runs[eval_id].left
            detail = f"evaluation {eval_id}: {left} samples left, {in_flight}"
            self._send(route, messages.Waiting(request_name(EvalRequest(eval_id)), detail))

    def refuse(self, reason: str) -> None:
        """Tell everyone who waits that the run stops."""
        waiting: list[tuple[bytes, FromTrainer]] = [*self._batch_requests.values()]
        waiting += [(route, EvalRequest(eval_id)) for eval_id, route in self._eval_requests.items()]
        if self._start is not None:
            waiting.append(self._start)
        for route, request in waiting:
            self._send(route, messages.Refused(request_name(request), reason))

    # ------------------------------------------------------------ batches

    def take_ready(
        self, observed: Callable[[], dict[str, float]]
    ) -> list[tuple[bytes, BatchRequest]]:
        """Return the batch requests that can be answered, and forget them.

        Composes the next batch where it is asked for and may be released; what is `observed` then
        joins what the batch says about waits.
        """
        if not (self._batch_requests and self.changed):
            return []
        self.changed = False
        if any(r.step == self.book.next_step for _, r in self._batch_requests.values()):
            self._compose(observed)
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
        waits = self._waits.get(request.step, {})
        return shard(request, headers, updates=self.book.ppo.updates, seed=self._seed, waits=waits)

    def _compose(self, observed: Callable[[], dict[str, float]]) -> None:
        book, step = self.book, self.book.next_step
        groups = book.compose()
        self._mark(self._cause() if groups is None else None)
        if groups is None:
            return
        oldest = step - book.ppo.max_staleness
        stale = sum(h.oldest_version < oldest for group in groups for h in group.headers)
        numbers = {
            **{f"{cause}_wait_s": seconds for cause, seconds in self._waited.items()},
            "buffered_groups": book.counts["complete"],
            "leased_groups": book.counts["leased"],
            "late_results": book.too_late,
            "stale_trajectories": stale,
            **{k.replace(":", "_"): v for k, v in book.counts.items() if ":" in k},
            **{f"stale_below_{k}": v for k, v in book.dropped_lengths.items()},
            **observed(),
        }
        self._waits = {step: {name: float(number) for name, number in numbers.items()}}
        self._waited = dict.fromkeys(self._waited, 0.0)

    def _mark(self, cause: str | None) -> None:
        """Attribute the time since the last mark, and begin to wait for `cause` (None: not)."""
        now = time.monotonic()
        if self._waits_for is not None:
            before, since = self._waits_for
            self._waited[before] += now - since
        self._waits_for = None if cause is None else (cause, now)

    def _cause(self) -> str:
        """What holds the next batch back: pace (it is full) or groups."""
        return "pace" if self.book.counts["complete"] >= self.book.ppo.num_groups else "groups"

    def _describe(self, step: int) -> str:
        book = self.book
        text = f"batch {step}: {book.counts['complete']} of {book.ppo.num_groups} groups"
        if book.version is None:
            return text + ", no policy version is published yet"
        if self._cause() == "pace":
            late = blocks(list(book.candidates()), step, eta=book.ppo.max_staleness)
            names = ", ".join(f"g{c.seq} of version {c.start}" for c in late[:3])
            text += f", kept back until {len(late)} slow groups are in ({names})"
        return text

    # ------------------------------------------------------------ requests

    def _take_batch_request(self, route: bytes, request: BatchRequest) -> None:
        step, due = request.step, self.book.next_step
        if self.finish is not None:
            self._send(route, messages.Finished(self.finish.reason))
        elif step > due:
            raise InvariantError(
                f"rank {request.rank} asks for batch {step}, but the next one is {due}"
            )
        elif step == due or step in self.book.batches:
            if not self.is_waiting:
                self.asked = time.monotonic()
            self._batch_requests[request.rank] = (route, request)

    def _take_eval_request(self, route: bytes, eval_id: int) -> None:
        if eval_id in self.evals.results:
            answer = messages.EvalResult(eval_id, self.evals.results[eval_id])
            self._send(route, answer)
            return
        if not self.is_waiting:
            self.asked = time.monotonic()
        self.evals.begin(eval_id)
        self._eval_requests[eval_id] = route

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
        rolled = self.book.roll_back(start.step)
        self._batch_requests.clear()
        self._eval_requests.clear()
        self.evals.forget(after=start.step)
        self._start = None
        self.changed = True
        logger.info("training begins", step=start.step, rolled_back_groups=rolled)
        self._send(route, messages.TrainerReady(start.step, rolled))

    def _note(self, request: FromTrainer) -> None:
        match request:
            case messages.StepReport():
                self._note_step(request)
            case messages.Published():
                self.book.version = request.version
                self.book.ledger.set_meta("version", str(request.version))
            case messages.Checkpointed():
                self.book.mark_durable(request.step)
                self.book.ledger.checkpoint(request.step, request.path)
            case messages.Finish():
                self._note_finish(request)
            case _:
                raise AssertionError(request)

    def _note_step(self, report: messages.StepReport) -> None:
        groups = self.book.batches.get(report.step)
        if groups is None or groups[0].state != "batched":
            if report.step < self.book.known_steps():
                return  # the answer to the first report was lost
            raise InvariantError(f"step {report.step} is reported, but its batch was never made")
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
