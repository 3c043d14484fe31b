"""`make soak KILLS=1000`: runs of the demo, one after the other, with random kills of every role.

Each kill must be verified: the process has exited, and a successor is up. Each run must end by
itself, balanced, with every step trained, at the demo's reward. The last run is replayed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from arealite.base.trial_files import RunPaths  # noqa: E402
from arealite.ext.audit.audit import audit  # noqa: E402

OUT = Path("runs/soak")
REPORT = Path("out/bench/soak.json")
WARM_PARENT = "warm_parent"
WEIGHTS = {"datapipe": 10, "rollout": 10, "llm_server": 5, "trainer": 2, "launcher": 1}
WEIGHTS[WARM_PARENT] = 2
"""Weights of the random choice of a role; roles with a slow restart are chosen less often."""
STARTED_BY = {"warm_parent-0": "rollout", "warm_parent-1": "llm_server"}
"""The warm parents of launcher and server, and a kind of role that each starts. After the death of
a warm parent, the next start makes a new one; so this kind is killed next."""
MEAN_S = 1.2
"""Mean seconds between two kills; a kill may occur while another role restarts."""
BACK_S = 60.0
"""Time limit of a restart."""
PROMPT_S = 3.0
"""Promised time of a restart of a worker, datapipe or server while its parent runs."""
LEVEL = 0.6
"""Held-out reward that a run must reach; the demo starts at 0.3 and ends near 0.78."""
OVERRIDES = [
    "launcher.trainer_ranks=2",
    "launcher.rollout_workers=2",
    "launcher.max_restarts=100",
    "trainer.ppo.checkpoint.every_steps=2",
    "logger.types=[]",
]

SERVER = ["llm_server.embedded.max_restarts=100"]


class SoakError(Exception):
    """A guarantee was broken."""


@dataclass
class Kill:
    """One SIGKILL and its verification."""

    role: str
    pid: int
    at_s: float
    back_s: float | None = None
    """Seconds from the kill until its successor was found; None: not found (yet)."""
    launcher_died: bool = False
    """Whether the launcher was killed before the restart, which then waited for a new launcher."""

    @property
    def kind(self) -> str:
        """The role without its number."""
        return self.role.split("-")[0]

    @property
    def is_late(self) -> bool:
        """Whether the restart took longer than promised."""
        is_prompt = self.kind not in ("trainer", "launcher", WARM_PARENT)
        promised = is_prompt and not self.launcher_died
        return promised and self.back_s is not None and self.back_s > PROMPT_S


@dataclass
class Site:
    """The processes of one run: a server's parent, a launcher, and their children."""

    server: Sequence[str]
    train: Sequence[str]
    folder: Path
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    launches: int = 0

    def start(self) -> None:
        """Start the server; `launch` starts the launcher."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.server_process = self._spawn(self.server, "server.log")
        self.launch()

    def launch(self) -> None:
        """Start train.py, again with the same command after it was killed."""
        self.launches += 1
        self.launcher = self._spawn(self.train, "train.log")

    def stop(self) -> None:
        """End both; the server by SIGTERM, so that it removes its name."""
        self.launcher.kill()
        self.launcher.wait()
        self.server_process.terminate()
        try:
            self.server_process.wait(20)
        except subprocess.TimeoutExpired:
            self.server_process.kill()

    def roles(self) -> dict[str, psutil.Process]:
        """Return the live processes by role."""
        found = {"launcher": psutil.Process(self.launcher.pid)} if self._launched() else {}
        for child in children(self.launcher.pid):
            words = arguments(child)
            if "role" in words:
                place = words.index("role")
                found[f"{words[place + 1]}-{words[place + 2]}"] = child
            elif is_warm_parent(words):
                found.setdefault("warm_parent-0", child)  # a role is like it until it begins
        for child in children(self.server_process.pid):
            name = "warm_parent-1" if is_warm_parent(arguments(child)) else "llm_server-0"
            found.setdefault(name, child)
        return found

    def _launched(self) -> bool:
        return self.launcher.poll() is None

    def _spawn(self, command: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as output:
            return subprocess.Popen(
                command, stdout=output, stderr=output, env=self.environment, cwd=ROOT
            )


class Killer:
    """Kills roles of a site at random instants, and verifies each kill."""

    def __init__(
        self,
        site: Site,
        *,
        seed: str,
        mean_s: float = MEAN_S,
        plan: Sequence[str] = (),
    ) -> None:
        """Initialize; `plan` has the kinds of the first kills, later ones are random."""
        self.site = site
        self.random = random.Random(seed)
        self._plan = list(plan)
        self.mean_s = mean_s
        self.kills: list[Kill] = []
        self._next = self._draw()
        self._gone: dict[str, Kill] = {}
        """By role: the kill whose successor was not found yet."""
        self._survivors: dict[str, int] = {}
        """Process ids, by role, that must outlive the last killed warm parent."""
        self._num_kills = 0
        """Number of kills up to that of the last warm parent."""

    @property
    def verified(self) -> list[Kill]:
        """Kills whose process exited and was replaced."""
        return [kill for kill in self.kills if kill.back_s is not None]

    def run(
        self, *, limit: int, timeout_s: float, stop_when: Callable[[], bool] | None = None
    ) -> int:
        """Kill until `limit` kills are verified, and until the run ends; return its exit code.

        After the last kill the run is asked to end, as Ctrl-C does, once `stop_when()` is true.

        Raises:
            SoakError: a role was not restarted, or the run does not end.
        """
        end = time.monotonic() + timeout_s
        due = time.monotonic() + self.mean_s
        while True:
            self._verify()
            if (code := self.site.launcher.poll()) is not None and "launcher" not in self._gone:
                return code
            now = time.monotonic()
            if now > end:
                raise SoakError(f"the run did not end within {timeout_s:.0f} s")
            if not self.kills and "trainer-0" not in self.site.roles():
                due = now + self.mean_s  # a role that never started cannot restart
            # A warm parent comes back only after a further kill.
            coming = [kill for kill in self._gone.values() if kill.kind != WARM_PARENT]
            is_due = now > due and len(self.verified) + len(coming) < limit
            if is_due and self._strike():
                due = now + self.random.expovariate(1 / self.mean_s)
            if stop_when and len(self.verified) >= limit and stop_when():
                self.site.launcher.send_signal(signal.SIGINT)
                stop_when = None
            time.sleep(0.02)

    def _draw(self) -> str:
        """Choose the kind of role that is killed next."""
        if self._plan:
            return self._plan.pop()
        (kind,) = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        return kind

    def _strike(self) -> bool:
        """Kill a role of the chosen kind; return False while there is none."""
        roles = self.site.roles()
        there = [n for n in sorted(roles) if n.split("-")[0] == self._next and n not in self._gone]
        if not there:
            return False
        self._next = self._draw()
        name = self.random.choice(there)
        kill = Kill(name, roles[name].pid, time.monotonic())
        roles[name].kill()
        if name == "launcher":
            self.site.launcher.wait()
            for pending in self._gone.values():
                pending.launcher_died = pending.kind != "llm_server"
        else:
            roles[name].wait(BACK_S)  # raises TimeoutExpired if it survived
        if psutil.pid_exists(kill.pid) and psutil.Process(kill.pid) == roles[name]:
            raise SoakError(f"{name} (pid {kill.pid}) survived SIGKILL")
        self.kills.append(kill)
        self._gone[name] = kill
        if kill.kind == WARM_PARENT:
            self._plan.append(self._next)
            self._next = STARTED_BY[name]
            restarting = {gone.kind for gone in self._gone.values()}  # all ranks after one's death
            living = [n for n in roles if n.split("-")[0] not in restarting]
            self._survivors = {n: roles[n].pid for n in living}
            self._num_kills = len(self.kills)
        if name == "launcher":
            self.site.launch()
        return True

    def _verify(self) -> None:
        if not self._gone:
            return
        now, roles = time.monotonic(), self.site.roles()
        if self._num_kills == len(self.kills):  # no kill since that of a warm parent
            for name, pid in self._survivors.items():
                if name in roles and roles[name].pid != pid:
                    raise SoakError(f"{name} (pid {pid}) died with its warm parent")
        for name, kill in list(self._gone.items()):
            if name in roles and roles[name].pid != kill.pid:
                kill.back_s = now - kill.at_s
                del self._gone[name]
            elif self.site.launcher.poll() is not None and name != "launcher":
                del self._gone[name]  # the run ended first: the kill is not verified
            elif now - kill.at_s > BACK_S:
                raise SoakError(f"{name} (pid {kill.pid}) was not restarted within {BACK_S:.0f} s")


def children(pid: int) -> list[psutil.Process]:
    """List the children of a process that may have exited."""
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def arguments(process: psutil.Process) -> list[str]:
    """Return a process's command line; [] if it has exited."""
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.NoSuchProcess:
        return []


def is_warm_parent(words: Sequence[str]) -> bool:
    """Return whether a command line is that of a warm parent."""
    return "arealite warm parent" in words or "arealite.ext.warm_start.parent" in words


def verify(paths: RunPaths, steps: int) -> dict[str, float]:
    """Check the guarantees of a finished run; return the measurements.

    Raises:
        SoakError: the ledger is off, a step is missing, or the model has not learned.
    """
    report = audit(paths.ledger)
    if not report.ok:
        raise SoakError(f"out of balance:\n{report.table()}")
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    trained = [int(line["step"]) for line in lines if "reward/mean" in line]
    if trained != list(range(1, steps + 1)) or report.steps != steps:
        raise SoakError(f"{report.steps} steps in the ledger, {len(trained)} lines, not {steps}")
    scores = [line["eval/reward"] for line in lines if "eval/reward" in line]
    return {
        "reward": statistics.fmean(
            line["reward/mean"] for line in lines[-6:] if "reward/mean" in line
        ),
        "held_out": scores[-1] if scores else float("nan"),
        "groups": report.groups.offered,
        "lost": len(report.lost),
        "repeated": len(report.repeated),
        "max_staleness": report.max_staleness,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Kill until enough kills are verified; return 0 if every guarantee held."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000, help="number of verified kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mean-s", type=float, default=MEAN_S, help="seconds between two kills")
    options = parser.parse_args(argv)
    os.chdir(ROOT)
    from arealite.ext.demo.sorting import make_kit

    Path("runs/demo").mkdir(parents=True, exist_ok=True)
    kit, steps = make_kit(Path("runs/demo/kit-seed1"), 1), 80
    kills: list[Kill] = []
    runs: list[dict[str, float]] = []
    begin = time.monotonic()
    while sum(kill.back_s is not None for kill in kills) < options.kills:
        number = len(runs)
        site = make_site(kit, number, options.seed)
        killer = Killer(site, seed=f"{options.seed}/{number}", mean_s=options.mean_s)
        try:
            site.start()
            left = options.kills - sum(kill.back_s is not None for kill in kills)
            code = killer.run(limit=left, timeout_s=7200.0)
        finally:
            site.stop()
        kills += killer.kills
        if code != 0:
            raise SoakError(f"run {number} ended with code {code}; see {site.folder}")
        paths = RunPaths((OUT / "soak" / f"run{number}").absolute())
        runs.append(verify(paths, steps) | {"kills": len(killer.verified)})
        print(
            f"run {number}: " + ", ".join(f"{k} {v:.4g}" for k, v in runs[-1].items()), flush=True
        )
        if runs[-1]["held_out"] < LEVEL:
            raise SoakError(f"held-out reward {runs[-1]['held_out']:.3f} is below {LEVEL}")
    subprocess.run(
        [sys.executable, "-m", "arealite.cli.main", "replay", str(paths.root)], check=True
    )
    return summarize(kills, runs, seconds=time.monotonic() - begin)


def make_site(kit: Path, number: int, seed: int) -> Site:
    """Return the site of one run, in an empty folder."""
    names = ["experiment_name=soak", f"trial_name=run{number}", f"seed={seed + number}"]
    names += [f"model.path={kit / 'model'}"]
    shutil.rmtree(OUT / "soak" / f"run{number}", ignore_errors=True)
    train = [sys.executable, "train.py", "--config", "config/demo.yaml", *names, *OVERRIDES]
    train += [f"dataset.train={kit / 'train.jsonl'}", f"dataset.eval={kit / 'eval.jsonl'}"]
    train += [f"cluster.run_root={OUT}"]
    server = [sys.executable, "arealite/launch_llm_server.py", *names, *SERVER]
    return Site(server, train, OUT / f"run{number}-logs")


def summarize(kills: list[Kill], runs: list[dict[str, float]], *, seconds: float) -> int:
    """Print the table and write the JSON file."""
    rows: dict[str, list[float]] = {}
    seen = [kill for kill in kills if kill.back_s is not None]
    for kill in seen:
        row = "no launcher" if kill.launcher_died else kill.kind
        rows.setdefault(row, []).append(kill.back_s or 0.0)
    print(f"{'role':<12}{'kills':>7}{'back, median s':>16}{'slowest s':>11}")
    for role, times in sorted(rows.items()):
        print(f"{role:<12}{len(times):>7}{statistics.median(times):>16.2f}{max(times):>11.2f}")
    late = [kill for kill in seen if kill.is_late]
    result = {
        "verified_kills": len(seen),
        "unverified_kills": len(kills) - len(seen),
        "kills_by_role": dict(Counter(kill.kind for kill in seen)),
        "back_s_by_role": {role: statistics.median(times) for role, times in rows.items()},
        "slowest_s_by_role": {role: max(times) for role, times in rows.items()},
        "late": len(late),
        "lost": sum(run["lost"] for run in runs),
        "repeated": sum(run["repeated"] for run in runs),
        "held_out": [run["held_out"] for run in runs],
        "seconds": round(seconds, 1),
    }
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if "by_role" not in k}))
    if late:
        said = ", ".join(f"{kill.role} {kill.back_s:.1f} s" for kill in late)
        raise SoakError(f"{len(late)} restarts took longer than {PROMPT_S:g} s: {said}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SoakError as error:
        sys.exit(f"error: {error}")
