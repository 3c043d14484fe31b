"""The modules that a warm parent imports, in stages: light roles do not wait for torch."""

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from arealite.api.experiment_config import ExperimentConfig, ServerConfig
from arealite.base import entries
from arealite.ext.warm_start import starts
from arealite.ext.warm_start.starts import WarmParent
from arealite.impl.launcher.processes import threads

STAGE_OF_ROLE = {"datapipe": 0, "rollout": 1}
"""Number of the last stage that a role needs; the others need LAST_STAGE."""
LAST_STAGE = 2
ALL_ROLES = ("arealite.cli.role", "arealite.ext.warm_start.caches")
DATAPIPE = (*ALL_ROLES, "arealite.system.data.tasks", "arealite.system.datapipe.datapipe")
WORKER = ("uvloop", "jinja2", "tokenizers", "arealite.impl.rollout.worker")
SERVER = (
    "torch",
    "transformers",
    "arealite.cli.serve_llm",
    "arealite.ext.embedded.embedded_server",
)
_early: list[WarmParent] = []
"""The warm parent that `early` started."""


def of_run(config: ExperimentConfig, *, has_torch: bool = True) -> WarmParent:
    """Return the warm parent that `early` started, or start the one of a run's supervisor.

    Args:
        config: The experiment.
        has_torch: Whether a role needs torch.
    """
    if _early:
        return _early[0]
    warm = WarmParent(
        _stages(config, has_torch),
        environment=threads(config.launcher.trainer_threads),
    )
    warm.start()
    return warm


def server_stages(config: ServerConfig) -> list[list[str]]:
    """Return the only stage of the warm parent of an embedded server."""
    return [[*ALL_ROLES, *SERVER, *_model_modules(config.model.path)]]


def fork_early() -> None:
    """Fork the run's warm parent from this process, if this is a fork of a warm parent itself.

    Call it before this process has a thread or has imported a module of the user.

    Raises:
        Forked: See warm_parent.fork_warm_parent.
    """
    if not _early and (warm := starts.fork_here()) is not None:
        _early.append(warm)


@contextmanager
def early(config: ExperimentConfig) -> Generator[None]:
    """Import the modules of a local run during the body, before its launcher starts."""
    if _early:
        _early[0].stages = _stages(config, has_torch=True)
        _early[0].environment = threads(config.launcher.trainer_threads)
        yield
        return
    if config.launcher.type != "local" or not starts.is_possible():
        yield
        return
    _early.append(of_run(config))
    try:
        yield
    finally:
        _early.pop().close()


def _stages(config: ExperimentConfig, has_torch: bool) -> list[list[str]]:
    ppo = config.trainer.ppo
    collector = ppo.collector
    worker_parts = {
        "llm_client": collector.client.type,
        "agent": collector.agent.type,
        "env": collector.env.type,
    }
    trainer_parts = {
        "trainer": config.trainer.type,
        "train_engine": config.trainer.own.engine.type,
        "weight_publisher": ppo.publisher.type,
    }
    heavy: list[str] = []
    if has_torch:
        heavy += [*SERVER, *_part_modules(trainer_parts), *_model_modules(config.model.path)]
        for logger in config.logger.types:
            heavy += _part_modules({"logger": logger})
    if config.trainer.is_offline:
        return [[*ALL_ROLES], [], heavy]
    return [[*DATAPIPE], [*WORKER, *_part_modules(worker_parts)], heavy]


def _part_modules(types: dict[str, str]) -> list[str]:
    """Return the modules of built-in parts; parts of users are not imported here."""
    targets = [entries.own(kind).get(name) for kind, name in types.items()]
    return [target.partition(":")[0] for target in targets if target]


def _model_modules(path: str | None) -> Sequence[str]:
    """Return transformers' modules for the model in a folder."""
    with suppress(OSError, ValueError, AttributeError):
        file = Path(path or "").expanduser() / "config.json"
        model_config = json.loads(file.read_text())
        model_type = str(model_config.get("model_type"))
        if model_type.isidentifier():
            return (
                "transformers.models.auto.tokenization_auto",
                f"transformers.models.{model_type}.modeling_{model_type}",
            )
    return ()
