"""A real Slurm in a temporary folder, of nodes that share this machine but each have a hostname, an
address and, if wanted, separate folders; all its processes are killed at the end.

Needs Debian's `slurm-wlm` and root (hostnames and folders are namespaces): `missing()` returns the
missing part.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from arealite.impl.launcher.processes import free_port
from tests.waiting import until

PROGRAMS = "munged", "slurmctld", "slurmd", "sbatch", "unshare"
CONF = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# Credentials of 5 s: a requeued job waits for as long as the old ones are good.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Heterogeneous jobs are started by the backfill scheduler only.
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
MinJobAge=3600
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%h
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%h.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%h.log
GresTypes=gpu
"""


def missing() -> str:
    """Return the reason why Slurm cannot start here, or ""."""
    if lacking := [name for name in PROGRAMS if not shutil.which(name)]:
        return f"no {', '.join(lacking)} on the PATH (Debian: apt-get install slurm-wlm)"
    if os.geteuid() != 0:
        return "the nodes' hostnames and folders are namespaces, which need root"
    probe = subprocess.run(["unshare", "-mu", "true"], capture_output=True, text=True)
    return f"unshare -mu: {probe.stderr.strip()}" if probe.returncode else ""


@dataclass
class Slurm:
    """A live cluster; its commands use `environment`."""

    folder: Path
    nodes: tuple[str, ...]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def command(self, *words: str, check: bool = True) -> str:
        """Run a Slurm command; return its output."""
        done = subprocess.run(
            words, capture_output=True, text=True, env=self.environment, timeout=60
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                words, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )

    def start_node(self, name: str, *, own: Sequence[Path] = ()) -> None:
        """Start a node; `own` are folders that it does not share with other nodes."""
        hosts = self.folder / f"hosts-{name}"
        lines = [f"127.0.0.{i} {node}" for i, node in enumerate(self.nodes, start=1)]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        mounts = [f"mount -t tmpfs none {path}" for path in own]
        begin = [f"hostname {name}", f"mount --bind {hosts} /etc/hosts", *mounts]
        script = " && ".join([*begin, f"exec slurmd -D -f {self.folder}/slurm.conf"])
        self.start(name, "unshare", "-mu", "sh", "-c", script)

    def lose_node(self, name: str) -> None:
        """Kill a node's daemon and all processes that it started."""
        daemon = self.daemons.pop(name)
        for process in living_in(namespace(daemon.pid)):
            process.kill()
        daemon.wait()

    def restarts(self, job: str) -> int:
        return int(self.command("scontrol", "show", "job", job).split("Restarts=")[1].split()[0])

    def state(self, node: str) -> str:
        return self.command("sinfo", "-h", "-n", node, "-o", "%T")

    def until_idle(self) -> None:
        until(
            lambda: all(self.state(node) == "idle" for node in self.nodes),
            what=lambda: f"idle nodes: {self.command('sinfo', '-Nl')}",
        )

    def job_state(self, job: str) -> str:
        shown = self.command("scontrol", "show", "job", job, check=False)
        return shown.partition("JobState=")[2].partition(" ")[0]

    def cancel_all(self) -> None:
        """Kill all jobs, and wait until their nodes are free."""
        jobs = self.command("squeue", "-h", "-o", "%A").split()
        for job in jobs:
            self.command("scancel", "--signal=KILL", "--full", job, check=False)
            self.command("scancel", job, check=False)
        until(lambda: not self.command("squeue", "-h"), what="the jobs' end", seconds=40)

    def end(self) -> None:
        """Cancel all jobs, then kill the daemons and their remaining processes."""
        with suppress(BaseException):
            self.cancel_all()
        spaces = {namespace(self.daemons[name].pid) for name in self.nodes if name in self.daemons}
        for daemon in reversed(self.daemons.values()):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons.values():
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in [each for space in spaces for each in living_in(space)] + self.strays():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def strays(self) -> list[psutil.Process]:
        """List live processes that name this cluster's folder or were started in it."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            with suppress(psutil.Error):
                named = any(str(self.folder) in word for word in process.info["cmdline"] or [])
                if named or process.environ().get("SLURM_CONF", "").startswith(str(self.folder)):
                    found.append(process)
        return [each for each in found if each.pid != os.getpid()]


def namespace(pid: int) -> str:
    """Return the namespace that identifies the processes of a node; "" for a dead process."""
    try:
        return os.readlink(f"/proc/{pid}/ns/uts")
    except OSError:
        return ""


def living_in(space: str) -> list[psutil.Process]:
    """List the processes of a node: its daemon and the daemon's descendants."""
    if space in ("", namespace(os.getpid())):
        return []
    return [each for each in psutil.process_iter() if namespace(each.pid) == space]


@contextmanager
def real_slurm(
    folder: Path,
    *,
    nodes: Sequence[str] = ("n1", "n2", "n3", "n4"),
) -> Iterator[Slurm]:
    """Start a cluster of idle nodes with 16 CPUs and 4 simulated GPUs each; stop it afterwards."""
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    lines = [CONF.format(folder=folder, port=free_port())]
    for i, node in enumerate(nodes, start=1):
        address = f"NodeAddr=127.0.0.{i} NodeHostname={node} Port={free_port()}"
        lines.append(f"NodeName={node} {address} CPUs=16 RealMemory=8000 Gres=gpu:4")
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    (folder / "gres.conf").write_text("Name=gpu File=/dev/tty[0-3]\n")
    slurm = Slurm(folder, tuple(nodes))
    try:
        files = [f"--{what}={folder}/munge.{what}" for what in ("socket", "pid-file", "seed-file")]
        log_and_key = [f"--log-file={folder}/munge.log", f"--key-file={folder}/key"]
        slurm.start("munged", "munged", "-F", "--force", *files, *log_and_key)
        until((folder / "munge.socket").exists, what="munge")
        slurm.start("slurmctld", "slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        for node in nodes:
            slurm.start_node(node)
        slurm.until_idle()
        yield slurm
    finally:
        slurm.end()
