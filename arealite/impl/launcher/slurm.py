"""The Slurm launcher: runs on the first node of a job and starts every role as a step of the job.

A role's number determines its node among the nodes of its part. Steps share the CPUs of a node.
"""

import asyncio
import os
import secrets
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arealite.api.config import ExperimentConfig, name_dir
from arealite.base.errors import UserError
from arealite.base.signals import OWN_STOP
from arealite.impl.launcher.local import LocalLauncher
from arealite.impl.launcher.processes import PARENT, counts, needed_paths, not_shared
from arealite.impl.launcher.slurm_job import PARTS, output, parts
from arealite.impl.launcher.supervisor import Role
from arealite.system.health.waits import Wait

PROBE = Path(__file__).with_name("slurm_probe.sh").read_text()
"""Shell script that runs on each node first. On a network file system, a new file may appear
seconds later."""


@dataclass(frozen=True)
class Nodes:
    """The nodes that Slurm allocated to one part of this job."""

    group: list[str]
    """Arguments of srun that select the component."""
    job: str
    hosts: list[str]
    cpus: int
    """CPUs of the node with the fewest."""

    @classmethod
    def of(cls, number: int, is_alone: bool) -> "Nodes":
        """Read Slurm's environment variables of component `number` of the job."""
        suffix = "" if is_alone else f"_HET_GROUP_{number}"
        try:
            names = os.environ[f"SLURM_JOB_NODELIST{suffix}"]
            job = os.environ[f"SLURM_JOB_ID{suffix}"]
            cpus = os.environ[f"SLURM_JOB_CPUS_PER_NODE{suffix}"]
        except KeyError as error:
            what = f"launcher.type=slurm outside of a Slurm job ({error} is not set). Submit a job"
            raise UserError(f"{what}: arealite launch slurm CONFIG [key=value …]") from error
        hosts = output(["scontrol", "show", "hostnames", names]).split()
        fewest = min(int(each.partition("(")[0]) for each in cpus.split(","))  # 8(x2),16
        return cls([] if is_alone else [f"--het-group={number}"], job, hosts, fewest)

    def srun(self, *words: str) -> list[str]:
        """Return the first words of a step's command line."""
        shared = ["--overlap", "--mem=0", "--unbuffered", f"--cpus-per-task={self.cpus}"]
        return ["srun", *self.group, *shared, *words]


class SlurmLauncher(LocalLauncher):
    """Starts, restarts and ends the roles of one experiment as steps of this job."""

    stop = signal.SIGUSR2
    """SIGTERM is not used: scancel sends it to all processes, and roles must end in order."""
    is_remote = True

    def __init__(self, config: ExperimentConfig) -> None:
        super().__init__(config)
        names = list(parts(config))
        self.nodes = {part: Nodes.of(number, len(names) == 1) for number, part in enumerate(names)}
        self.devices = dict[tuple[str, str], list[str]]()
        """The GPUs that each part has on each of its hosts, by job and host."""

    def run(self) -> int:
        """Run until the end, after every node has reported that it has the run's folders."""
        asyncio.run(self._probe())
        return super().run()

    def place(self, role: str, index: int) -> tuple[Nodes, str, int]:
        """Return the nodes of a process's part, its host, and its number on that host."""
        nodes = self.nodes.get(PARTS[role], self.nodes["head"])
        each = -(-counts(self.config)[role] // len(nodes.hosts))
        return nodes, nodes.hosts[index // each], index % each

    def command(self, role: str, index: int) -> list[str]:
        """Return the step that runs one role. The datapipe runs outside of steps."""
        own = [f"{OWN_STOP}=1"]
        command = super().command(role, index)
        if role not in PARTS:
            return ["env", *own, *command]
        nodes, host, _ = self.place(role, index)
        if self.devices[nodes.job, host]:
            own.append(f"CUDA_VISIBLE_DEVICES={','.join(self._gpus(role, index))}")
        step = nodes.srun("-N1", "-n1", f"--nodelist={host}", f"--job-name={role}-{index}")
        return [*step, "env", "-u", PARENT, *own, *command]

    def _gpus(self, role: str, index: int) -> list[str]:
        """Return the GPUs of a process.

        The first GPUs of a host belong to its ranks, one GPU per rank; every rank sees all of them.
        Servers share the other GPUs evenly.
        """
        nodes, host, number = self.place(role, index)
        every = [(kind, i) for kind, count in counts(self.config).items() for i in range(count)]
        there = Counter(kind for kind, i in every if self.place(kind, i)[:2] == (nodes, host))
        gpus = self.devices[nodes.job, host]
        servers = there["llm_server"]
        cut = there["trainer"] if servers else len(gpus)
        each = (len(gpus) - cut) // max(servers, 1)
        begin = cut + number * each
        return {"trainer": gpus[:cut], "llm_server": gpus[begin : begin + each]}.get(role, [])

    async def rank_places(self) -> tuple[str, Sequence[int]]:
        places = [self.place("trainer", rank) for rank in range(self.options.trainer_ranks)]
        return places[0][1], [number for _, _, number in places]

    async def clear(self, role: Role) -> None:
        """Kill the remaining processes of a role; a step may outlive its srun."""
        await super().clear(role)
        jobs = ",".join(nodes.job for nodes in self.nodes.values())
        listed = await asyncio.to_thread(output, ["squeue", "-hs", "-j", jobs, "-o", "%i %j"])
        steps = [line.split() for line in listed.splitlines()]
        if mine := [step for step, name in steps if name in role.names]:
            await asyncio.to_thread(output, ["scancel", "--signal=KILL", *mine])

    # ------------------------------------------------------------ before the start

    async def _probe(self) -> None:
        """Read the GPUs of every node, and check that every node has the run's files.

        Raises:
            UserError: a node did not reply in time, or does not have a file.
        """
        name = f".seen-{secrets.token_hex(4)}"
        folders = (self.paths.root, name_dir(self.config))
        marks = {folder / name: folder for folder in folders}
        files = [*marks, *needed_paths(self.config)]
        for mark in marks:
            mark.touch()
        try:
            probes = [self._probe_part(nodes, files) for nodes in self.nodes.values()]
            answers = zip(self.nodes.values(), await asyncio.gather(*probes), strict=True)
        finally:
            for mark in marks:
                mark.unlink(missing_ok=True)
        for nodes, line in [(nodes, line) for nodes, lines in answers for line in lines]:
            host, _, rest = line.partition(" ")
            if rest.startswith("lacks "):
                path = Path(rest.removeprefix("lacks "))
                raise not_shared(marks.get(path, path), self.nodes["head"].hosts[0], host)
            self.devices[nodes.job, host] = [] if rest == "-" else rest.split(",")
        expected = [(nodes.job, host) for nodes in self.nodes.values() for host in nodes.hosts]
        if silent := [host for job, host in expected if (job, host) not in self.devices]:
            start_s = f"launcher.slurm.start_s={self.options.slurm.start_s:g} s"
            what = f"no answer from {', '.join(sorted({*silent}))} within {start_s}"
            fix = f"See `scontrol show node {silent[0]}`, exclude it (--exclude={silent[0]})"
            raise UserError(f"{what}. {fix}, or increase start_s.")

    async def _probe_part(self, nodes: Nodes, files: Sequence[Path]) -> list[str]:
        """Run PROBE on the nodes of a part; return the lines printed within `start_s`."""
        size = str(len(nodes.hosts))
        start_s = self.options.slurm.start_s
        step = nodes.srun("-N", size, "-n", size, "--ntasks-per-node=1", "--job-name=probe")
        words = [*step, "sh", "-c", PROBE, "probe", *files]
        with Wait("nodes", owner="launcher-0", on="Slurm"):
            printed = await asyncio.to_thread(output, words, start_s, stderr=None)
        return [line.strip() for line in printed.splitlines()]
