"""The teachers' servers: a trial beside the run's own for each, named `<trial_name>-teacher`.

Its servers, client and name registry are those of every trial, so `arealite why` and restarts work
for a teacher, too. Its weights never change.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine

from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.ext.distillation.teacher_trial import NAME, options_of, teacher_trials
from arealite.ext.external.external_servers import keep_registered
from arealite.impl.launcher.local import clear_leftovers
from arealite.impl.launcher.processes import Child, end_all, how_ended, server_overrides, spawn

LONGEST_PAUSE_S = 60.0
"""Between two starts of a server that ended."""
Work = Coroutine[object, object, None]
Say = Callable[[str], object]
"""Prints a line."""


def provide_teacher(config: ExperimentConfig, say: Say) -> Work | None:
    """Return what serves the teacher, or registers its servers. Hook `run_started`.

    Args:
        config: The experiment.
        say: Prints the end of a server.
    """
    options = options_of(config.trainer.ppo)
    if not options.is_on:
        return None
    trials = teacher_trials(config)
    if options.addresses:
        return keep_registered(trials[""], updates=False)
    return serve_all([*trials.values()], say)


async def serve_all(trials: list[ExperimentConfig], say: Say) -> None:
    """Run a server of each trial until cancelled."""
    async with asyncio.TaskGroup() as servers:
        for trial in trials:
            servers.create_task(serve(trial, say), name=trial.trial_name)


async def serve(trial: ExperimentConfig, say: Say) -> None:
    """Run the server of a trial, and start it again when it ends, until cancelled."""
    logs = run_paths(trial).logs
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{NAME}.log"
    command = [sys.executable, "-m", "arealite.cli.main", "serve-llm", *server_overrides(trial)]
    pause_s = 1.0
    while True:
        child: Child = await spawn(NAME, command, log=log, environment={})
        try:
            code = await child.process.wait()
        finally:
            await end_all([child])
            clear_leftovers(trial, "llm_server")  # a killed server leaves its name
        say(f"{NAME} ended ({how_ended(code)}), starts again in {pause_s:g} s  log: {log}")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
