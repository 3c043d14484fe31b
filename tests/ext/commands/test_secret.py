"""`arealite secret` prints the path or the token and rotates the secret between runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from arealite.cli.main import main
from arealite.system.names.name_registry import NameRegistry, create_secret, read_secret


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return ["secret", f"cluster.name_root={tmp_path}", "cluster.user=u", "trial_name=a"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "u/arealite/a"


def test_trial_that_never_started_has_no_secret(
    words: list[str], capsys: pytest.CaptureFixture[str]
):
    for more in ([], ["--rotate"], ["--token"]):
        assert main([*words, *more]) == 2
        said = capsys.readouterr()
        assert said.err.startswith("error: ") and "has no secret" in said.err and not said.out


def test_secret_prints_its_path_or_the_token(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = create_secret(folder)
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said == f"{folder / 'secret'}\n" and made.key.hex() not in said
    assert main([*words, "--token"]) == 0
    assert capsys.readouterr().out == made.token + "\n"


def test_secret_is_not_rotated_during_a_run(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = create_secret(folder)
    NameRegistry(root=folder).put("datapipe", "0", {"address": "tcp://127.0.0.1:1"})
    assert main([*words, "--rotate"]) == 2
    assert "datapipe 0 uses the secret. Stop the trial first." in capsys.readouterr().err
    assert read_secret(folder) == made
    NameRegistry(root=folder).remove("datapipe", "0")
    assert main([*words, "--rotate"]) == 0
    assert read_secret(folder) not in (None, made)
