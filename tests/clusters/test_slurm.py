"""`arealite launch slurm` on a real Slurm: runs end balanced after cancellation, requeue and
faults; invalid runs are a one-line error."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.clusters.conftest import SLOW_S, Site, slurm_cluster
from tests.waiting import until, until_exited

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

PARTS = (
    "launcher.trainer_ranks=2",
    "launcher.slurm.head=[--cpus-per-task=2]",
    "launcher.slurm.servers=[--cpus-per-task=2]",
    "launcher.slurm.trainers=[--nodes=2,--cpus-per-task=2]",
)
LONG = "trainer.ppo.total_steps=40", "trainer.ppo.checkpoint.every_steps=5"
ENDLESS = "trainer.ppo.total_steps=100000"


def pid(site: Site, name: str) -> int:
    """Return the process id in a role's vitals, or 0 without vitals."""
    files = (site.folder / "names").rglob(f"vitals/{name}.json")
    return next((int(json.loads(file.read_text())["pid"]) for file in files), 0)


def role(site: Site, name: str) -> psutil.Process:
    """Return the live process of a role."""
    return psutil.Process(pid(site, name))


def srun_of(site: Site, name: str) -> int:
    """Return the process id of the srun that waits for a role's step."""
    word = f"--job-name={name}"
    waiting = {
        process.pid: process.info["ppid"]
        for process in psutil.process_iter(["cmdline", "ppid"])
        if word in (process.info["cmdline"] or []) and str(site.paths.root) in process.cmdline()[-1]
    }
    for pid, parent in waiting.items():
        if parent not in waiting:
            return pid
    raise AssertionError(f"no srun of {name}")


def test_each_part_has_its_nodes_and_the_ledger_is_balanced(site: Site) -> None:
    job = site.submit(*PARTS)
    roles = {"rollout-0", "llm_server-0", "trainer-0", "trainer-1"}
    until(lambda: site.steps().keys() >= roles, what="all roles", seconds=SLOW_S)
    lines = site.slurm.command("squeue", "-hs", "-o", "%j %N").splitlines()
    places = dict(line.split() for line in lines)
    assert places["rollout-0"] == places["batch"], "without words of its own: on the head's node"
    assert len({places[name] for name in roles}) == 4
    assert site.until_ended(job) == "COMPLETED", site.logs()
    assert site.balanced().steps == 4
    server = (site.paths.logs / "llm_server-0.log").read_text()
    assert "server ready" in server and "http://127.0.0.1" not in server, "others must reach it"


def test_gpus_of_one_node_are_divided_between_roles(site: Site) -> None:
    job = site.submit("launcher.slurm.head=[--cpus-per-task=8,--gres=gpu:3]", ENDLESS)
    site.until_logged("step 1/")
    seen = {
        name: role(site, name).environ().get("CUDA_VISIBLE_DEVICES")
        for name in ("trainer-0", "rollout-0", "llm_server-*")
    }
    assert seen == {"trainer-0": "0", "rollout-0": "", "llm_server-*": "1,2"}
    site.slurm.command("scancel", "--batch", "--signal=TERM", job)
    site.until_ended(job)
    assert site.balanced().ok


def test_cancelled_run_writes_a_checkpoint_and_resumes_at_the_next_launch(site: Site) -> None:
    job = site.submit(*PARTS, *LONG)
    site.until_logged("step 5/")
    site.slurm.command("scancel", job)  # all processes get SIGTERM at once
    assert site.until_ended(job) == "CANCELLED"
    until(lambda: "run folder:" in site.log(), what=site.logs)
    assert "stopping after this step" in site.log(), site.logs()
    done = site.balanced().steps
    assert site.paths.checkpoints.joinpath(f"step-{done:06d}").is_dir(), "of the last step"
    again = site.submit(*PARTS, *LONG)
    assert site.until_ended(again) == "COMPLETED", site.logs()
    assert f"resuming after step {done} of 40" in site.log()
    assert site.balanced().steps == 40


@pytest.mark.parametrize("victim", ["trainer-1", "batch"])
def test_run_that_lost_a_node_is_requeued_and_resumes(
    victim: str, inputs: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """The node of the batch step runs the supervisor and the datapipe."""
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as slurm:
        site = Site(slurm, tmp_path, inputs)
        job = site.submit(*PARTS, *LONG)
        site.until_logged("step 10/")
        node = slurm.command("squeue", "-hs", "-o", "%j %N").split(f"{victim} ")[1].split()[0]
        slurm.lose_node(node)
        until(lambda: slurm.restarts(job) == 1, what=site.logs, seconds=SLOW_S)
        slurm.start_node(node)
        assert site.until_ended(job) == "COMPLETED", site.logs()
        assert "resuming after step" in site.log()
        assert site.balanced().steps == 40


def test_role_is_restarted_after_its_step_process_or_srun_dies(site: Site) -> None:
    job = site.submit(*PARTS, ENDLESS)
    site.until_logged("step 1/")
    site.slurm.command("scancel", "--signal=KILL", site.steps()["rollout-0"], check=False)
    site.until_logged("rollout-0 died (killed by SIGKILL")
    site.until_logged("started again (1 of 5)")

    left = [role(site, f"trainer-{rank}") for rank in (0, 1)]
    os.kill(srun_of(site, "trainer-0"), signal.SIGKILL)
    site.until_logged("trainer-0 died (killed by SIGKILL); started again")
    until_exited(*left)
    steps = lambda: int(site.balanced().steps)  # noqa: E731
    before = steps()
    until(lambda: steps() > before + 1, what=site.logs, seconds=SLOW_S)

    srun, worker = srun_of(site, "rollout-0"), role(site, "rollout-0")
    os.kill(srun, signal.SIGSTOP)  # srun cannot report the exit
    worker.kill()
    site.until_logged("rollout-0 is killed after")
    until(lambda: pid(site, "rollout-0") != worker.pid, what="another", seconds=SLOW_S)
    until_exited(srun)
    site.slurm.command("scancel", job)
    site.until_ended(job)
    assert site.balanced().ok


def test_print_shows_the_script_and_submits_nothing(site: Site) -> None:
    done = site.launch(*PARTS, "launcher.slurm.every=[--time=1:00:00]", "--print", PATH="/nowhere")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "#!/bin/bash" and lines.count("#SBATCH hetjob") == 2
    assert lines.count("#SBATCH --time=1:00:00") == 3 and "#SBATCH --requeue" in lines
    assert "# head, workers" in lines and "#SBATCH --nodes=2" in lines
    assert lines[-1].endswith(f"train {site.paths.config}")
    assert not site.paths.root.exists()


@pytest.mark.parametrize(
    ("words", "environment", "says"),
    [
        ([], {"PATH": "/nowhere"}, "sbatch is not installed. Run this on a login node"),
        (
            ["launcher.slurm.every=[--partition=gpu]"],
            {},
            "launcher.slurm.head (or every): no partition gpu is up. Partitions that are up: main.",
        ),
        (
            [*PARTS, "launcher.slurm.servers=[--nodes=2]"],
            {},
            "partition main has 4 nodes, the parts of the job need 5: ",
        ),
        (
            ["launcher.slurm.head=[--cpus-per-task=99]"],
            {},
            "sbatch refused the job: allocation failure",
        ),
        (["trainer.ppo.batch_size=6"], {}, "group_size"),
    ],
)
def test_invalid_job_is_refused_before_it_is_submitted(
    site: Site, words: list[str], environment: dict[str, str], says: str
) -> None:
    done = site.launch(*words, **environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not site.slurm.command("squeue", "-h")


def test_slurm_launcher_outside_of_a_job_is_refused(site: Site) -> None:
    site.submit()
    done = site.arealite("train", str(site.paths.config), "trial_name=other", "launcher.type=slurm")
    assert done.returncode == 2
    assert "error: launcher.type=slurm outside of a Slurm job" in done.stderr


def test_slurm_without_partitions_or_controller_is_a_user_error(
    inputs: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=("n1",)) as slurm:
        slurm.command("scontrol", "delete", "partition=main")
        done = Site(slurm, tmp_path, inputs).launch()
        assert done.returncode == 2
        assert done.stderr.startswith("error: this Slurm has no partition"), done.stderr
        slurm.daemons["slurmctld"].kill()
        done = Site(slurm, tmp_path, inputs).launch()
        assert done.returncode == 2
        assert done.stderr.startswith("error: Slurm does not respond: "), done.stderr


def test_error_of_an_unshared_folder_names_both_nodes(
    inputs: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=("n1", "n2")) as slurm:
        site = Site(slurm, tmp_path, inputs)
        (tmp_path / "names").mkdir()
        slurm.lose_node("n2")
        slurm.start_node("n2", own=[tmp_path / "names"])
        slurm.until_idle()
        job = site.submit("launcher.slurm.trainers=[--nodes=1]")
        assert site.until_ended(job) == "FAILED"
        names = next((tmp_path / "names").glob("*/e2e/t"))
        assert f"error: {names} is not shared between n1 and n2. " in site.log()


def test_error_names_the_node_that_does_not_answer(
    inputs: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=("n1", "n2")) as slurm:
        site = Site(slurm, tmp_path, inputs)
        slurm.daemons["n2"].send_signal(signal.SIGSTOP)
        trainers = "launcher.slurm.trainers=[--nodelist=n2]"
        job = site.submit("launcher.slurm.start_s=3", trainers)
        site.until_logged("error: no answer from n2 within launcher.slurm.start_s=3 s")
        slurm.daemons["n2"].send_signal(signal.SIGCONT)
        assert site.until_ended(job) == "FAILED"
