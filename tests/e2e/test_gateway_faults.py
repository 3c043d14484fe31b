"""Worker, server and datapipe are killed while agents are in the middle of a turn of the gateway.

An agent stops the server before its third request, so no further generation ends until the kill.
The client's notes then say which generations each death could lose, and which ones are trained.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
from transformers import AutoTokenizer

from arealite.api.trajectory import Segment
from arealite.api.turns import arrays, blake2b, decode_turn
from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from arealite.system.ledger.ledger import connect, decode_header, read_payloads
from tests.e2e import gated, sessions
from tests.e2e.conftest import ENVIRONMENT, ROOT, SLOW_S, Site, all_gone
from tests.ext.sandbox.sandboxes import cell
from tests.fakes.ports import held_port
from tests.payloads import decode_segments
from tests.waiting import spawned, until, until_exited
from tools import soak

pytestmark = [pytest.mark.processes, pytest.mark.faults, pytest.mark.timeout(1200)]

KILLS = [
    ("plain", "rollout-0"),
    ("stamped", "rollout-0"),
    ("plain", "llm_server-0"),
    ("stamped", "datapipe-0"),
    ("stamped", "llm_server-0"),
    ("plain", "datapipe-0"),
]
"""The kind of session in the middle of a turn, and the role that is killed."""
ENV = "trainer.ppo.collector.env"
NOTED = Path(__file__).with_name("noted.py")
"""A plugin of the run. It changes the client's class, so this process does not import it."""
TOKEN = {"HARNESS_TOKEN": "hunter2"}
Key = tuple[str, int]
"""Group and member: one episode, in all its attempts."""


class Note(NamedTuple):
    """A line of the plugin `noted`."""

    at: str
    pid: int
    group: str
    member: int
    turn: int
    prompt: str
    answer: str

    @property
    def key(self) -> Key:
        return self.group, self.member


@dataclass
class Trained:
    """A finished trajectory: the turns of its receipts, and the attempt that played it."""

    turns: list[tuple[str, str]]
    """Digests of the prompt and the answer."""
    attempt: int
    segments: list[Segment]


@dataclass
class Kill:
    """A SIGKILL in the middle of turns."""

    kind: str
    role: str
    victim: psutil.Process
    recorded: dict[Key, dict[int, str]]
    """The finished turns of running episodes in the ledger: digests of the answers, by index."""
    in_flight: set[Key]
    """Episodes with recorded turns and a generation at the server."""
    children: list[psutil.Process]
    """The programs of the worker."""


@dataclass
class Live:
    """A live run whose agents and client tell what they do."""

    place: soak.Site
    paths: RunPaths
    folder: Path
    kills: list[Kill] = field(default_factory=list[Kill])

    def shown(self) -> str:
        logs = "\n".join(file.read_text()[-3000:] for file in self.paths.logs.glob("*.log"))
        return (self.place.folder / "train.log").read_text() + logs

    def told(self, at: str) -> list[dict[str, Any]]:
        file = self.folder / "told"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for each in lines if (line := json.loads(each))["at"] == at]

    def notes(self, at: str) -> list[Note]:
        lines = (self.folder / "notes").read_text().splitlines()
        return [note for line in lines if (note := Note(*json.loads(line))).at == at]

    def read(self, sql: str) -> list[Any]:
        with closing(connect(self.paths.ledger, read_only=True)) as db:
            return db.execute(sql).fetchall()

    def recorded(self) -> dict[Key, dict[int, str]]:
        """Return the finished turns of running episodes: digests of the answers, by index."""
        found = defaultdict[Key, dict[int, str]](dict)
        for group, member, payload in self.read("SELECT group_id, member, payload FROM turns"):
            if (turn := decode_turn(payload)).response.stop_reason:
                answer = blake2b(b"".join(arrays(turn.response)))
                found[group, member][turn.index] = answer.hexdigest()
        return dict(found)

    def trained(self) -> dict[Key, Trained]:
        """Return the finished trajectories."""
        found = dict[Key, Trained]()
        rows = self.read("SELECT trajectory_id, header FROM trajectories")
        payloads = read_payloads(self.paths.ledger, [key for key, _ in rows])
        for (_, raw), payload in zip(rows, payloads, strict=True):
            header, segments = decode_header(raw), decode_segments(payload)
            nodes = [turn.node for segment in segments for turn in segment.turns]
            turns = [(node.prompt_digest.hex(), node.answer_digest.hex()) for node in nodes]
            attempt = int(header.reward_parts["attempt"])
            found[header.group_id, header.member] = Trained(turns, attempt, segments)
        return found

    def generations(self) -> dict[Key, list[tuple[str, str]]]:
        """Return the finished generations of each episode: digests of prompt and answer."""
        found = defaultdict[Key, list[tuple[str, str]]](list)
        for note in self.notes("done"):
            found[note.key].append((note.prompt, note.answer))
        return found

    def kind(self, each: Trained) -> str:
        """Return the kind of session of a trajectory."""
        kinds = {line["attempt"]: line["kind"] for line in self.told("answered")}
        return kinds[each.attempt]

    def metric(self, name: str) -> float:
        """Return the largest value of a metric."""
        lines = [json.loads(line) for line in self.paths.metrics.read_text().splitlines()]
        return max(line.get(name, 0.0) for line in lines)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition while the launcher runs."""

        def is_true() -> object:
            assert self.place.launcher.poll() is None, self.shown()
            return condition()

        until(is_true, what=lambda: f"{what} in\n{self.shown()}", seconds=SLOW_S)

    def role(self, name: str, *, after: int = 0) -> psutil.Process:
        """Return the process of a role; wait for one, if `after` was the last."""

        found = list[psutil.Process]()

        def is_found() -> bool:
            there = self.place.roles().get(name)
            found.extend([there] if there and there.pid != after else [])
            return bool(found)

        self.wait(is_found, name)
        return found[0]

    def strike(self, kind: str, role: str) -> Kill:
        """Kill a role in the middle of a turn of a kind of session; wait for the session's end."""
        server, before = self.role("llm_server-0"), len(self.told("stopped"))
        gated.write(self.folder / "order", f"{kind} {server.pid}")
        self.wait(lambda: len(self.told("stopped")) > before, "a stop of the server")
        try:
            kill = self._in_flight(self.told("stopped")[-1]["task"], kind, role)
            kill.victim.kill()
            until_exited(kill.victim)
        finally:
            if role != "llm_server-0":
                server.resume()
        self.role(role, after=kill.victim.pid)
        self.wait(lambda: kill.in_flight <= {*self.trained()}, "the end of the struck sessions")
        self.kills.append(kill)
        return kill

    def _in_flight(self, task: str, kind: str, role: str) -> Kill:
        """Stop the worker when the ledger has every finished generation; return what to kill."""
        worker, victim = self.role("rollout-0"), self.role(role)
        groups = {
            g for g, name in self.read("SELECT group_id, task_id FROM groups") if name == task
        }
        found = list[Kill]()

        def is_stored() -> bool:
            worker.suspend()
            recorded, done = self.recorded(), defaultdict[Key, set[int]](set)
            for note in self.notes("done"):
                done[note.key].add(note.turn)
            posted = {n.key for n in self.notes("posted") if n.turn not in done[n.key]}
            in_flight = {k for k in posted & {*recorded} if len(recorded[k]) >= sessions.STOPS}
            ended = {*self.trained()}
            is_complete = all(done[k] <= {*recorded.get(k, {})} for k in {*done} - ended)
            if is_complete and any(group in groups for group, _ in in_flight):
                children = worker.children(recursive=True)
                found.append(Kill(kind, role, victim, recorded, in_flight, children))
            if not found or role != "rollout-0":
                worker.resume()
            return bool(found)

        self.wait(is_stored, "every finished turn in the ledger")
        return found[0]


@contextmanager
def running(
    site: Site, folder: Path, *overrides: str, environment: Mapping[str, str] = {}
) -> Iterator[Live]:
    """Run a server and a train.py of many steps with the harness; stop both."""
    names = ["experiment_name=e2e", "trial_name=sessions", f"model.path={site.model}"]
    names += [f"cluster.name_root={folder / 'names'}"]
    command = site.command(
        folder,
        *names,
        f"imports=[{NOTED}]",
        f"{ENV}.type=harness",
        "dataset.eval=null",
        "trainer.ppo.total_steps=100000",
        "trainer.ppo.checkpoint.export=false",
        "launcher.max_restarts=20",
        "logger.types=[]",
        *overrides,
    )
    script = str(ROOT / "arealite" / "launch_llm_server.py")
    files = {name.upper(): str(folder / name) for name in ("told", "order", "notes")}
    place = soak.Site(
        [sys.executable, script, *names], command, folder, {**ENVIRONMENT, **files, **environment}
    )
    live = Live(place, RunPaths(folder / "e2e" / "sessions"), folder)
    place.start()
    try:
        yield live
        place.launcher.send_signal(signal.SIGINT)
        assert place.launcher.wait(SLOW_S) == 130, live.shown()
    finally:
        place.stop()
    all_gone(folder)


@pytest.fixture(scope="module")
def struck(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Live:
    """Kill each role several times in the middle of turns; return the run after its end."""
    folder = tmp_path_factory.mktemp("sessions")
    with running(site, folder, f"{ENV}.harness.run={sessions.FILE}:solve") as live:
        for kind, role in KILLS:
            live.strike(kind, role)
    return live


def test_ledger_balances_after_each_kill_and_every_turn_is_certified(struck: Live) -> None:
    assert [(kill.kind, kill.role) for kill in struck.kills] == KILLS
    assert len({kill.victim.pid for kill in struck.kills}) == len(KILLS)
    report, trained = audit(struck.paths.ledger), struck.trained()
    assert report.ok and not report.lost and not report.repeated, report.table()
    assert {*report.failures_by_class} == {"worker_lost"}, report.table()
    assert {len(each.turns) for each in trained.values()} == {sessions.TURNS}
    count = sessions.TURNS * len(trained)
    assert report.turns.startswith(f"{count} turns certified"), report.turns
    assert {len(each.segments) for each in trained.values()} == {1}, "the agents only append"


def test_every_generation_of_a_repeatable_session_is_trained_once(struck: Live) -> None:
    """No turn is lost, none is doubled, and no recorded turn reached a server again."""
    done, trained = struck.generations(), struck.trained()
    plain = {key for key, each in trained.items() if struck.kind(each) == "plain"}
    for key in plain:
        assert Counter(done[key]) == Counter(trained[key].turns), key
    assert all(plain & kill.in_flight for kill in struck.kills if kill.kind == "plain")


def test_recorded_turns_are_answered_without_a_server(struck: Live) -> None:
    trained, dead, seen = struck.trained(), set[int](), 0
    for kill in struck.kills:
        dead |= {kill.victim.pid}
        plain = [key for key in kill.in_flight if struck.kind(trained[key]) == "plain"]
        for key in plain if kill.role == "rollout-0" else ():
            answers = [answer for _, answer in trained[key].turns]
            known = kill.recorded[key]
            assert answers[: len(known)] == [known[index] for index in sorted(known)]
            posted = [n for n in struck.notes("posted") if n.key == key and n.pid not in dead]
            assert posted and {n.turn for n in posted}.isdisjoint(known)
            seen += 1
    assert seen  # the session that the first order was for
    assert struck.metric("rollout/resumed_tokens") > 0


def test_session_with_another_second_attempt_branches_at_the_last_common_turn(
    struck: Live,
) -> None:
    done, trained, dead, seen = struck.generations(), struck.trained(), set[int](), 0
    for kill in struck.kills:
        if kill.role != "rollout-0":
            continue
        dead.add(kill.victim.pid)
        for key in kill.in_flight:
            if struck.kind(trained[key]) == "plain":
                continue
            known, turns = kill.recorded[key], trained[key].turns
            (_, first), *others = turns
            assert first == known[min(known)], "before the time stamp, it is answered again"
            pids = {(n.prompt, n.answer): n.pid for n in struck.notes("done") if n.key == key}
            assert all(pids[turn] not in dead for turn in others)
            assert Counter(turns) <= Counter(done[key]), "nothing is trained twice"
            left = {answer for _, answer in (Counter(done[key]) - Counter(turns))}
            assert {known[index] for index in sorted(known)[1:]} <= left
            seen += 1
    assert seen and struck.metric("rollout/resumed_diverged") > 0


def test_agents_received_exactly_the_trained_tokens(site: Site, struck: Live) -> None:
    tokenizer = AutoTokenizer.from_pretrained(site.model)
    heard = defaultdict[int, list[str]](list)
    for line in struck.told("answered"):
        heard[line["attempt"]].append(line["text"].strip())
    for key, each in struck.trained().items():
        (segment,) = each.segments
        tokens = np.frombuffer(segment.tokens, "<i4")
        ranges = [slice(turn.start, turn.start + turn.length) for turn in segment.turns]
        texts = [tokenizer.decode(tokens[r]).removesuffix(tokenizer.eos_token) for r in ranges]
        assert heard[each.attempt] == [text.strip() for text in texts], key


def test_programs_of_a_killed_worker_die_and_are_started_again(site: Site, tmp_path: Path) -> None:
    with running(
        site,
        tmp_path,
        f"{ENV}.harness.command=[{sys.executable},{sessions.FILE}]",
        *(f"{ENV}.harness.environment.{name}=${name}" for name in ("TOLD", "ORDER")),
        "trainer.ppo.collector.concurrency=4",
        "trainer.ppo.batch_size=4",
    ) as live:
        for _ in range(2):
            kill = live.strike("program", "rollout-0")
            began = {pid for line in live.told("began") for pid in line["pids"]}
            struck = began & {child.pid for child in kill.children}
            assert len(struck) >= 2, "a program and its child"
            until_exited(*kill.children)
    folders = {Path(line["folder"]) for line in live.told("began")}
    left = [each for folder in folders for each in (folder, folder.parent) if each.exists()]
    assert not left
    done, report = live.generations(), audit(live.paths.ledger)
    assert report.ok and {*report.failures_by_class} == {"worker_lost"}, report.table()
    for key, each in live.trained().items():
        assert Counter(done[key]) == Counter(each.turns), key


def test_task_of_a_killed_worker_is_leased_again_by_agents_elsewhere(
    site: Site, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        port = stack.enter_context(held_port())
        files = {name.upper(): str(tmp_path / name) for name in ("told", "order")}
        words = [sys.executable, str(sessions.FILE), f"http://127.0.0.1:{port}", "4"]
        stack.enter_context(spawned(words, ENVIRONMENT | files | TOKEN))
        live = stack.enter_context(
            running(
                site,
                tmp_path,
                f"{ENV}.harness.pull=true",
                f"{ENV}.harness.gateway.token_env=HARNESS_TOKEN",
                f"{ENV}.harness.gateway.port={port}",
                "trainer.ppo.collector.concurrency=4",
                "trainer.ppo.batch_size=4",
                environment=TOKEN,
            )
        )
        dead = set[int]()
        for _ in range(2):
            kill = live.strike("pulled", "rollout-0")
            dead.add(kill.victim.pid)
            for key in kill.in_flight:
                answers = [answer for _, answer in live.trained()[key].turns]
                known = [kill.recorded[key][index] for index in sorted(kill.recorded[key])]
                assert len(known) >= sessions.STOPS and answers[: len(known)] == known
                posted = {
                    n.turn for n in live.notes("posted") if n.key == key and n.pid not in dead
                }
                assert posted and posted.isdisjoint(kill.recorded[key])
    assert len({line["session"] for line in live.told("leased")}) > len(live.trained())
    done, report = live.generations(), audit(live.paths.ledger)
    assert report.ok and {*report.failures_by_class} == {"worker_lost"}, report.table()
    for key, each in live.trained().items():
        assert Counter(done[key]) == Counter(each.turns), key


def test_confined_programs_train_and_die_with_their_worker(site: Site, tmp_path: Path) -> None:
    cell()  # skips where the host cannot confine
    with running(
        site,
        tmp_path,
        f"{ENV}.harness.command=[{os.path.realpath(sys.executable)},{sessions.FILE}]",
        f"{ENV}.harness.sandbox=true",
        f"{ENV}.harness.readable=[{sessions.FILE}]",
        f"{ENV}.harness.environment.ORDER=none",
        "trainer.ppo.collector.concurrency=4",
        "trainer.ppo.batch_size=4",
    ) as live:
        worker = live.role("rollout-0")
        programs = list[psutil.Process]()

        def is_caught() -> bool:
            worker.suspend()
            for child in worker.children(recursive=True):
                words = soak.arguments(child)
                programs.extend([child] if str(sessions.FILE) in words[-1:] else [])
            if not programs:
                worker.resume()
            return bool(programs)

        live.wait(is_caught, "a confined program")
        worker.kill()
        until_exited(worker, *programs)
        before = len(live.trained())
        live.role("rollout-0", after=worker.pid)
        live.wait(lambda: len(live.trained()) > before + 4, "programs of the next worker")
    report = audit(live.paths.ledger)
    assert report.ok and {*report.failures_by_class} == {"worker_lost"}, report.table()
    assert report.turns.startswith(f"{(sessions.STOPS + 1) * len(live.trained())} turns certified")
