"""A program plays each episode in a folder of its own; no process and no file is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from arealite.base.errors import UserError
from arealite.ext.harness.env import HarnessEnv
from tests.ext.harness.harnesses import (
    AGENTS,
    answer,
    collecting,
    failed,
    in_a_workers_loop,
    play,
    rewarded,
)
from tests.ext.sandbox.sandboxes import cell
from tests.fakes.experiment import lease
from tests.waiting import eventually, has_exited, until

pytestmark = pytest.mark.processes
PROGRAM = [sys.executable, str(AGENTS)]
CONFINED = {
    "command": [os.path.realpath(sys.executable), str(AGENTS)],
    "sandbox": True,
    "readable": [str(AGENTS)],
}
REWARD = "open('reward.json', 'w').write('{}')"


@pytest.fixture(params=["free", "confined"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of a program that asks once and then runs the code of `extra_info`."""
    if request.param == "free":
        return {"command": PROGRAM}
    cell()  # skips where the host cannot confine
    return CONFINED


def with_code(options: dict[str, Any], code: str, **more: Any) -> dict[str, Any]:
    return {**options, "command": [*options["command"], textwrap.dedent(code)], **more}


@in_a_workers_loop
async def test_program_gets_its_task_and_its_answer_is_scored(options: dict[str, Any]) -> None:
    code = """\
        import json, os
        task = json.load(open(os.environ["AREALITE_TASK"]))
        assert (task["prompt"], task["task_id"]) == ("1+1=", "train-0"), task
        assert "ground_truth" not in task and os.listdir() == ["task.json"], task
        assert os.environ["HOME"] == os.getcwd() and "PYTHONPATH" not in os.environ
        assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"]
        assert (os.environ["OPENAI_MODEL"], os.environ["MINE"]) == ("policy", "1")
    """
    made = with_code(options, code, environment={"MINE": "1"})
    (header,) = (await play(**made)).headers
    assert (header.reward, header.turns) == (1.0, 1)


@in_a_workers_loop
async def test_words_are_filled_and_no_shell_reads_them() -> None:
    code = "open('reward.json', 'w').write(str(len(sys.argv[2])))"
    command = [*PROGRAM, code, "{prompt} {task_id} {level} {folder ${HOME} {{level}}"]
    (header,) = (await play(command=command, columns={"level": "$(id)"})).headers
    assert header.reward == len("1+1= train-0 $(id) {folder ${HOME} {level}")


@in_a_workers_loop
async def test_unknown_placeholder_ends_the_run() -> None:
    with pytest.raises(UserError, match="Unknown placeholder 'promt'"):
        await play(command=["true", "{promt}"])


@pytest.mark.parametrize(
    ("text", "reward", "parts"),
    [("0.5", 0.5, {}), ('{"reward": 2, "tests": 0.5}', 2.0, {"tests": 0.5}), ("1\\n", 1.0, {})],
)
@in_a_workers_loop
async def test_reward_is_read_from_a_file(
    options: dict[str, Any], text: str, reward: float, parts: dict[str, float]
) -> None:
    (header,) = (await play(**with_code(options, REWARD.format(text)))).headers
    assert rewarded(header) == (reward, parts)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("pass", "the reward is missing"),
        (REWARD.format("good"), "the reward is 'good'"),
        (REWARD.format("NaN"), "the reward is 'NaN'"),
        ("import os; os.mkfifo('reward.json')", "the reward is missing"),
        ("import os; os.symlink('/etc/hostname', 'reward.json')", "the reward is missing"),
        ("import os; os.mkdir('reward.json')", "the reward is missing"),
    ],
)
@in_a_workers_loop
async def test_file_without_a_reward_fails_the_episode(code: str, words: str) -> None:
    made = with_code({"command": PROGRAM}, code, reward_from="file")
    assert words in await failed("harness_failed", **made)


@in_a_workers_loop
async def test_reward_function_gets_the_output_and_the_folder(tmp_path: Path) -> None:
    file = tmp_path / "of_a_folder.py"
    file.write_text(
        "from pathlib import Path\n"
        "def made(completion, folder):\n"
        "    assert completion == 'thinking\\n2', completion\n"
        "    return len((Path(folder) / 'made.txt').read_text())\n"
    )
    from arealite.api.reward import RewardConfig
    from arealite.ext.rewards.config import FunctionRewardConfig

    reward = RewardConfig(type="function", function=FunctionRewardConfig(paths=[f"{file}:made"]))
    code = "open('made.txt', 'w').write('four')"
    made = with_code({"command": PROGRAM}, code, reward=reward)
    (header,) = (await play(**made)).headers
    assert rewarded(header) == (4.0, {"made": 4.0})


@in_a_workers_loop
async def test_program_posts_its_reward_and_gets_the_ground_truth(options: dict[str, Any]) -> None:
    code = """\
        key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        task = json.load(open(os.environ["TASK"]))
        data = json.dumps({"reward": float(task["ground_truth"])}).encode()
        url = os.environ["AREALITE_SESSION"] + "/reward"
        urllib.request.urlopen(urllib.request.Request(url, data, key)).read()
    """
    (header,) = (await play(**with_code(options, code, reward_from="posted"))).headers
    assert header.reward == 2.0


@in_a_workers_loop
async def test_failing_program_is_reported_with_its_last_lines(options: dict[str, Any]) -> None:
    made = with_code(options, "raise ValueError('bad plan')")
    detail = await failed("harness_failed", **made)
    assert "exit code 1" in detail and "ValueError: bad plan" in detail
    made = with_code(options, REWARD.format(1) + "; sys.exit(1)", ok_codes=[0, 1])
    assert (await play(**made)).headers[0].reward == 1.0


@in_a_workers_loop
async def test_only_the_end_of_a_long_output_is_kept(options: dict[str, Any]) -> None:
    code = "for _ in range(40): print('x' * 100_000)\nprint(7)"
    made = with_code(options, code, reward_from="last_line")
    assert (await play(**made)).headers[0].reward == 7.0


@in_a_workers_loop
async def test_nothing_is_left_of_a_program_that_is_cancelled(options: dict[str, Any]) -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '98765']).wait()"
    async with collecting(answer("2"), **with_code(options, code)) as made:
        env = made.parts[""].env
        assert isinstance(env, HarnessEnv) and env.programs
        root = env.programs._root
        task = asyncio.create_task(made.run(lease(), 0))
        (process,) = await eventually(lambda: sleeping(os.getpid()))
        assert [path.name for path in root.rglob("task.json")]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert has_exited(process)
        assert not [*root.rglob("task.json")]
    assert not root.exists()


WORKER = """\
import asyncio, json, sys, uvloop
from tests.fakes.experiment import lease
from tests.ext.harness.harnesses import collecting
async def main():
    async with collecting(**json.loads(sys.argv[1])) as made:
        await made.run(lease(), 0)
uvloop.run(main())
"""


def test_program_is_killed_with_its_worker(options: dict[str, Any]) -> None:
    made = with_code(options, "import subprocess; subprocess.Popen(['sleep', '98766']).wait()")
    worker = subprocess.Popen([sys.executable, "-c", WORKER, json.dumps(made)])
    try:
        until(lambda: sleeping(worker.pid), what="the program")
        (process,) = sleeping(worker.pid)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    until(lambda: has_exited(process), what="the end of the program")
    left = partial(Path(tempfile.gettempdir()).glob, f"arealite-harness-*-{worker.pid}-*")
    assert [*left()]

    async def next_worker() -> None:
        async with collecting(**options):
            assert not [*left()], "the next worker removes the folder"

    asyncio.run(next_worker())


def sleeping(parent: int) -> list[psutil.Process]:
    """Return the programs `sleep` below a process."""
    found = []
    for process in psutil.Process(parent).children(recursive=True):
        try:
            found += [process] if process.name() == "sleep" else []
        except psutil.NoSuchProcess:
            continue
    return found


@in_a_workers_loop
async def test_confined_program_reaches_only_the_gateway(tmp_path: Path) -> None:
    cell()
    secret = tmp_path / "secret"
    secret.write_text("x")
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code = f"""\
        import socket
        tried = {{}}
        def attempt(name, function, *args):
            try: tried[name] = str(function(*args))
            except OSError as error: tried[name] = type(error).__name__
        attempt("another port", socket.create_connection, ("127.0.0.1", {port}), 5)
        attempt("another host", socket.create_connection, ("192.0.2.1", 80), 5)
        attempt("a file", open, {str(secret)!r})
        attempt("a write", open, "/usr/x", "w")
        wrong = [name for name, end in tried.items() if not end.endswith("Error")]
        assert len(tried) == 4 and not wrong, tried
        {REWARD.format(1)}
    """
    assert (await play(**with_code(CONFINED, code))).headers[0].reward == 1.0
    server.close()
