"""The Slurm launcher: runs on the first node of a job and starts every role as a step of the job.

A role's number determines its node among the nodes of its part. Steps share the CPUs of a node.
"""

import asyncio
import math
import os
import secrets
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from arealite.api.experiment_config import ExperimentConfig, name_dir
from arealite.base.errors import UserError
from arealite.base.signals import OWN_STOP
from arealite.ext.clusters.placement import counts, needed_paths, not_shared
from arealite.ext.clusters.slurm_job import PARTS, output, parts
from arealite.impl.launcher.local import LocalLauncher
from arealite.impl.launcher.processes import PARENT
from arealite.impl.launcher.supervisor import Role
from arealite.system.health.waits import Wait

PROBE = Path(__file__).with_name("slurm_probe.sh").read_text()
"""Shell script that runs on each node first. On a network file system, a new file may appear
seconds later."""


@dataclass(frozen=True, kw_only=True)
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
            node_list = os.environ[f"SLURM_JOB_NODELIST{suffix}"]
            job = os.environ[f"SLURM_JOB_ID{suffix}"]
            cpus_per_node = os.environ[f"SLURM_JOB_CPUS_PER_NODE{suffix}"]
        except KeyError as error:
            raise UserError(
                f"launcher.type=slurm outside of a Slurm job ({error} is not set). "
                "Submit a job: arealite launch slurm CONFIG [key=value …]"
            ) from error
        return cls(
            group=[] if is_alone else [f"--het-group={number}"],
            job=job,
            hosts=output(["scontrol", "show", "hostnames", node_list]).split(),
            cpus=_fewest_cpus(cpus_per_node),
        )

    def srun(self, *words: str) -> list[str]:
        """Return the first words of a step's command line."""
        return [
            "srun",
            *self.group,
            "--overlap",
            "--mem=0",
            "--unbuffered",
            f"--cpus-per-task={self.cpus}",
            *words,
        ]


def _fewest_cpus(cpus_per_node: str) -> int:
    """Return the smallest number in SLURM_JOB_CPUS_PER_NODE, as in "8(x2),16"."""
    groups = cpus_per_node.split(",")
    return min(int(group.partition("(")[0]) for group in groups)


class Place(NamedTuple):
    """The place of one process in the job."""

    nodes: Nodes
    """The nodes of its part."""
    host: str
    number: int
    """Its number among the processes of its role on this host."""


class SlurmLauncher(LocalLauncher):
    """Starts, restarts and ends the roles of one experiment as steps of this job."""

    stop = signal.SIGUSR2
    """SIGTERM is not used: scancel sends it to all processes, and roles must end in order."""
    is_remote = True

    def __init__(self, config: ExperimentConfig) -> None:
        super().__init__(config)
        names = list(parts(config))
        is_alone = len(names) == 1
        self.nodes = {part: Nodes.of(number, is_alone) for number, part in enumerate(names)}
        self.devices = dict[tuple[str, str], list[str]]()
        """The GPUs that each part has on each of its hosts, by job and host."""

    def run(self) -> int:
        """Run until the end, after every node has reported that it has the run's folders."""
        asyncio.run(self._probe())
        return super().run()

    def place(self, role: str, index: int) -> Place:
        """Return the place of a process; its part's nodes get equally many, in their order."""
        nodes = self.nodes.get(PARTS[role], self.nodes["head"])
        num_processes = counts(self.config)[role]
        per_host = math.ceil(num_processes / len(nodes.hosts))
        return Place(
            nodes=nodes,
            host=nodes.hosts[index // per_host],
            number=index % per_host,
        )

    def command(self, role: str, index: int) -> list[str]:
        """Return the step that runs one role. The datapipe runs outside of steps."""
        variables = [f"{OWN_STOP}=1"]
        command = super().command(role, index)
        if role not in PARTS:
            return ["env", *variables, *command]
        nodes, host, _ = self.place(role, index)
        if self.devices[nodes.job, host]:
            gpus = ",".join(self._gpus(role, index))
            variables.append(f"CUDA_VISIBLE_DEVICES={gpus}")
        step = nodes.srun("-N1", "-n1", f"--nodelist={host}", f"--job-name={role}-{index}")
        return [*step, "env", "-u", PARENT, *variables, *command]

    def _gpus(self, role: str, index: int) -> list[str]:
        """Return the GPUs of a process.

        The first GPUs of a host belong to its ranks, one GPU per rank; every rank sees all of them.
        Servers share the other GPUs evenly.
        """
        nodes, host, number = self.place(role, index)
        gpus = self.devices[nodes.job, host]
        num_servers = self._num_processes("llm_server", nodes, host)
        num_rank_gpus = len(gpus)
        if num_servers:
            num_rank_gpus = self._num_processes("trainer", nodes, host)
        if role == "trainer":
            return gpus[:num_rank_gpus]
        if role == "llm_server":
            per_server = (len(gpus) - num_rank_gpus) // max(num_servers, 1)
            begin = num_rank_gpus + number * per_server
            return gpus[begin : begin + per_server]
        return []

    def _num_processes(self, role: str, nodes: Nodes, host: str) -> int:
        """Return the number of processes of a role on a host of a part of the job."""
        num_processes = counts(self.config).get(role, 0)
        places = [self.place(role, index) for index in range(num_processes)]
        return sum(
            (place_nodes, place_host) == (nodes, host) for place_nodes, place_host, _ in places
        )

    async def rank_places(self) -> tuple[str, Sequence[int]]:
        places = [self.place("trainer", rank) for rank in range(self.options.trainer_ranks)]
        return places[0].host, [place.number for place in places]

    async def clear(self, role: Role) -> None:
        """Kill the remaining processes of a role; a step may outlive its srun."""
        await super().clear(role)
        jobs = ",".join(nodes.job for nodes in self.nodes.values())
        listing = await asyncio.to_thread(output, ["squeue", "-hs", "-j", jobs, "-o", "%i %j"])
        steps = [line.split() for line in listing.splitlines()]
        steps_of_role = [step for step, name in steps if name in role.names]
        if steps_of_role:
            await asyncio.to_thread(output, ["scancel", "--signal=KILL", *steps_of_role])

    # ------------------------------------------------------------ before the start

    async def _probe(self) -> None:
        """Read the GPUs of every node, and check that every node has the run's files.

        Raises:
            UserError: a node did not reply in time, or does not have a file.
        """
        mark_name = f".seen-{secrets.token_hex(4)}"
        folders = (self.paths.root, name_dir(self.config))
        folders_by_mark = {folder / mark_name: folder for folder in folders}
        files = [*folders_by_mark, *needed_paths(self.config)]
        for mark in folders_by_mark:
            mark.touch()
        try:
            probes = [self._probe_part(nodes, files) for nodes in self.nodes.values()]
            outputs = await asyncio.gather(*probes)
        finally:
            for mark in folders_by_mark:
                mark.unlink(missing_ok=True)
        for nodes, lines in zip(self.nodes.values(), outputs, strict=True):
            for line in lines:
                host, _, answer = line.partition(" ")
                if answer.startswith("lacks "):
                    path = Path(answer.removeprefix("lacks "))
                    missing = folders_by_mark.get(path, path)
                    this_host = self.nodes["head"].hosts[0]
                    raise not_shared(missing, this_host, host)
                gpus = [] if answer == "-" else answer.split(",")
                self.devices[nodes.job, host] = gpus
        self._check_answers()

    def _check_answers(self) -> None:
        """Check that every node has reported its GPUs.

        Raises:
            UserError: a node did not reply in time.
        """
        silent = [
            host
            for nodes in self.nodes.values()
            for host in nodes.hosts
            if (nodes.job, host) not in self.devices
        ]
        if silent:
            names = ", ".join(sorted({*silent}))
            start_s = self.options.slurm.start_s
            raise UserError(
                f"no answer from {names} within launcher.slurm.start_s={start_s:g} s. "
                f"See `scontrol show node {silent[0]}`, exclude it (--exclude={silent[0]}), "
                "or increase start_s."
            )

    async def _probe_part(self, nodes: Nodes, files: Sequence[Path]) -> list[str]:
        """Run PROBE on the nodes of a part; return the lines printed within `start_s`."""
        num_nodes = str(len(nodes.hosts))
        start_s = self.options.slurm.start_s
        step = nodes.srun(
            "-N",
            num_nodes,
            "-n",
            num_nodes,
            "--ntasks-per-node=1",
            "--job-name=probe",
        )
        words = [*step, "sh", "-c", PROBE, "probe", *files]
        with Wait(event="nodes", owner="launcher-0", on="Slurm"):
            answers = await asyncio.to_thread(output, words, start_s, stderr=None)
        return [line.strip() for line in answers.splitlines()]
