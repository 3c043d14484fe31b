"""Run thousands of simulations with crashes and a bad network; print the seed of each failed one.

    python tools/simulate.py --seeds 10000
    python tools/simulate.py --seed 4711 --trace

tests/simulation/simulation.py describes which parts are simulated.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CHUNK = 10


def play(seeds: tuple[int, int]) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Play the seeds [first, last); return sums and (seed, violation) of those that failed."""
    from tests.simulation.simulation import simulate

    gc.disable()  # a chunk's garbage is small, and looking for it takes a fifth of the time
    sums: Counter[str] = Counter()
    failed: list[tuple[int, str]] = []
    for seed in range(*seeds):
        outcome = simulate(seed)
        sums.update(outcome.counts)
        sums["milliseconds"] += round(1e3 * outcome.virtual_s)
        sums["seeds"] += 1
        sums["checked"] += outcome.checked
        if outcome.violation is not None:
            failed.append((seed, outcome.violation))
    gc.collect()
    return sums, failed


def chunks(first: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of seeds small enough that processes end together."""
    for begin in range(first, first + count, CHUNK):
        yield begin, min(begin + CHUNK, first + count)


def play_one(seed: int, *, trace: bool) -> int:
    """Simulate one seed and print its events."""
    from tests.simulation.scenario import Scenario
    from tests.simulation.simulation import simulate

    outcome = simulate(seed, keep_trace=trace)
    print("\n".join(outcome.trace))
    print(Scenario.draw(seed))
    print(f"seed {seed}: {outcome.violation or 'nothing broken'}")
    print(f"{outcome.virtual_s:.1f} virtual s, {outcome.checked} checks, trace {outcome.digest}")
    return int(outcome.violation is not None)


def main() -> int:
    """Parse the command line, simulate, and return 1 if an invariant was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="simulate only this seed")
    parser.add_argument("--trace", action="store_true", help="print every event of --seed")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path("out/bench/simulate.json"))
    options = parser.parse_args()
    if options.seed is not None:
        return play_one(options.seed, trace=options.trace)
    began = time.perf_counter()
    sums: Counter[str] = Counter()
    failed: list[tuple[int, str]] = []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for added, broken in pool.imap_unordered(play, chunks(options.first, options.seeds)):
            sums.update(added)
            failed += broken
            for seed, what in broken:
                print(f"seed {seed}: {what[:500]}", flush=True)
    seconds = time.perf_counter() - began
    summary = {
        "seeds": sums["seeds"],
        "virtual_hours": round(sums["milliseconds"] / 3.6e6, 1),
        "crashes": sums["kills"],
        "messages": sums["messages"],
        "messages_lost": sums["lost"],
        "invariants_checked": sums["checked"],
        "failures": len(failed),
        "seconds": round(seconds, 1),
        "ms_a_seed_and_process": round(1e3 * seconds * options.processes / sums["seeds"], 1),
    }
    print(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in summary.items()))
    details = {name: number for name, number in sorted(sums.items()) if name not in summary}
    print("  " + ", ".join(f"{name} {number}" for name, number in details.items()))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(summary | {"failed": sorted(failed), "counts": details}))
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
