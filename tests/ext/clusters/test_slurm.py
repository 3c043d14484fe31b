"""Script, places and GPUs of a run on Slurm, without a Slurm; see also tests/clusters."""

from __future__ import annotations

from pathlib import Path

import pytest

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.launcher import LauncherConfig, SlurmConfig
from arealite.api.trainer import TrainerConfig
from arealite.api.trial import ClusterConfig
from arealite.base.errors import UserError
from arealite.ext.clusters import slurm, slurm_job
from arealite.ext.clusters.slurm import SlurmLauncher
from arealite.ext.clusters.slurm_job import script
from arealite.impl.launcher.processes import rank_environments


def experiment(root: Path, *, kind: str = "async_ppo", **options: object) -> ExperimentConfig:
    return ExperimentConfig(
        cluster=ClusterConfig(run_root=str(root), name_root=str(root / "names"), host="auto"),
        trainer=TrainerConfig(type=kind),
        launcher=LauncherConfig(**options),  # type: ignore[arg-type]
    )


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Set the environment of a job of two parts: a head, and two nodes of other sizes."""
    told = {0: ("7", "h", "4"), 1: ("8", "n1,n2", "8,16(x1)")}
    for number, (identity, hosts, cpus) in told.items():
        monkeypatch.setenv(f"SLURM_JOB_ID_HET_GROUP_{number}", identity)
        monkeypatch.setenv(f"SLURM_JOB_NODELIST_HET_GROUP_{number}", hosts)
        monkeypatch.setenv(f"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_{number}", cpus)
    monkeypatch.setattr(slurm, "output", lambda words: words[-1].replace(",", "\n"))
    return monkeypatch


def test_part_without_arguments_is_on_the_heads_nodes(tmp_path: Path):
    parts = SlurmConfig(every=["--account=a"], trainers=["--nodes=2", "--gres=gpu:8"])
    text = script(experiment(tmp_path, llm_servers=1, slurm=parts), ["run", "my file"])
    assert text.count("#SBATCH hetjob") == 1 and text.count("#SBATCH --account=a") == 2
    assert "# head, servers, workers\n" in text and "# trainers\n" in text
    assert text.index("--requeue") < text.index("hetjob") < text.index("--gres=gpu:8")
    assert text.endswith("exec run 'my file'\n")


def test_offline_run_has_no_worker_part(tmp_path: Path):
    parts = SlurmConfig(servers=["--nodes=9"], workers=["--nodes=9"])
    text = script(experiment(tmp_path, kind="sft", llm_servers=1, slurm=parts), ["run"])
    assert "hetjob" not in text and "# head, trainers\n" in text


async def test_processes_fill_their_nodes_in_order(tmp_path: Path, job: pytest.MonkeyPatch):
    parts = SlurmConfig(trainers=["--nodes=2"])
    launcher = SlurmLauncher(experiment(tmp_path, trainer_ranks=4, slurm=parts))
    launcher.devices = {("8", "n1"): ["0", "1"], ("8", "n2"): ["0", "1"]}
    address, local = await launcher.rank_places()
    ranks = rank_environments(4, address=address, local=local)
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "0", "1"]
    assert {rank["MASTER_ADDR"] for rank in ranks} == {"n1"}
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"4"}
    step = launcher.command("trainer", 3)
    assert {"--het-group=1", "--nodelist=n2", "--cpus-per-task=8"} <= {*step}
    assert "CUDA_VISIBLE_DEVICES=0,1" in step, "all ranks of a node see all, for LOCAL_RANK"
    assert launcher.command("datapipe", 0)[0] == "env", "no step: it is the supervisor's child"


@pytest.mark.parametrize(
    ("ranks", "servers", "gpus", "of_rank", "of_servers"),
    [
        (2, 2, "01234567", "01", ["234", "567"]),
        (1, 1, "01", "0", ["1"]),
        (2, 0, "0123", "0123", []),
        (1, 2, "0", "0", ["", ""]),
    ],
)
def test_each_rank_has_a_gpu_and_servers_share_the_rest(
    tmp_path: Path,
    job: pytest.MonkeyPatch,
    ranks: int,
    servers: int,
    gpus: str,
    of_rank: str,
    of_servers: list[str],
):
    for name in ("ID", "NODELIST", "CPUS_PER_NODE"):
        job.setenv(f"SLURM_JOB_{name}", {"ID": "1", "NODELIST": "h"}.get(name, "8"))
    launcher = SlurmLauncher(experiment(tmp_path, trainer_ranks=ranks, llm_servers=servers))
    launcher.devices = {("1", "h"): [*gpus]}

    def seen(role: str, index: int) -> str:
        command = launcher.command(role, index)
        assert not any("--het-group" in word for word in command)
        words = [word for word in command if word.startswith("CUDA_VISIBLE_DEVICES=")]
        return words[0].partition("=")[2].replace(",", "")

    assert {seen("trainer", rank) for rank in range(ranks)} == {of_rank}
    assert [seen("llm_server", i) for i in range(servers)] == of_servers
    assert seen("rollout", 0) == ""


def test_error_outside_of_a_job_has_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(UserError, match=r"outside of a Slurm job .*arealite launch slurm"):
        SlurmLauncher(experiment(tmp_path))


def test_late_command_returns_its_output_so_far() -> None:
    late = ["sh", "-c", "echo begin; exec sleep 600"]
    assert slurm_job.output(late, 1.0) == "begin\n"
