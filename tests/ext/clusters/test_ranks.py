"""Environment variables that make `train` a trainer rank: wrong ones are refused at once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from arealite.cli import main as cli
from arealite.ext.clusters import torchrun

JOB = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
OTHERS = ("TORCHELASTIC_RUN_ID", "PET_NPROC_PER_NODE", "LOCAL_WORLD_SIZE", "LOCAL_RANK")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove all variables of ranks; the store variable is restored at the end of the test."""
    for name in (*JOB, *OTHERS, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Return a command line of `train` whose model does not exist: the ranks are checked first."""
    folders = [f"cluster.name_root={tmp_path / 'names'}", f"cluster.run_root={tmp_path / 'runs'}"]
    return ["train", "model.path=gone", "trainer.type=sft", "dataset.train=gone.jsonl", *folders]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"WORLD_SIZE": "", "MASTER_ADDR": "", "MASTER_PORT": ""},
            "RANK=0 is set, but WORLD_SIZE, MASTER_ADDR, MASTER_PORT not.",
        ),
        ({"WORLD_SIZE": ""}, "RANK=0 is set, but WORLD_SIZE not."),
        ({"MASTER_ADDR": ""}, "RANK=0 is set, but MASTER_ADDR not."),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two must be a whole number."),
        ({"RANK": "-1"}, "RANK=-1 must be a whole number."),
        ({"RANK": ""}, "RANK= must be a whole number."),
        ({"RANK": "2"}, "RANK=2 must be below WORLD_SIZE=2."),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 must be 1 to 65535."),
        ({"MASTER_PORT": "x"}, "MASTER_PORT=x must be a whole number."),
        ({"PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE=8: this command runs one rank per pod."),
    ],
)
def test_wrong_variable_of_a_rank_is_one_line(
    environment: pytest.MonkeyPatch,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    says: str,
) -> None:
    for name, value in (JOB | changes).items():
        environment.setenv(name, value)
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {says}") and shown.err.count("\n") == 1


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_port_of_the_ranks_in_use_is_one_line(
    environment: pytest.MonkeyPatch,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    used_port: int,
) -> None:
    for name, value in (JOB | {"MASTER_PORT": str(used_port)}).items():
        environment.setenv(name, value)
    assert cli.main(words) == 2
    shown = capsys.readouterr().err
    assert f"MASTER_PORT={used_port}: rank 0 cannot listen on it: Address already in use" in shown
    assert shown.count("\n") == 1


def test_rank_of_another_host_needs_a_reachable_datapipe(
    environment: pytest.MonkeyPatch, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """192.0.2.1 belongs to no host: it is reserved for documentation."""
    for name, value in (JOB | {"RANK": "1", "MASTER_ADDR": "192.0.2.1"}).items():
        environment.setenv(name, value)
    assert cli.main(words) == 2
    shown = capsys.readouterr().err
    assert "MASTER_ADDR=192.0.2.1 is another host, but cluster.host=127.0.0.1" in shown
    assert "Set cluster.host=auto." in shown and shown.count("\n") == 1


def test_rank_is_read_as_torchrun_and_a_pytorchjob_set_it() -> None:
    assert torchrun.read_rank(JOB) == (0, 2)
    assert torchrun.read_rank(JOB | {"RANK": "1", "PET_NPROC_PER_NODE": "auto"}) == (1, 2)
    agents = {"TORCHELASTIC_RUN_ID": "run", "PET_NPROC_PER_NODE": "2"}
    assert torchrun.read_rank(JOB | agents) == (0, 2)


def test_dry_run_ignores_the_variables_of_ranks(
    environment: pytest.MonkeyPatch, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    environment.setenv("RANK", "0")
    assert cli.main([*words, "--dry-run"]) == 2
    assert "gone" in (shown := capsys.readouterr().err) and "RANK" not in shown
