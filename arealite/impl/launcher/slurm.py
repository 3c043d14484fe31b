"""The Slurm launcher: the local one on the first node of a job, whose roles are steps of the job,
each placed by its number on the nodes of its part; and the script of such a job.

What a role has is what its part was given: a step is told its node, and shares that node's CPUs.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import shlex
import signal
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arealite.api.config import ExperimentConfig, name_dir, run_paths
from arealite.base.errors import UserError
from arealite.base.signals import OWN_STOP
from arealite.impl.launcher.local import LocalLauncher
from arealite.impl.launcher.processes import PARENT
from arealite.impl.launcher.supervisor import Role
from arealite.system.diagnosis import Finding

PARTS = {"llm_server": "servers", "rollout": "workers", "trainer": "trainers"}
"""Which part of a job has the nodes of a role; the datapipe is the supervisor's child."""
PROBE = """\
echo "$SLURMD_NODENAME ${CUDA_VISIBLE_DEVICES:--}"
for file in "$@"; do
    for second in 1 2 3 4 5; do test -e "$file" && continue 2; sleep 1; done
    echo "$SLURMD_NODENAME lacks $file"
done
"""
"""What each node runs first: a folder on a network may show a new file seconds later."""


def counts(config: ExperimentConfig) -> dict[str, int]:
    """Return how many processes each role has."""
    options = config.launcher
    if config.trainer.is_offline:
        return {"trainer": options.trainer_ranks}
    workers = {"llm_server": options.llm_servers, "rollout": options.rollout_workers}
    return workers | {"trainer": options.trainer_ranks}


def parts(config: ExperimentConfig) -> dict[str, list[str]]:
    """Return the parts of the job, each a heterogeneous component, with sbatch's words for it."""
    slurm = config.launcher.slurm
    words = {part: getattr(slurm, part) for role, part in PARTS.items() if counts(config).get(role)}
    own = {part: [*slurm.every, *mine] for part, mine in words.items() if mine}
    return {"head": [*slurm.every, *slurm.head], **own}


def script(config: ExperimentConfig, command: Sequence[str]) -> str:
    """Return the sbatch script that runs `command`, the supervisor, in a job of all parts."""
    paths = run_paths(config)
    first = [
        f"--job-name={config.experiment_name}-{config.trial_name}",
        f"--output={paths.logs}/slurm.log",
        "--open-mode=append",
        "--requeue",
        "--signal=B:TERM@120",
    ]
    lines = ["#!/bin/bash", f"# {config.experiment_name}/{config.trial_name}, by arealite launch."]
    lines += ["# Submit it again to go on where the run stopped; requeued, it does that itself."]
    for number, (part, words) in enumerate(parts(config).items()):
        lines += ["#SBATCH hetjob"] if number else []
        here = [
            p for role, p in PARTS.items() if p not in parts(config) and counts(config).get(role)
        ]
        lines += [f"# {part}" + (f", with {', '.join(here)}" if here and not number else "")]
        own = [*(first if not number else []), "--ntasks-per-node=1", *words]
        lines += [f"#SBATCH {word}" for word in own]
    lines += ["", "# A SIGTERM (also 120 s before the time is up): checkpoint, drain, audit, end."]
    lines += [f"cd {shlex.quote(str(Path.cwd()))} || exit", f"exec {shlex.join(command)}"]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Nodes:
    """The nodes that one part of this job was given."""

    group: list[str]
    """srun's words for its component."""
    job: str
    hosts: list[str]
    cpus: str

    @classmethod
    def of(cls, number: int, is_alone: bool) -> Nodes:
        """Read what Slurm told the job's script about its component `number`."""
        suffix = "" if is_alone else f"_HET_GROUP_{number}"
        try:
            names = os.environ[f"SLURM_JOB_NODELIST{suffix}"]
            job = os.environ[f"SLURM_JOB_ID{suffix}"]
            cpus = os.environ[f"SLURM_JOB_CPUS_PER_NODE{suffix}"]
        except KeyError as error:
            raise UserError(
                f"launcher.type=slurm outside of the job it needs ({error} is not set). "
                "Submit it: arealite launch slurm CONFIG [key=value …]"
            ) from error
        hosts = _output(["scontrol", "show", "hostnames", names]).split()
        group = [] if is_alone else [f"--het-group={number}"]
        return cls(group, job, hosts, cpus.partition("(")[0].partition(",")[0])

    def srun(self, *words: str) -> list[str]:
        """Begin a step's command."""
        shared = ["--overlap", "--mem=0", "--unbuffered", f"--cpus-per-task={self.cpus}"]
        return ["srun", *self.group, *shared, *words]


class SlurmLauncher(LocalLauncher):
    """Starts, watches, brings back and ends the roles of one experiment as steps of this job."""

    stop = signal.SIGUSR2
    """scancel sends SIGTERM to everyone; the supervisor is to ask them one after the other."""

    def __init__(self, config: ExperimentConfig) -> None:
        super().__init__(config)
        names = list(parts(config))
        self.nodes = {part: Nodes.of(number, len(names) == 1) for number, part in enumerate(names)}
        self.devices = dict[str, list[str]]()
        """The GPUs of each host."""

    def run(self) -> int:
        """Run to the end, after every node has answered and seen the run's folders."""
        asyncio.run(self._probe())
        return super().run()

    def place(self, role: str, index: int) -> tuple[Nodes, str, int]:
        """Return where a process runs: its part's nodes, its host, its number there."""
        nodes = self.nodes.get(PARTS[role], self.nodes["head"])
        each = -(-counts(self.config)[role] // len(nodes.hosts))
        return nodes, nodes.hosts[index // each], index % each

    def command(self, role: str, index: int) -> list[str]:
        """Return the step that runs one role; the datapipe stays with the supervisor."""
        (self.vitals / f"{role}-{index}.json").unlink(missing_ok=True)  # a predecessor's
        own, command = [f"{OWN_STOP}=1"], super().command(role, index)
        if role not in PARTS:
            return ["env", *own, *command]
        nodes, host, _ = self.place(role, index)
        if self.devices[host]:
            own.append(f"CUDA_VISIBLE_DEVICES={','.join(self._gpus(role, index))}")
        step = nodes.srun("-N1", "-n1", f"--nodelist={host}", f"--job-name={role}-{index}")
        return [*step, "env", "-u", PARENT, *own, *command]

    def _gpus(self, role: str, index: int) -> list[str]:
        """Divide a host's GPUs: one for each rank there, all ranks see all of these; servers share
        the others evenly."""
        _, host, number = self.place(role, index)
        there = Counter(
            kind for kind, count in counts(self.config).items() for i in range(count)
            if self.place(kind, i)[1] == host
        )  # fmt: skip
        gpus, servers = self.devices[host], there["llm_server"]
        cut = there["trainer"] if servers else len(gpus)
        each = (len(gpus) - cut) // max(servers, 1)
        begin = cut + number * each
        return {"trainer": gpus[:cut], "llm_server": gpus[begin : begin + each]}.get(role, [])

    def rank_environments(self) -> list[dict[str, str]]:
        """Return what each rank has to know to find the others: the first rank's host."""
        count = self.options.trainer_ranks
        places = [self.place("trainer", rank) for rank in range(count)]
        port = random.randint(20_000, 29_999)  # if it is taken there, the next attempt has another
        shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": places[0][1], "MASTER_PORT": str(port)}
        return [
            shared | {"RANK": str(rank), "LOCAL_RANK": str(local)}
            for rank, (_, _, local) in enumerate(places)
        ]

    def culprit(self, finding: Finding) -> int | None:
        """Return the process of the step that a finding is about, on whichever host."""
        running = {child.name: child.process.pid for child in self.children if child.running}
        return running.get(finding.culprit)

    async def clear(self, role: Role) -> None:
        """Kill what is left of a role: its steps do not end with who waits for them."""
        await super().clear(role)
        jobs = ",".join(nodes.job for nodes in self.nodes.values())
        listed = await asyncio.to_thread(_output, ["squeue", "-hs", "-j", jobs, "-o", "%i %j"])
        steps = [line.split() for line in listed.splitlines()]
        mine = [step for step, name in steps if name in role.names]
        if mine:
            await asyncio.to_thread(_output, ["scancel", "--signal=KILL", *mine])

    # ------------------------------------------------------------ before the start

    async def _probe(self) -> None:
        """Ask every node for its GPUs, and whether it sees what this one sees.

        Raises:
            UserError: nodes did not answer in time, or do not share a folder; names them.
        """
        folders = [self.paths.root, name_dir(self.config)]
        marks = [folder / f".seen-{secrets.token_hex(4)}" for folder in folders]
        for mark in marks:
            mark.touch()
        try:
            asked = [
                self._ask(nodes, [str(mark) for mark in marks]) for nodes in self.nodes.values()
            ]
            said = [line for lines in await asyncio.gather(*asked) for line in lines]
        finally:
            for mark in marks:
                mark.unlink(missing_ok=True)
        head = self.nodes["head"].hosts[0]
        for line in said:
            host, _, rest = line.partition(" ")
            if rest.startswith("lacks "):
                folder = Path(rest.removeprefix("lacks ")).parent
                raise UserError(
                    f"folder {folder} is not shared between {head} and {host}. Set "
                    "cluster.run_root and cluster.name_root to folders that every node mounts."
                )
            self.devices[host] = [] if rest == "-" else rest.split(",")
        if silent := [h for n in self.nodes.values() for h in n.hosts if h not in self.devices]:
            raise UserError(
                f"nodes {', '.join(sorted({*silent}))} did not start within "
                f"launcher.slurm.start_s={self.options.slurm.start_s:g} s. See what is wrong with "
                "`scontrol show node NAME`, leave them out (--exclude=NAME), or wait longer."
            )

    async def _ask(self, nodes: Nodes, files: Sequence[str]) -> list[str]:
        """Return what the nodes of a part print in time."""
        size = str(len(nodes.hosts))
        step = nodes.srun("-N", size, "-n", size, "--ntasks-per-node=1", "--job-name=probe")
        process = await asyncio.create_subprocess_exec(
            *step, "sh", "-c", PROBE, "probe", *files, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        lines = list[str]()
        try:
            async with asyncio.timeout(self.options.slurm.start_s):
                async for line in process.stdout:
                    lines.append(line.decode().strip())
        except TimeoutError:
            process.kill()
        await process.wait()
        return lines


def _output(words: Sequence[str]) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout
