"""Test which versions of SGLang start on this machine's CPU, generate and load new weights.

    python3 tools/try_sglang.py                     # every version that setup_sglang_cpu.sh accepts
    python3 tools/try_sglang.py 0.5.24 --new        # versions that it does not accept yet

All versions are installed into one virtual environment, one after the other, so only packages that
differ are downloaded. `launch_llm_server` starts each version; it generates eight tokens, loads new
weights from a publisher (`disk`), and generates again with the new version.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.server_site import Site

ROOT = Path(__file__).resolve().parents[1]
SETUP = ROOT / "tools" / "setup_sglang_cpu.sh"

if __name__ == "__main__":
    sys.path[0] = str(ROOT)


def accepted() -> list[str]:
    """Return the versions that the setup script accepts, oldest first."""
    lines = SETUP.read_text().splitlines()
    (found,) = (line for line in lines if line.startswith("versions="))
    return found.partition("=")[2].strip('"').split()


def install(venv: Path, version: str, *, new: bool) -> str | None:
    """Install a version over the previous one; return the error, or None."""
    environment = os.environ | {"SGLANG": version} | ({"SGLANG_UNTRIED": "1"} if new else {})
    done = subprocess.run(
        [str(SETUP), str(venv)], env=environment, capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else f"setup: {done.stderr.strip()}"


def ask(site: Site, port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    """GET, or POST a JSON body; return the decoded answer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | site.names.headers()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def generate(site: Site, port: int) -> dict[str, Any]:
    """Generate eight tokens; return the server's metadata about them."""
    sampling = {"max_new_tokens": 8, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "return_logprob": True, "sampling_params": sampling}
    answer = ask(site, port, "/generate", body)
    assert len(answer["output_ids"]) == 8, answer
    assert len(answer["meta_info"]["output_token_logprobs"]) == 8, answer
    return answer["meta_info"]


def serve(folder: Path) -> dict[str, Any]:
    """Start the installed version, generate, publish, generate; return the results."""
    from tests.models import tiny_model
    from tools.server_site import Site

    begin = time.monotonic()
    site = Site(folder, tiny_model(folder / "model"))
    with site.served() as port:
        found: dict[str, Any] = {"start_s": round(time.monotonic() - begin, 1)}
        spans = "weight_versions" in generate(site, port)
        routes = ask(site, port, "/openapi.json")["paths"]
        with site.publisher("disk") as publisher:
            report = asyncio.run(publisher.publish())
        assert report.servers == 1, report
        told = generate(site, port)["weight_version"]
        assert told == str(publisher.version), told
    return found | {"spans": spans, "sessions": "/begin_weight_update" in routes}


def attempt(venv: Path, version: str, *, new: bool) -> dict[str, Any]:
    """Install and test one version; "error" is the reason of a failure."""
    if problem := install(venv, version, new=new):
        return {"error": problem}
    with tempfile.TemporaryDirectory(prefix="try-sglang-") as folder:
        try:
            return serve(Path(folder))
        except (AssertionError, OSError, SystemExit) as error:
            return {"error": f"{type(error).__name__}: {error}"[-4000:]}


def main(argv: list[str] | None = None) -> int:
    """Try versions from the command line; exit 1 when one fails."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--venv", type=Path, default=ROOT / "out" / "venv-sglang")
    parser.add_argument("--new", action="store_true", help="test versions that were never tested")
    options = parser.parse_args(argv)
    os.environ["SGLANG_PYTHON"] = str(options.venv / "bin" / "python")
    failed = 0
    for version in options.versions or accepted():
        found = attempt(options.venv, version, new=options.new)
        failed += "error" in found
        if error := found.get("error"):
            print(f"| {version} | no: {error} |", flush=True)
        else:
            yes = {True: "yes", False: "no"}
            print(
                f"| {version} | yes, {found['start_s']} s | {yes[found['spans']]} "
                f"| {yes[found['sessions']]} |",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
