"""A program of a user: it samples, trains and publishes until it is stopped; see test_processes.py.

python3 tests/ext/session/sampling_script.py MODEL
"""

from __future__ import annotations

import asyncio
import sys

import arealite


async def main() -> None:
    """Run a session with two servers and two ranks; names and runs are in the working directory."""
    options = {"cluster.run_root": "runs", "cluster.name_root": "names"}
    async with arealite.session(sys.argv[1], servers=2, ranks=2, overrides=options) as session:
        print("ready", flush=True)
        while True:
            samples = await session.sample("2+3=", n=8, max_tokens=64)
            session.forward_backward([sample.row() for sample in samples])
            session.optim_step(lr=1e-4)
            session.publish()


if __name__ == "__main__":
    asyncio.run(main())
