"""`arealite check --served ADDRESS --against FOLDER|RUN[@VERSION]`: tell what a server serves."""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from arealite.api.experiment_config import ExperimentConfig
from arealite.base.errors import UserError
from arealite.base.trial_files import RunPaths
from arealite.cli import configs
from arealite.ext.external.external_servers import ExternalServers
from arealite.ext.served_policy.canary import (
    row_of,
    sequence_of,
    tolerance_of,
)
from arealite.ext.served_policy.proof_file import ProofFile
from arealite.ext.served_policy.scores import is_within, read_scores
from arealite.impl.publisher.control import control_of
from arealite.system.names.name_registry import NameRegistry


def main(argv: Sequence[str]) -> int:
    """Print which weights a server has; return 1 if they are others than those asked for."""
    parser = argparse.ArgumentParser("arealite check")
    parser.add_argument("--served", metavar="HOST:PORT", required=True, help="the server")
    parser.add_argument(
        "--against",
        metavar="FOLDER|RUN[@VERSION]",
        required=True,
        help="a model folder, or the folder of a run; without VERSION, any version of the run",
    )
    options, overrides = parser.parse_known_args(argv)
    name, _, version = options.against.partition("@")
    run = RunPaths(Path(name).expanduser())
    source = ["--config", str(run.config)] if run.config.exists() else [f"model.path={name}"]
    config = configs.parse(
        ExperimentConfig,
        [*source, *overrides],
        command="arealite check",
        description="Tell which weights a server has.",
    )
    expected = ProofFile(run.root).scores()
    if run.config.exists() and not expected:
        raise UserError(f"{run.root} has no scores. Use a run with publisher.canary=true.")
    folder = Path(config.model.path).expanduser()
    length = min((len(scores) for scores in expected.values()), default=None)
    row = row_of(folder, length and length + 2)
    if not expected:
        expected = {0: _plain_scores(folder, row)}
    scores_T, entry = asyncio.run(_served_scores(options.served, config, row))
    tolerance = tolerance_of(config, folder, entry.get("dtype"))
    number, errors = tolerance.nearest(scores_T, expected)
    mean, largest = errors
    bound = tolerance.bound(expected[number])
    is_served = is_within(errors, bound)
    of_run = f"version {number} of " if run.config.exists() else ""
    relation = "serves" if is_served else "does not serve"
    print(
        f"{options.served} {relation} {of_run}{name}: the nearest scores differ by a mean of "
        f"{mean:.2g}, at most {largest:.2g} nats ({bound.text})"
    )
    return 0 if is_served and version in ("", str(number)) else 1


def _plain_scores(folder: Path, row: list[int]) -> np.ndarray:
    """Return the scores of a folder by plain transformers, in float32 [T]."""
    from arealite.ext.self_check.plain_copy import PlainModel  # imports torch

    return PlainModel(folder).exact(sequence_of(row))


async def _served_scores(
    address: str, config: ExperimentConfig, row: list[int]
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the scores of a server [T], and its entry in the name registry, or one like it."""
    registry = NameRegistry.of(config)
    url = f"http://{address}"
    servers = ExternalServers(config, updates=False)
    with closing(servers.pool) as pool:
        entries = {entry.value["address"]: entry.value for entry in registry.list("llm_server")}
        entry = entries.get(url) or await servers.describe(address)
        headers = registry.headers(entry["type"])
        server = control_of(entry, id=address, pool=pool, headers=headers)
        scores = await read_scores(server.generate, row, None)
    return scores.prompt_T, entry
