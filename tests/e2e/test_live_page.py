"""`view.web=true` serves the live page of a run while the run lasts."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ENVIRONMENT, SLOW_S, Site, all_gone
from tests.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]


def get(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=60.0) as answer:
        return json.load(answer)


def test_page_is_served_until_the_run_ends(site: Site, tmp_path: Path) -> None:
    words = ["view.web=true", "trainer.ppo.total_steps=100000", "dataset.eval=null"]
    with subprocess.Popen(
        site.command(tmp_path, *words),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
    ) as run:
        assert run.stdout is not None
        shown = list[str]()
        for line in run.stdout:
            shown.append(line)
            if found := re.fullmatch(r"live page: (http://127.0.0.1:\d+)/(\?token=\w+)\n", line):
                break
        else:
            pytest.fail("".join(shown))
        address, token = found.groups()
        seen = list[dict[str, Any]]()

        def has_step() -> bool:
            seen.append(get(f"{address}/run{token}"))
            return 2 in (seen[-1]["about"] or {}).get("metrics", {}).get("step", [])

        until(has_step, what=lambda: f"step 2: {seen[-1]['state']}", seconds=SLOW_S)
        assert ["", "running"] in seen[-1]["state"]
        with pytest.raises(urllib.error.HTTPError, match="403"):
            get(f"{address}/run")
        run.terminate()
        rest = run.stdout.read()
        assert run.wait(SLOW_S) == 130, rest
    assert "live page" not in rest
    all_gone(tmp_path)
    with pytest.raises(urllib.error.URLError, match="refused"):
        get(f"{address}/run{token}")
