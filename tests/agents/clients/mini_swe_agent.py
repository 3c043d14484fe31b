"""mini-swe-agent with its default configuration (litellm, tool `bash`)."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from clients.tools import Job

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"}


async def play(job: Job) -> str:
    """Solve the first question as a task."""
    return await asyncio.to_thread(_run, job)


def _run(job: Job) -> str:
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import builtin_config_dir
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
    options = {"api_base": job.base_url, "api_key": job.api_key}
    settings: Any = config.get("model", {}) | {"model_name": f"openai/{job.model}"}
    settings["model_kwargs"] = settings.get("model_kwargs", {}) | options
    agent: Any = DefaultAgent(
        LitellmModel(**settings),
        LocalEnvironment(cwd=job.folder),
        **{name: config["agent"][name] for name in ("system_template", "instance_template")},
        step_limit=12,
    )
    return str(agent.run(job.questions[0]))
