"""Measure start times: `arealite --help`, and a datapipe process until it has a name.

Prints the median of several runs, and writes out/bench/start.json.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from tools import figures  # noqa: E402

REPEATS = 7


def main() -> None:
    """Measure both and print a table."""
    found = {"help_s": median(help_s), "datapipe_ready_s": median(datapipe_ready_s)}
    print(f"arealite --help      {found['help_s']:.3f} s  (goal: < 0.5)")
    print(f"datapipe ready       {found['datapipe_ready_s']:.3f} s  (goal: < 1)")
    figures.save("start.json", found)


def median(measure) -> float:
    """Return the median of several runs of `measure`."""
    return statistics.median(measure() for _ in range(REPEATS))


def help_s() -> float:
    """Time `arealite --help` as a whole process."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "arealite.cli.main", "--help"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def datapipe_ready_s() -> float:
    """Time a datapipe process with 10,000 tasks from its start to its name in the registry."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = "".join(
            json.dumps({"prompt": f"{i}+1=", "ground_truth": str(i + 1)}) + "\n"
            for i in range(10000)
        )
        (folder / "train.jsonl").write_text(rows)
        (folder / "config.yaml").write_text(
            f"cluster: {{name_root: {folder}/names, run_root: {folder}/runs}}\n"
            f"dataset: {{train: {folder}/train.jsonl}}\n"
        )
        (folder / "runs" / "arealite" / "trial").mkdir(parents=True)
        begin = time.perf_counter()
        command = [sys.executable, "-m", "arealite.cli.main", "role", "datapipe", "0", name]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
            while not list(folder.rglob("names/**/datapipe/*.json")):
                assert process.poll() is None, "the datapipe died"
                time.sleep(0.002)
            seconds = time.perf_counter() - begin
            process.kill()
        return seconds


if __name__ == "__main__":
    main()
