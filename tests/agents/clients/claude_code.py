"""Claude Code (npm), /v1/messages."""

from __future__ import annotations

import os

from clients.programs import run
from clients.tools import Job

QUIET = (
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
    "DISABLE_AUTOUPDATER",
    "DISABLE_TELEMETRY",
    "DISABLE_ERROR_REPORTING",
    "DISABLE_BUG_COMMAND",
)


async def play(job: Job) -> str:
    """Run the program once for each question; later questions continue the conversation."""
    program = os.environ.get("CLAUDE_PROGRAM", "claude")
    environment = dict.fromkeys(QUIET, "1") | {
        "ANTHROPIC_BASE_URL": job.anthropic_base_url,
        "ANTHROPIC_API_KEY": job.api_key,
        "ANTHROPIC_MODEL": job.model,
        "ANTHROPIC_SMALL_FAST_MODEL": job.model,
    }
    text = ""
    for index, question in enumerate(job.questions):
        more = ["--continue"] if index else []
        command = [program, "-p", question, "--allowedTools", "Bash", "--max-turns", "20", *more]
        text = await run(job, command, environment)
    return text
