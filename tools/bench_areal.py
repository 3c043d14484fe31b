"""Compare rollouts per second: AReaL's WorkflowExecutor, ours, and a bare aiohttp loop.

All three send the same prompts to the same stub server, a process that replies at once, with the
same number of tokens and the same concurrency. They run alternately, so other load on the machine
affects all; the figures are medians. AReaL runs in its own virtual environment and process, which
is stopped while another one is measured. Its workflow is its RLVR workflow, without the process
pool for rewards.

    python tools/bench_areal.py [--areal-python .venv-areal/bin/python] [--episodes 4000]
        [--concurrency 256] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp
import uvloop

from tools import bench_rollout, figures

ROOT = Path(__file__).resolve().parents[1]
GOALS = {"over_areal": 5.0, "over_bare": 0.62}


class AReaL:
    """The process of tools/areal_rollout.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def rate(self, count: int) -> tuple[float, float]:
        """Run episodes; return episodes per second, and CPU seconds per episode."""
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        print(count, file=self.process.stdin, flush=True)
        seconds, cpu = map(float, self.read().split())
        self.process.send_signal(signal.SIGSTOP)
        return count / seconds, cpu / count

    def read(self) -> str:
        """Return the next line of the process.

        Raises:
            SystemExit: the process has ended.
        """
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"AReaL's process ended with code {self.process.wait()}; see above.")
        return line


@contextmanager
def areal(python: str, address: str, folder: str, concurrency: int) -> Iterator[AReaL]:
    """Start AReaL's process; end it."""
    from tests.models import tiny_tokenizer

    tiny_tokenizer().save_pretrained(folder)
    words = [address, folder, str(concurrency), str(bench_rollout.TOKENS), bench_rollout.PROMPT]
    command = [python, str(ROOT / "tools" / "areal_rollout.py"), *words]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            running = AReaL(process)
            while running.read().strip() != "ready":
                pass  # its log
            yield running
        finally:
            process.kill()


async def measure(options: argparse.Namespace, address: str, folder: str) -> dict[str, float]:
    """Run all three alternately; return the medians and the ratios."""
    found: dict[str, list[tuple[float, float]]] = {"areal": [], "ours": [], "bare": []}
    async with bench_rollout.collector(address, folder, options.concurrency) as collector:
        connector = aiohttp.TCPConnector(limit=1024)
        async with aiohttp.ClientSession(connector=connector) as session:
            ways = {
                "ours": bench_rollout.ours(collector),
                "bare": bench_rollout.bare(address, session),
            }
            with areal(options.areal_python, address, folder, options.concurrency) as other:
                for count in [options.concurrency * 2, *[options.episodes] * options.rounds]:
                    found["areal"].append(await asyncio.to_thread(other.rate, count))
                    for name, way in ways.items():
                        # Idle connections were closed meanwhile: open them before the measurement.
                        await bench_rollout.rate(way, options.concurrency, options.concurrency)
                        one = await bench_rollout.rate(way, count, options.concurrency)
                        found[name].append(one)
    per_s = {name: [pair[0] for pair in pairs[1:]] for name, pairs in found.items()}
    cpu = {name: [pair[1] for pair in pairs[1:]] for name, pairs in found.items()}
    over = {
        f"over_{name}": median(o / x for o, x in zip(per_s["ours"], per_s[name], strict=True))
        for name in ("areal", "bare")
    }
    return (
        {f"{name}_per_s": median(values) for name, values in per_s.items()}
        | {f"{name}_cpu_ms": 1e3 * median(values) for name, values in cpu.items()}
        | over
    )


def main() -> None:
    """Measure, print a table, and write out/bench/areal.json."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--areal-python", default=str(ROOT / ".venv-areal" / "bin" / "python"))
    parser.add_argument("--episodes", type=int, default=4000)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not Path(options.areal_python).exists():
        raise SystemExit(f"--areal-python {options.areal_python} does not exist: make bench-areal")
    with bench_rollout.stub() as address, tempfile.TemporaryDirectory() as folder:
        found = uvloop.run(measure(options, address, folder))
    figures.show(found, digits=3)
    for name, goal in GOALS.items():
        print(f"{name}: {found[name]:.2f}, goal {goal}")
    figures.save("areal.json", found)


if __name__ == "__main__":
    main()
