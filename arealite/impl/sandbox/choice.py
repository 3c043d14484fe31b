"""Chooses how programs are confined on this host, by running one."""

from __future__ import annotations

from functools import cache

from arealite.api.sandbox import Sandbox, SandboxConfig
from arealite.base.errors import UserError
from arealite.base.log import get
from arealite.impl.sandbox.process import ProcessSandbox

log = get(__name__)


def choose(config: SandboxConfig) -> Sandbox:
    """Return the first sandbox of those the config allows that works here. Blocks for 0.1 s.

    Raises:
        UserError: none does.
    """
    if config.backend == "unsafe":
        log.warning("programs run unconfined", setting="sandbox.backend=unsafe")
        return ProcessSandbox(config, "unsafe")
    wanted = ["bwrap", "landlock"] if config.backend == "auto" else [config.backend]
    problems: list[str] = []
    for backend in wanted:
        problem = check(backend)
        if not problem:
            return ProcessSandbox(config, backend)
        problems.append(f"{backend} ({problem})")
    raise UserError(
        f"this host cannot confine programs: {'; '.join(problems)}. `apt install bubblewrap` and "
        "allow user namespaces, or have Landlock in the kernel; or set sandbox.backend=unsafe "
        "where programs may do what this user may."
    )


@cache
def check(backend: str) -> str:
    """Return "" where a backend works on this host, else why not."""
    problem = ProcessSandbox(SandboxConfig(), backend).probe()
    log.info("sandbox tried", backend=backend, problem=problem or None)
    return problem
