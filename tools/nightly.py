"""`make test-nightly`: run the suites of which CI runs only a part, one after the other.

Each suite is a target of the Makefile. A failed suite does not stop the others. After each suite, a
line shows its time and pytest's last line; out/nightly.json has the same of all.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "nightly.json"
CLOSING = re.compile(r"\d+ (passed|failed|errors?|skipped)\b.* in [\d.]+s")
SUITES = ("long", "attacks", "agents", "models", "clusters", "learning", "peers")


def run(suite: str) -> dict[str, object]:
    """Run `make test-SUITE`; return its exit code, time and last line."""
    log = OUT.with_name(f"nightly-{suite}.log")
    begin = time.monotonic()
    with log.open("w") as output:
        code = subprocess.run(
            ["make", f"test-{suite}"], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    lines = [line for line in log.read_text().splitlines() if CLOSING.search(line)]
    closing = lines[-1].strip("= ") if lines else f"no tests were run: see {log}"
    return {
        "suite": suite,
        "code": code,
        "seconds": round(time.monotonic() - begin),
        "closing": closing,
    }


def main() -> int:
    """Run the suites named on the command line, or all; return 1 if one failed."""
    OUT.parent.mkdir(exist_ok=True)
    suites = sys.argv[1:] or list(SUITES)
    if unknown := set(suites) - set(SUITES):
        print(f"error: unknown suites {sorted(unknown)}. Choose from {', '.join(SUITES)}.")
        return 2
    results = []
    for suite in suites:
        result = run(suite)
        print(f"test-{suite:10} {result['seconds']:>5} s  {result['closing']}", flush=True)
        results.append(result)
        OUT.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(result["code"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
