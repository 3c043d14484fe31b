"""Run everything that AReaLite has for a GPU, in nine minutes, and write one table.

    python3 tools/gpu_day.py --out FOLDER [--device auto|cpu|cuda] [--quick] [--only PART ...]

The parts run one after the other, each as a child process in its own process group:

* machine: `arealite check --machine`
* tests: the tests of the train engine and of the servers
* training: MFU and peak memory of an update (tools/gpu_training.py)
* serving: tokens/s of the embedded server (tools/gpu_serving.py)
* async: asynchronous over synchronous training on this one device (tools/gpu_async.py)
* lesson: `arealite quickstart --model smollm2`, with --gguf FILE

A part gets a share of the time that is left, so a part inherits the time that the parts before it
did not use. A part that exceeds its limit is killed with all its processes, and the next part runs.
After each part, the results so far are in FOLDER/gpu_day.json and FOLDER/gpu_day.md, and the output
of the part is in FOLDER/PART.log. The exit code is 1 if a part failed. `--quick --device cpu` runs
all this with tiny models in about a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from arealite.ext.machine import info  # noqa: E402
from tools.timed_parts import Day, Part  # noqa: E402

PARTS = "machine", "tests", "training", "serving", "async", "lesson"
WORDS_OF_PYTEST = "passed", "failed", "errors", "skipped", "deselected"
TEST_WORKERS = 8
GPU_TESTS = "impl/engine", "ext/models", "ext/embedded", "ext/sglang", "ext/external"
"""Folders of the tests of engine and servers."""
TEST_LIMIT_S = 60
MAX_FAILURES = 20
"""Names of failed rows or tests in the results; the log has all."""


# ------------------------------------------------------------ parts


def list_parts(options: argparse.Namespace, device: str, scratch: Path) -> list[Part]:
    """Return all parts, with the shares of the time that they get on one H100 at most.

    The shares are estimates: nothing has been measured on a GPU yet.
    """
    out: Path = options.out
    arealite = [sys.executable, "-m", "arealite.cli.main"]
    check = [*arealite, "check", "--machine", "--out", str(out / "machine.json")]
    if options.quick:
        check += ["--quick", "--only", "reference"]
    gguf = str(options.gguf.absolute()) if options.gguf else "FILE"
    return [
        Part(name="machine", command=check, share=0.32, read_numbers=machine_numbers),
        Part(
            name="tests",
            command=test_command(quick=options.quick),
            share=0.12,
            read_numbers=test_numbers,
        ),
        measuring("training", options, device, scratch, share=0.18),
        measuring("serving", options, device, scratch, share=0.1),
        measuring("async", options, device, scratch, share=0.28),
        Part(
            name="lesson",
            command=[*arealite, "quickstart", "--model", "smollm2", "--gguf", gguf],
            share=0.6,
            read_numbers=lambda output: {"last lines": output.splitlines()[-5:]},
            folder=out / "lesson",
            reason_to_skip="" if options.gguf else "SmolLM2 is not at hand: give --gguf FILE",
        ),
    ]


def measuring(
    name: str, options: argparse.Namespace, device: str, scratch: Path, *, share: float
) -> Part:
    """Return the part of a script tools/gpu_NAME.py."""
    numbers = options.out / f"{name}.json"
    command = [
        sys.executable,
        str(ROOT / "tools" / f"gpu_{name}.py"),
        *("--out", str(numbers)),
        *("--scratch", str(scratch)),
        *("--device", device),
    ]
    if options.quick:
        command.append("--quick")
    return Part(
        name=name,
        command=command,
        share=share,
        read_numbers=lambda _: json.loads(numbers.read_text()),
        numbers_file=numbers,
    )


def test_command(*, quick: bool) -> list[str]:
    """Return the command of the tests.

    No test is marked for CUDA, and none is skipped without it. The tests of the servers take the
    GPU if there is one. The tests of the engine compare with plain transformers, on the CPU; they
    test the versions of torch and transformers.
    """
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command = ["env", "OMP_NUM_THREADS=1", *pytest, "-o", f"timeout={TEST_LIMIT_S}"]
    if quick:
        return [*command, str(ROOT / "tests/ext/embedded/test_ports.py")]
    if find_spec("xdist"):
        command += ["-n", str(min(TEST_WORKERS, os.cpu_count() or 1)), "--dist", "loadfile"]
    return [*command, *(str(ROOT / "tests" / name) for name in GPU_TESTS)]


def machine_numbers(output: str) -> dict[str, Any]:
    """Count the rows of `check --machine`, and name those that failed."""
    rows = re.findall(r"^(pass|FAIL|n/a) +(\S.*?)  ", output, re.M)
    statuses = [status for status, _ in rows]
    counts: dict[str, Any] = {status: statuses.count(status) for status in ("pass", "FAIL", "n/a")}
    failures = [name for status, name in rows if status == "FAIL"]
    return counts | ({"failures": failures[:MAX_FAILURES]} if failures else {})


def test_numbers(output: str) -> dict[str, Any]:
    """Read the counts of pytest, its last line, and the names of tests that failed."""
    closing_line = output.rstrip().rpartition("\n")[2].strip("= ")
    numbers: dict[str, Any] = {}
    for count, word in re.findall(r"(\d+) (\w+)", closing_line):
        plural = "errors" if word == "error" else word
        if plural in WORDS_OF_PYTEST:
            numbers[plural] = int(count)
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    numbers |= {"failures": failures[:MAX_FAILURES]} if failures else {}
    return numbers | {"closing line": closing_line}


# ------------------------------------------------------------ command line


def choose_device(wanted: str) -> str:
    """Return cpu or cuda, without importing torch.

    Raises:
        SystemExit: `wanted` is cuda, but there is no GPU, or no torch for CUDA.
    """
    if wanted == "cpu":
        return "cpu"
    has_gpu = bool(info.cuda()) and "GPU 0" in dict(info.devices())
    if wanted == "cuda" and not has_gpu:
        sys.exit("error: --device cuda: nvidia-smi lists no GPU, or torch is a CPU build.")
    return "cuda" if has_gpu else "cpu"


def part_environment(device: str) -> dict[str, str]:
    """Return environment variables of all parts, in addition to those of this process."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return variables


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--quick", action="store_true", help="tiny models, few tests")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--limit-s", type=float, default=540.0, help="of all parts together (540)")
    parser.add_argument("--gguf", type=Path, help="GGUF file of SmolLM2-135M-Instruct")
    options = parser.parse_args(argv)
    options.out = options.out.absolute()
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 if one failed, 130 after Ctrl-C or SIGTERM."""
    options = parse(argv)
    device = choose_device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.update(part_environment(device))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    facts = {
        "device": device,
        "quick": options.quick,
        "limit_s": options.limit_s,
        "command": shlex.join(sys.argv if argv is None else ["tools/gpu_day.py", *argv]),
        "host": dict(info.devices()),
        "versions": dict(info.versions(None)),
    }
    day = Day(options.out, facts)
    with tempfile.TemporaryDirectory(prefix="arealite-gpu-day-") as scratch:
        parts = list_parts(options, device, Path(scratch))
        chosen = [part for part in parts if part.name in options.only]
        try:
            code = day.run(chosen, options.limit_s)
        except KeyboardInterrupt:
            code = 130
    print(f"\n{day.table()}\nwritten to {options.out}/gpu_day.json and gpu_day.md")
    return code


if __name__ == "__main__":
    sys.exit(main())
