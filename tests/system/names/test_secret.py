"""The secret of a trial is created once and readable only by its owner; keys derive from it."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from arealite.api.experiment_config import ExperimentConfig, ServerConfig, name_dir
from arealite.api.llm_server import ExternalServersConfig
from arealite.api.trial import ClusterConfig
from arealite.base.errors import UserError
from arealite.ext.commands.trial_key import rotate_secret
from arealite.system.names.name_registry import (
    SECRET_FILE,
    NameRegistry,
    Secret,
    create_secret,
    read_secret,
)


def config(tmp_path: Path, **cluster: bool) -> ServerConfig:
    return ServerConfig(cluster=ClusterConfig(name_root=str(tmp_path), user="u", **cluster))


def test_secret_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "names"
    assert read_secret(folder) is None
    made = create_secret(folder)
    assert create_secret(folder) == read_secret(folder) == made and len(made.key) == 32
    assert stat.S_IMODE((folder / SECRET_FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == [SECRET_FILE]


def test_processes_that_start_together_get_the_same_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        made = set(pool.map(create_secret, [tmp_path / "names"] * 64))
    assert len(made) == 1


def test_rotated_secret_has_another_token(tmp_path: Path) -> None:
    before = create_secret(tmp_path)
    after = rotate_secret(tmp_path)
    assert after == read_secret(tmp_path) and after.token != before.token
    assert stat.S_IMODE((tmp_path / SECRET_FILE).stat().st_mode) == 0o600


def test_derived_keys_differ_and_no_text_of_a_secret_shows_it(tmp_path: Path) -> None:
    secret = create_secret(tmp_path)
    assert len({secret.derive("a"), secret.derive("b"), secret.key}) == 3
    assert secret.key.hex() not in repr(secret) and secret.token not in repr(secret)


@pytest.mark.parametrize("text", ["", "xyz", "00" * 31, "00" * 33, "é" * 64])
def test_file_that_is_no_secret_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / SECRET_FILE).write_text(text)
    (tmp_path / SECRET_FILE).chmod(0o600)
    with pytest.raises(UserError, match=r"secret"):
        read_secret(tmp_path)


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660])
def test_secret_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    create_secret(tmp_path)
    (tmp_path / SECRET_FILE).chmod(mode)
    with pytest.raises(UserError, match=r"must be yours and of mode 0600"):
        read_secret(tmp_path)


def test_symbolic_link_instead_of_a_secret_is_refused(tmp_path: Path) -> None:
    other = create_secret(tmp_path / "other")
    assert isinstance(other, Secret)
    os.symlink(tmp_path / "other" / SECRET_FILE, tmp_path / SECRET_FILE)
    with pytest.raises(UserError, match="cannot be read"):
        read_secret(tmp_path)


def test_registry_creates_the_secret_at_first_use(tmp_path: Path) -> None:
    made = config(tmp_path)
    names = NameRegistry.of(made)
    assert not name_dir(made).exists()
    token = names.headers()["Authorization"].removeprefix("Bearer ")
    assert (
        NameRegistry.of(made).secret == names.secret
        and token == create_secret(name_dir(made)).token
    )


def test_without_security_there_is_no_secret(tmp_path: Path) -> None:
    made = config(tmp_path, security=False)
    assert NameRegistry.of(made).secret is None and NameRegistry.of(made).headers() == {}
    assert not name_dir(made).exists()


def test_external_servers_have_a_separate_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", "abc")
    cluster = ClusterConfig(name_root=str(tmp_path))
    external = ExternalServersConfig(api_key_env="THEIR_KEY")
    names = NameRegistry.of(ExperimentConfig(cluster=cluster, llm_server=external))
    assert names.headers("external") == {"Authorization": "Bearer abc"}
    assert names.headers("sglang")["Authorization"] != "Bearer abc"


@pytest.mark.parametrize("role", ["llm_server", "datapipe"])
def test_live_process_without_a_secret_is_refused(tmp_path: Path, role: str) -> None:
    names = NameRegistry.of(config(tmp_path))
    names.put(role, "a", {"address": "http://127.0.0.1:1"})
    with pytest.raises(UserError, match=f"{role} a in .* runs without a secret: .* Stop it"):
        names.check()
    names.put(role, "a", {"address": "http://127.0.0.1:1", "type": "external"})
    names.check()
