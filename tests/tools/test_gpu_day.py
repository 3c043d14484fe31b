"""All parts of the GPU day run on a CPU; a part that hangs or fails does not stop the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from arealite.ext.prefix_trees.packed_rows import input_items
from arealite.ext.prefix_trees.prefix_tree import prefix_forest
from tests.waiting import has_exited, until, until_exited
from tools import bench_trl, gpu_async, gpu_day, gpu_training, qwen_shapes, timed_parts
from tools.timed_parts import Day, Part

HANG = """
echo $$ >pids
setsid sh -c 'echo $$ >>pids; trap "" TERM; exec sleep 1000' &
trap "" TERM
echo '{"rate": 7}' >numbers.json
while :; do sleep 1000; done
"""
"""Shell script of a part that ignores SIGTERM, and has a child in another process group."""


def part(folder: Path, name: str, script: str, **options: Any) -> Part:
    """Return a part that runs a shell script in a folder."""
    options = {"share": 1.0, "read_numbers": lambda output: {"output": output.strip()}} | options
    return Part(name=name, command=["sh", "-c", script], folder=folder, **options)


def hanging(folder: Path) -> Part:
    """Return a part that runs HANG."""
    return part(
        folder,
        "hanging",
        HANG,
        read_numbers=lambda _: json.loads((folder / "numbers.json").read_text()),
        numbers_file=folder / "numbers.json",
    )


def pids(folder: Path) -> list[int]:
    """Return the ids of both processes of HANG once it has reported a number."""
    file = folder / "pids"
    until((folder / "numbers.json").exists, what="the number of the part")
    until(lambda: len(file.read_text().split()) == 2, what="the processes of the part")
    return [int(line) for line in file.read_text().split()]


@contextmanager
def limit_passes_when_running(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[list[int]]:
    """Let the limit of HANG pass as soon as both of its processes run; yield their ids."""
    processes = list[int]()
    wait_for_end = timed_parts.wait_for_end

    def short_wait(process: subprocess.Popen[bytes], limit_s: float) -> bool:
        command: Any = process.args
        if HANG in command:
            processes[:] = processes or pids(folder)
            limit_s = 0.01
        return wait_for_end(process, limit_s)

    monkeypatch.setattr(timed_parts, "wait_for_end", short_wait)
    yield processes


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the results on disk by part."""
    report = json.loads((folder / "gpu_day.json").read_text())
    return {result["part"]: result for result in report["parts"]}


def test_part_that_hangs_is_killed_with_its_processes_and_the_next_part_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = Day(tmp_path, {})
    with limit_passes_when_running(monkeypatch, tmp_path) as processes:
        code = day.run([hanging(tmp_path), part(tmp_path, "next", "echo 5")], 600.0)
    assert code == 1
    assert len(processes) == 2
    assert all(has_exited(process) for process in processes)
    stored = results(tmp_path)
    assert stored["hanging"]["status"] == "timed out"
    assert stored["hanging"]["numbers"] == {"rate": 7}
    assert stored["next"]["status"] == "passed"
    assert stored["next"]["numbers"] == {"output": "5"}


def test_results_are_on_disk_after_each_part(tmp_path: Path) -> None:
    """The second part finds the result of the first part, and no result of its own."""
    parts = [
        part(tmp_path, "first", "echo 1"),
        part(tmp_path, "second", "cat gpu_day.json", read_numbers=json.loads),
    ]
    assert Day(tmp_path, {"device": "cpu"}).run(parts, 600.0) == 0
    seen = results(tmp_path)["second"]["numbers"]
    assert seen["device"] == "cpu"
    assert [result["part"] for result in seen["parts"]] == ["first"]
    assert seen["parts"][0]["numbers"] == {"output": "1"}


def test_part_that_fails_is_reported_with_its_last_line(tmp_path: Path) -> None:
    parts = [
        part(tmp_path, "bad", "echo 1; echo 'no | memory'; exit 3"),
        part(tmp_path, "good", "echo 1"),
    ]
    assert Day(tmp_path, {}).run(parts, 600.0) == 1
    stored = results(tmp_path)
    assert (stored["bad"]["status"], stored["bad"]["exit_code"]) == ("failed", 3)
    assert stored["bad"]["text"] == "no | memory"
    assert stored["good"]["status"] == "passed"
    table = (tmp_path / "gpu_day.md").read_text()
    assert "| good | output | 1 |" in table
    assert ": no \\| memory |" in table


def test_numbers_of_an_earlier_day_are_not_those_of_a_part_that_fails(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    numbers.write_text('{"rate": 7}')
    failing = part(
        tmp_path,
        "failing",
        "exit 1",
        read_numbers=lambda _: json.loads(numbers.read_text()),
        numbers_file=numbers,
    )
    assert Day(tmp_path, {}).run([failing], 600.0) == 1
    stored = results(tmp_path)["failing"]
    assert stored["numbers"] == {}
    assert stored["text"].startswith("no numbers: ")


def test_interrupted_part_is_killed_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = list[int]()

    def interrupt(process: subprocess.Popen[bytes], limit_s: float) -> bool:
        monkeypatch.undo()
        monkeypatch.setattr(timed_parts, "GRACE_S", 0.01)
        processes[:] = pids(tmp_path)
        raise KeyboardInterrupt

    monkeypatch.setattr(timed_parts, "wait_for_end", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Day(tmp_path, {}).run([hanging(tmp_path)], 600.0)
    assert len(processes) == 2
    assert all(has_exited(process) for process in processes)
    assert results(tmp_path)["hanging"]["status"] == "interrupted"


def test_part_dies_if_the_day_is_killed(tmp_path: Path) -> None:
    script = """if True:
        import sys
        from pathlib import Path
        from tools.timed_parts import Day, Part

        command, folder = ["sh", "-c", sys.argv[1]], Path(sys.argv[2])
        hanging = Part(name="hanging", command=command, share=1, read_numbers=dict, folder=folder)
        Day(folder, {}).run([hanging], 600.0)
    """
    environment = os.environ | {"PYTHONPATH": str(gpu_day.ROOT)}
    command = [sys.executable, "-c", script, HANG, str(tmp_path)]
    with subprocess.Popen(command, env=environment) as day:
        leader, orphan = pids(tmp_path)
        day.kill()
    try:
        until_exited(leader)
    finally:  # this test has no subreaper that would kill it
        os.kill(orphan, signal.SIGKILL)


def test_part_inherits_the_time_that_earlier_parts_did_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed_parts.time, "monotonic", lambda: 0.0)
    parts = [
        part(tmp_path, "first", "echo 1", share=1.0),
        part(tmp_path, "skipped", "exit 1", share=5.0, reason_to_skip="no file"),
        part(tmp_path, "second", "echo 1", share=3.0),
    ]
    assert Day(tmp_path, {}).run(parts, 100.0 + timed_parts.GRACE_S) == 0
    stored = results(tmp_path)
    assert stored["first"]["limit_s"] == 25.0
    assert stored["second"]["limit_s"] == 100.0
    assert (stored["skipped"]["status"], stored["skipped"]["text"]) == ("skipped", "no file")


@pytest.mark.processes
@pytest.mark.timeout(900)
def test_quick_day_on_a_cpu_measures_training_serving_and_async(tmp_path: Path) -> None:
    """All parts but two, which start commands that other tests run."""
    command = [sys.executable, str(gpu_day.ROOT / "tools/gpu_day.py"), "--out", str(tmp_path)]
    command += ["--quick", "--device", "cpu", "--limit-s", "1200"]
    command += ["--only", "training", "serving", "async", "lesson"]
    done = subprocess.run(command, capture_output=True, text=True)
    logs = "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    report = json.loads((tmp_path / "gpu_day.json").read_text())
    assert report["device"] == "cpu"
    assert report["host"]["CPU cores"]
    assert report["versions"].keys() >= {"arealite", "python", "torch", "transformers"}
    stored = results(tmp_path)
    assert [*stored] == ["training", "serving", "async", "lesson"]
    assert all(stored[name]["status"] == "passed" for name in ("training", "serving", "async"))
    assert all(stored[name]["seconds"] > 0 for name in ("training", "serving", "async"))
    assert "gpu_training.py" in stored["training"]["command"]
    check_training(stored["training"]["numbers"])
    check_serving(stored["serving"]["numbers"])
    check_async(stored["async"]["numbers"])
    assert stored["lesson"]["status"] == "skipped"
    assert stored["lesson"]["text"] == "SmolLM2 is not at hand: give --gguf FILE"
    table = (tmp_path / "gpu_day.md").read_text()
    assert table in done.stdout
    assert "| training | tiny, checkpointing on, groups of 8: tokens_per_s |" in table


def check_training(numbers: dict[str, Any]) -> None:
    """Check the numbers of the part training on a CPU."""
    assert [*numbers] == [
        f"tiny, checkpointing {switch}, {kind}"
        for switch in ("off", "on")
        for kind in ("groups of 8", "plain rows")
    ]
    for name, values in numbers.items():
        assert values["tokens_per_s"] > 0, name
        assert not {"mfu", "tflops", "peak_gb"} & values.keys()
        # Of 8 rows with a common prompt of 32 tokens and 8 tokens each, 96 of 320 are computed.
        is_shared = values["tokens_per_s"] > 2 * values["computed_tokens_per_s"]
        assert is_shared == ("groups" in name)


def check_serving(numbers: dict[str, Any]) -> None:
    """Check the numbers of the part serving."""
    assert numbers["tiny, decoder"] == "Decoder, float32"
    assert numbers["tiny, 2 requests"]["tokens_per_s"] > 0
    assert numbers["tiny, 4 requests"]["tokens_per_s"] > 0


def check_async(numbers: dict[str, Any]) -> None:
    """Check the numbers of the part async."""
    for way in ("server", "shared"):
        compared = numbers[f"{way}, async over sync"]
        rates = [
            numbers[f"{way}, {trainer}, epochs 1"]["tokens_per_s"]
            for trainer in ("async_ppo", "ppo")
        ]
        assert compared["ratio"] == pytest.approx(rates[0] / rates[1])
        assert compared["generating_s"] > 0
        assert compared["training_s"] > 0


def test_commands_of_check_and_tests_exist(tmp_path: Path) -> None:
    """The parts that the test of the quick day leaves out."""
    options = gpu_day.parse(["--out", str(tmp_path), "--quick"])
    machine, tests = gpu_day.list_parts(options, "cpu", tmp_path)[:2]
    assert machine.command[2:5] == ["arealite.cli.main", "check", "--machine"]
    for quick in (True, False):
        paths = [word for word in gpu_day.test_command(quick=quick) if "tests/" in word]
        assert paths
        assert all(Path(path).exists() for path in paths)
    assert tests.command == gpu_day.test_command(quick=True)


def test_lesson_runs_with_a_file(tmp_path: Path) -> None:
    options = gpu_day.parse(["--out", str(tmp_path), "--gguf", "some.gguf"])
    lesson = gpu_day.list_parts(options, "cpu", tmp_path)[-1]
    assert not lesson.reason_to_skip
    words = ["quickstart", "--model", "smollm2", "--gguf", str(Path("some.gguf").absolute())]
    assert lesson.command[-5:] == words


def test_runs_find_packages_on_the_callers_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a network has packages in a folder on PYTHONPATH."""
    monkeypatch.setenv("PYTHONPATH", "/packages")
    assert bench_trl.environment()["PYTHONPATH"].split(os.pathsep)[2:] == ["/packages"]
    variables = gpu_day.part_environment("cuda")
    assert variables["PYTHONPATH"].split(os.pathsep) == [str(gpu_day.ROOT), "/packages"]
    assert "CUDA_VISIBLE_DEVICES" not in variables
    assert gpu_day.part_environment("cpu")["CUDA_VISIBLE_DEVICES"] == ""


def test_numbers_of_check_are_counted_from_its_output() -> None:
    output = (
        "pass reference                        1 × cpu     2.3 s  error 0\n"
        "FAIL train/packed/bfloat16            1 × cuda    2.3 s  error is 3\n"
        "     continued\n"
        "n/a  train/fsdp2/8 ranks              8 ×         0.0 s  GPUs: needs 8, found 1\n"
    )
    failures = ["train/packed/bfloat16"]
    assert gpu_day.machine_numbers(output) == {
        **{"pass": 1, "FAIL": 1, "n/a": 1, "failures": failures}
    }


def test_numbers_of_tests_are_read_from_the_last_line() -> None:
    output = "..F\nFAILED tests/a.py::test_b - assert 0\n= 1 failed, 2 passed, 1 error in 3.1s =\n"
    assert gpu_day.test_numbers(output) == {
        "failed": 1,
        "passed": 2,
        "errors": 1,
        "failures": ["tests/a.py::test_b"],
        "closing line": "1 failed, 2 passed, 1 error in 3.1s",
    }
    assert gpu_day.test_numbers("") == {"closing line": ""}


def test_device_cuda_without_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_day.info, "cuda", lambda: "13.0")
    monkeypatch.setattr(gpu_day.info, "devices", lambda: [("GPUs", "none")])
    with pytest.raises(SystemExit, match="nvidia-smi lists no GPU"):
        gpu_day.choose_device("cuda")
    assert gpu_day.choose_device("auto") == "cpu"
    monkeypatch.setattr(gpu_day.info, "devices", lambda: [("GPU 0", "NVIDIA H100")])
    assert gpu_day.choose_device("auto") == "cuda"
    assert gpu_day.choose_device("cpu") == "cpu"


def test_parameters_are_those_of_the_model(tmp_path: Path) -> None:
    shape = qwen_shapes.SHAPES["tiny"]
    folder = qwen_shapes.make_model(tmp_path / "model", shape, device="cpu")
    with safe_open(folder / "model.safetensors", framework="np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    matrices = [np.prod(s) for name, s in shapes.items() if "layers" in name and len(s) == 2]
    assert sum(matrices) == shape.matrix_parameters
    assert "lm_head.weight" not in shapes
    assert shapes["model.embed_tokens.weight"] == [shape.vocab_size, shape.hidden_size]


@pytest.mark.parametrize("kind", gpu_training.UPDATES)
def test_counts_of_an_update_are_those_of_its_prefix_trees(kind: str) -> None:
    workload = gpu_training.WORKLOADS["cpu"]
    update = gpu_training.UPDATES[kind](workload)
    forest = prefix_forest(input_items(update.rows))
    inputs = sum(node.end - node.begin for node in forest.nodes)
    # The last token of a row is no input.
    assert update.computed_tokens == inputs + len(update.rows)
    assert update.trained_tokens == sum(int(row.loss_mask.sum()) for row in update.rows)
    keys = sum(sum(range(node.begin + 1, node.end + 1)) for node in forest.nodes)
    assert update.keys == pytest.approx(keys, rel=0.1)


def test_mfu_is_the_share_of_the_peak() -> None:
    assert gpu_training.mfu("NVIDIA H100 80GB HBM3", 494.5) == 0.5
    assert gpu_training.mfu("Some GPU", 494.5) is None
    operations = qwen_shapes.training_operations(
        qwen_shapes.SHAPES["0.5B"], computed_tokens=1, trained_tokens=1, keys=0.0
    )
    assert operations == pytest.approx(6 * 0.494e9, rel=0.01)


@pytest.mark.parametrize(
    ("generating_s", "epochs", "expected"), [(4.0, 1, 4), (1.1, 3, 3), (0.01, 8, 1), (90.0, 4, 32)]
)
def test_epochs_balance_generation_and_training(
    generating_s: float, epochs: int, expected: int
) -> None:
    synchronous = {"wait_s": generating_s, "step_s": generating_s + 1.0}
    assert gpu_async.balanced_epochs(epochs, synchronous) == expected
