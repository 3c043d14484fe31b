"""Functions run in processes of their own: their main thread, their state, and their ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from arealite.api.reward import RewardConfig, make_reward
from arealite.api.task import Task
from arealite.base.errors import EpisodeError, UserError, failure_class
from arealite.base.outputs import ProtectedOutput
from arealite.ext.rewards import process_pool
from arealite.ext.rewards.config import FunctionRewardConfig
from tests.terminals import closed_pipe
from tests.waiting import eventually, has_exited, until, until_exited

SOURCE = '''
import asyncio, os, signal, sys, threading, time
from pathlib import Path

calls = []

def verified(completion, ground_truth):
    """As in many scripts of TRL users."""
    from math_verify import parse, verify
    try:
        return float(verify(parse(ground_truth), parse(completion)))
    except Exception:
        return 0.0

def in_main_thread(completion):
    return threading.current_thread() is threading.main_thread()

def runs_a_loop(completion):
    async def judge():
        await asyncio.sleep(0)
        return 0.25
    return asyncio.run(judge())

def process(completion):
    return os.getpid()

async def process_async(completion):
    return os.getpid()

def counted(completion):
    calls.append(completion)
    return len(calls)

def changes_row(completion, extra_info, tags):
    extra_info["seen"].append(1)
    tags.append("new")
    return len(extra_info["seen"]) + len(tags)

def changes_it_again(completion, extra_info, tags):
    return changes_row(completion, extra_info, tags)

def note_running(gate):
    written = Path(gate, "written")
    written.write_text(str(os.getpid()))
    written.rename(Path(gate, "running"))

def waits(completion, gate):
    note_running(gate)
    while not Path(gate, "open").exists():
        time.sleep(0.005)
    return 1.0

async def waits_async(completion, gate):
    note_running(gate)
    try:
        while not Path(gate, "open").exists():
            await asyncio.sleep(0.005)
    finally:
        Path(gate, "ended").write_text("")
    return 1.0

def ends(completion):
    if completion == "exit":
        os._exit(7)
    if completion == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()

def says(completion):
    print("printed \\x1b[31m by the function", flush=True)
    print("and on stderr", file=sys.stderr)
    return 1.0

def arguments(completion, first, second=None):
    return float(isinstance(first, list) and second is None)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mine") / "my_process_functions.py"
    file.write_text(SOURCE)
    return file


@pytest.fixture
async def made(file: Path) -> AsyncGenerator[Any]:
    """A maker of rewards that are closed after the test."""
    rewards = list[Any]()

    async def make(*names: str, **options: Any) -> Any:
        paths = [name if ":" in name else f"{file}:{name}" for name in names]
        options = {"timeout_s": 600.0, **options}
        function = FunctionRewardConfig(paths=paths, **options)
        rewards.append(make_reward(RewardConfig(type="function", function=function)))
        await rewards[-1].setup()
        return rewards[-1]

    yield make
    await asyncio.gather(*(reward.close() for reward in rewards))


def task(**info: Any) -> Task:
    return Task(task_id="train-0", prompt="2+2?", ground_truth="4", extra_info=info)


async def test_math_verify_in_a_function_verifies_as_in_plain_python(made: Any) -> None:
    reward = await made("verified")
    row = Task(task_id="t", prompt="p", ground_truth="$\\frac{1}{2}$", extra_info={})
    assert await reward.score_task("so it is $0.5$", row) == 1.0
    assert await reward.score_task("so it is $0.7$", row) == 0.0


async def test_function_runs_in_the_main_thread_and_may_run_an_event_loop(made: Any) -> None:
    reward = await made("in_main_thread", "runs_a_loop")
    score = await reward.score_task("", task())
    assert score.parts == {"in_main_thread": 1.0, "runs_a_loop": 0.25}


async def test_each_call_has_its_own_copy_of_the_row(made: Any) -> None:
    reward = await made("changes_row", "changes_it_again")
    row = Task(
        task_id="t",
        prompt="p",
        ground_truth="4",
        extra_info={"seen": []},
        columns={"tags": ["old"]},
    )
    scores = await asyncio.gather(*(reward.score_task("", row) for _ in range(8)))
    assert [score.parts for score in scores] == [{"changes_row": 3.0, "changes_it_again": 3.0}] * 8
    assert (row.extra_info, row.columns) == ({"seen": []}, {"tags": ["old"]})


async def test_rows_of_other_reward_classes_are_copies_too(file: Path, made: Any) -> None:
    module = file.with_name("my_reward_class.py")
    module.write_text(
        "from arealite.api.reward import Reward\n"
        "class Seen(Reward):\n"
        "    async def score(self, completion, ground_truth): return 0.0\n"
        "    async def score_task(self, completion, task):\n"
        "        task.extra_info['seen'].append(1)\n"
        "        return float(len(task.extra_info['seen']))\n"
    )
    reward = await made(f"{module}:Seen")
    row = task(seen=[])
    assert [await reward.score_task("", row) for _ in range(3)] == [1.0] * 3
    assert row.extra_info == {"seen": []}


async def test_state_lives_as_long_as_the_process(made: Any) -> None:
    reward = await made("counted", "ends")
    scores = [(await reward.score_task("", task())).parts for _ in range(3)]
    assert [score["counted"] for score in scores] == [1.0, 2.0, 3.0]
    pids = {score["ends"] for score in scores}
    assert len(pids) == 1 and pids != {os.getpid()}
    with pytest.raises(EpisodeError):
        await reward.score_task("kill", task())
    assert (await reward.score_task("", task())).parts["counted"] == 1.0


async def test_each_of_several_processes_makes_calls(made: Any, tmp_path: Path) -> None:
    reward = await made("waits", processes=2)
    gates = [tmp_path / "a", tmp_path / "b"]
    for gate in gates:
        gate.mkdir()
    calls = [asyncio.ensure_future(reward.score_task("", task(gate=str(g)))) for g in gates]
    await eventually(lambda: all((gate / "running").exists() for gate in gates))
    assert len({(gate / "running").read_text() for gate in gates}) == 2
    for gate in gates:
        (gate / "open").touch()
    assert await asyncio.gather(*calls) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("how", "says"),
    [("exit", ":ends ended its process (exit code 7)"), ("kill", "(killed by SIGKILL)")],
)
async def test_call_that_ends_its_process_fails_by_name_and_others_are_called_again(
    made: Any, how: str, says: str
) -> None:
    reward = await made("ends")
    first = await reward.score_task("", task())
    words = ["", "", how, "", "", ""]
    results = await asyncio.gather(
        *(reward.score_task(word, task()) for word in words), return_exceptions=True
    )
    until_exited(int(first))
    errors = [result for result in results if isinstance(result, BaseException)]
    assert isinstance(results[2], EpisodeError) and errors == [results[2]]
    assert failure_class(results[2]) == "reward_crash"
    assert says in str(results[2])
    assert {float(result) for result in results[3:]}.isdisjoint({float(first)})


async def test_answers_before_the_end_of_a_process_are_read_despite_a_failed_write(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_pool, "SHORT_S", 60.0)  # a process gets several calls at once
    reward = await made("ends")
    (path,) = reward.pool.paths
    process = (await reward.pool.call(path, {"completion": ""})).value
    answered = asyncio.ensure_future(reward.pool.call(path, {"completion": ""}))
    ending = asyncio.ensure_future(reward.pool.call(path, {"completion": "exit"}))
    await asyncio.sleep(0)  # both calls are sent
    until_exited(int(process))  # blocks the loop, so that no answer is read
    late = asyncio.ensure_future(reward.pool.call(path, {"completion": ""}))
    assert (await answered).value == process
    with pytest.raises(EpisodeError, match="ends ended its process"):
        await ending
    assert (await late).value != process


async def test_call_beyond_the_limit_fails_alone_and_its_process_is_replaced(
    made: Any, tmp_path: Path
) -> None:
    reward = await made("waits", "process", timeout_s=4.0)
    hanging = asyncio.ensure_future(reward.score_task("", task(gate=str(tmp_path))))
    await eventually((tmp_path / "running").exists)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "open").touch()
    queued = [
        asyncio.ensure_future(reward.score_task("", task(gate=str(tmp_path / "other"))))
        for _ in range(4)
    ]
    with pytest.raises(EpisodeError, match="has not returned after") as caught:
        await hanging
    assert failure_class(caught.value) == "reward_timeout"
    assert ":waits has not returned after reward.function.timeout_s=4 s" in str(caught.value)
    until_exited(int((tmp_path / "running").read_text()))
    assert [score.parts["waits"] for score in await asyncio.gather(*queued)] == [1.0] * 4


async def test_cancelled_call_ends_its_process_and_the_next_call_is_not_blocked(
    made: Any, tmp_path: Path
) -> None:
    reward = await made("waits")
    other = tmp_path / "other"
    other.mkdir()
    (other / "open").touch()
    hanging = asyncio.ensure_future(reward.score_task("", task(gate=str(tmp_path))))
    await eventually((tmp_path / "running").exists)
    following = asyncio.ensure_future(reward.score_task("", task(gate=str(other))))
    hanging.cancel()
    assert await asyncio.wait_for(following, 60) == 1.0
    until_exited(int((tmp_path / "running").read_text()))
    assert hanging.cancelled()


async def test_cancelled_coroutine_is_cancelled_in_its_process_which_lives(
    made: Any, tmp_path: Path
) -> None:
    reward = await made("waits_async")
    hanging = asyncio.ensure_future(reward.score_task("", task(gate=str(tmp_path))))
    await eventually((tmp_path / "running").exists)
    hanging.cancel()
    await eventually((tmp_path / "ended").exists)
    (tmp_path / "open").touch()
    pid = (tmp_path / "running").read_text()
    assert await reward.score_task("", task(gate=str(tmp_path))) == 1.0
    assert (tmp_path / "running").read_text() == pid


async def test_coroutine_beyond_the_limit_fails_and_others_of_its_process_go_on(
    made: Any, tmp_path: Path
) -> None:
    reward = await made("waits_async", timeout_s=1.5)
    with pytest.raises(EpisodeError, match=r":waits_async has not returned after") as caught:
        await reward.score_task("", task(gate=str(tmp_path)))
    assert failure_class(caught.value) == "reward_timeout"
    assert (tmp_path / "ended").exists()
    assert not has_exited(int((tmp_path / "running").read_text()))


async def test_coroutines_run_concurrently_in_one_process(made: Any, tmp_path: Path) -> None:
    reward = await made("waits_async")
    gates = [tmp_path / str(number) for number in range(20)]
    for gate in gates:
        gate.mkdir()
    calls = [asyncio.ensure_future(reward.score_task("", task(gate=str(g)))) for g in gates]
    await eventually(lambda: all((gate / "running").exists() for gate in gates))
    for gate in gates:
        (gate / "open").touch()
    assert await asyncio.gather(*calls) == [1.0] * 20
    assert len({(gate / "running").read_text() for gate in gates}) == 1


async def test_coroutine_begins_again_if_another_call_ends_its_process(
    made: Any, tmp_path: Path
) -> None:
    reward = await made("waits_async", "ends")
    waiting = asyncio.ensure_future(reward.score_task("", task(gate=str(tmp_path))))
    await eventually((tmp_path / "running").exists)
    pid = (tmp_path / "running").read_text()
    (tmp_path / "running").unlink()
    with pytest.raises(EpisodeError, match="ended its process"):
        await reward.score_task("kill", task(gate=str(tmp_path)))
    until_exited(int(pid))
    await eventually((tmp_path / "running").exists)
    (tmp_path / "open").touch()
    assert (await waiting).parts["waits_async"] == 1.0


def test_process_ends_with_a_worker_that_is_killed(file: Path, tmp_path: Path) -> None:
    program = f"""
import asyncio
from arealite.api.reward import RewardConfig, make_reward
from arealite.api.task import Task
from arealite.ext.rewards.config import FunctionRewardConfig
async def main():
    paths = ["{file}:waits"]
    function = FunctionRewardConfig(paths=paths)
    reward = make_reward(RewardConfig(type="function", function=function))
    extra_info = {{"gate": "{tmp_path}"}}
    task = Task(task_id="t", prompt="p", ground_truth="4", extra_info=extra_info)
    await reward.score_task("", task)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program]) as worker:
        until((tmp_path / "running").exists, what="the call")
        pid = int((tmp_path / "running").read_text())
        assert pid != worker.pid
        worker.send_signal(signal.SIGKILL)
    until_exited(pid)


async def test_output_of_a_function_is_forwarded(
    made: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    reward = await made("says")
    assert await reward.score_task("", task()) == 1.0
    out, err = capfd.readouterr()
    assert "printed \\x1b[31m by the function\n" in out, "control characters are replaced"
    assert "and on stderr\n" in err


async def test_process_leaves_nothing_open_at_its_end(
    made: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "always::ResourceWarning")
    reward = await made("process_async")
    pid = int(await reward.score_task("", task()))
    await reward.close()
    until_exited(pid)
    assert capfd.readouterr().err == ""


async def test_function_prints_although_the_outputs_are_closed(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "rollout-0.log"
    monkeypatch.setattr(ProtectedOutput, "log", log)
    kept = [os.dup(1), os.dup(2)]
    with closed_pipe() as writing:
        try:
            os.dup2(writing, 1)
            os.dup2(writing, 2)
            reward = await made("says")
            score = await reward.score_task("", task())
        finally:
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
            for descriptor in kept:
                os.close(descriptor)
    assert score == 1.0
    text = log.read_text()
    assert "by the function\n" in text and "and on stderr\n" in text


async def test_row_that_cannot_be_sent_fails_the_episode(made: Any) -> None:
    reward = await made("arguments")
    assert await reward.score_task("", task(first=(1, 2))) == 1.0
    with pytest.raises(EpisodeError, match=r"arguments: the row cannot be sent"):
        await reward.score_task("", task(first=object()))


async def test_module_that_only_fails_in_the_process_is_refused_at_the_start(
    file: Path, made: Any
) -> None:
    module = file.with_name("my_worker_only.py")
    module.write_text(
        f"import os\nif os.getpid() != {os.getpid()}: raise RuntimeError('not here')\n"
        "def f(completion): return 1.0\n"
    )
    with pytest.raises(UserError, match=r"my_worker_only.py:f: importing it raised RuntimeError"):
        await made(f"{module}:f")


def test_functions_work_in_the_event_loop_of_workers(file: Path) -> None:
    async def call() -> list[float]:
        function = FunctionRewardConfig(paths=[f"{file}:process", f"{file}:process_async"])
        reward = make_reward(RewardConfig(type="function", function=function))
        await reward.setup()
        try:
            return [*(await reward.score_task("", task())).parts.values()]
        finally:
            await reward.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pids = runner.run(call())
    assert pids[0] == pids[1] != os.getpid()
    until_exited(int(pids[0]))
