"""Codex (npm), /v1/responses."""

from __future__ import annotations

import json
import os

from clients.programs import run
from clients.tools import Job


async def play(job: Job) -> str:
    """Run the program once for each question; later questions continue the conversation."""
    program = os.environ.get("CODEX_PROGRAM", "codex")
    settings = {
        "model_provider": "arealite",
        "model_providers.arealite.name": "arealite",
        "model_providers.arealite.base_url": job.base_url,
        "model_providers.arealite.env_key": "OPENAI_API_KEY",
        "model_providers.arealite.wire_api": "responses",
        "analytics.enabled": False,
        "features.multi_agent": False,
        "web_search": "disabled",
        "check_for_update_on_startup": False,
    }
    options = [f"-c{name}={json.dumps(value)}" for name, value in settings.items()]
    options += [
        "-m",
        job.model,
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
    ]
    text = ""
    for index, question in enumerate(job.questions):
        how = ["exec", "resume", "--last"] if index else ["exec"]
        command = [program, *how, *options, question]
        text = await run(job, command, {"OPENAI_API_KEY": job.api_key})
    return text
