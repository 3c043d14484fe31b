"""The docker runtime with a real Docker or podman, where one can run containers."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from arealite.ext.wrappers.play import make

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[4]
IMAGE = "localhost/arealite-test:latest"
REASON = "needs Docker or podman that can run containers"


def mounts() -> list[str]:
    """Return arguments of `docker run` that mount this machine's Python and checkout."""
    folders = {Path(name) for name in ("/usr", "/lib", "/lib64", "/bin", "/etc")}
    folders |= {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), ROOT}
    inner = {one for one in folders if folders & {*one.parents}}
    found = sorted(str(one) for one in folders - inner if one.exists())
    return [*(f"--volume={one}:{one}:ro" for one in found), f"--env=PYTHONPATH={ROOT}"]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[str]:
    """Import an image without files that serves an environment; return the working program."""
    archive = tmp_path / "empty.tar"
    with tarfile.open(archive, "w") as tar:
        tar.addfile(tarfile.TarInfo("readme"), io.BytesIO())
    serve = [sys.executable, "-m", "arealite.cli.main", "serve", "env.type=reverse"]
    serve += ["server.host=0.0.0.0", "server.port=8000"]
    command = "CMD [" + ", ".join(f'"{word}"' for word in serve) + "]"
    for name in filter(shutil.which, ("docker", "podman")):
        tried = [name, "run", "--rm", "--pull=never", *mounts(), IMAGE, sys.executable, "-c", ""]
        is_working = works(name, "import", "--change", command, str(archive), IMAGE) and works(
            *tried
        )
        if is_working:
            yield name
        works(name, "image", "rm", "--force", IMAGE)
        if is_working:
            return
    pytest.skip(REASON)


def works(*words: str) -> bool:
    """Return whether a command succeeds."""
    return not subprocess.run(words, capture_output=True).returncode


def test_episode_is_played_in_a_real_container(program: str) -> None:
    runtime = {"type": "docker", "docker": program, "image": IMAGE, "docker_args": mounts()}
    with make("reverse", runtime=runtime | {"max_memory_mb": 2048}) as env:
        assert containers(program)
        env.reset(task="abc")
        assert env.step("cba")[0].reward == 1.0
    assert not containers(program)


def containers(program: str) -> list[str]:
    """List the containers of the tests' image."""
    words = [program, "ps", "--quiet", f"--filter=ancestor={IMAGE}"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
