"""Starts of a supervisor's roles from a warm parent: the entry `warm` of the group `role_starter`.

The modules that the warm parent imports are in stages: light roles do not wait for torch.
"""

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from arealite.api.experiment_config import ExperimentConfig, ServerConfig
from arealite.base import entries
from arealite.ext.warm_start import starts
from arealite.ext.warm_start.parent import freeze as freeze
from arealite.ext.warm_start.starts import WarmParent
from arealite.impl.launcher.processes import Child, threads

STAGE_OF_ROLE = {"datapipe": 0, "rollout": 1}
"""Number of the last stage that a role needs; the others need LAST_STAGE."""
LAST_STAGE = 2
ALL_ROLES = ("arealite.cli.role", "arealite.ext.warm_start.modules")
DATAPIPE = (*ALL_ROLES, "arealite.system.data.tasks", "arealite.system.datapipe.datapipe")
WORKER = ("uvloop", "jinja2", "tokenizers", "arealite.impl.rollout.worker")
SERVER = (
    "torch",
    "transformers",
    "arealite.cli.serve_llm",
    "arealite.ext.embedded.embedded_server",
)
DATAPIPE_HOOKS = ("task_sampler", "datapipe_control", "ledger_audit", "server_registrar")
WORKER_HOOKS = ("tokenizer_reader", "text_after_answer")
TRAINER_HOOKS = ("after_first_publish",)


class WarmStarter:
    """Starts roles from a warm parent, which starts with the first role that can start from it."""

    def __init__(self, warm: WarmParent, *, has_begun: bool = False) -> None:
        self.warm = warm
        self._has_begun = has_begun

    def begin(self) -> None:
        """Start the warm parent, which begins its imports."""
        self._has_begun = True
        self.warm.start()

    async def start_role(
        self, name: str, words: Sequence[str], *, log: Path | None, env: Mapping[str, str]
    ) -> Child:
        """Start a role; see `RoleStarter`."""
        if not self._has_begun and starts.can_start(words):
            self.begin()
        kind, _, _ = name.partition("-")
        stage = STAGE_OF_ROLE.get(kind, LAST_STAGE)
        return await self.warm.start_role(
            name,
            words,
            log=log,
            env=env,
            stage=min(stage, len(self.warm.stages) - 1),
        )

    def close(self) -> None:
        """Kill the warm parent; its roles continue."""
        self.warm.close()


_early: list[WarmStarter] = []
"""The starter that `begin` or `early` made."""


def of_run(config: ExperimentConfig, *, has_torch: bool = True) -> WarmStarter:
    """Return the starter that `early` made, or a new one of a run's supervisor.

    Args:
        config: The experiment.
        has_torch: Whether a role needs torch.
    """
    if _early:
        return _early[0]
    environment = threads(config.launcher.trainer_threads)
    return WarmStarter(WarmParent(_stages(config, has_torch), environment))


def of_server(config: ServerConfig) -> WarmStarter:
    """Return the starter that `begin` made, or a new one of a server's supervisor."""
    stages = [[*ALL_ROLES, *SERVER, *_model_modules(config.model.path)]]
    if not _early:
        return WarmStarter(WarmParent(stages, {}))
    _early[0].warm.stages = stages
    return _early[0]


def begin() -> None:
    """Fork the warm parent from this process, if this is a fork of a warm parent itself.

    Call it before this process has a thread or has imported a module of the user.

    Raises:
        Forked: See warm_parent.fork_warm_parent.
    """
    if not _early and (warm := starts.fork_here()) is not None:
        _early.append(WarmStarter(warm, has_begun=True))


@contextmanager
def early(config: ExperimentConfig) -> Generator[None]:
    """Import the modules of a local run during the body, before its launcher starts."""
    if _early:
        _early[0].warm.stages = _stages(config, has_torch=True)
        _early[0].warm.environment = threads(config.launcher.trainer_threads)
        yield
        return
    if config.launcher.type != "local" or not starts.is_possible():
        yield
        return
    starter = of_run(config)
    starter.begin()
    _early.append(starter)
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
        "train_engine": config.trainer.selected_options.engine.type,
        "weight_publisher": ppo.publisher.type,
    }
    heavy: list[str] = []
    if has_torch:
        heavy += [*SERVER, *_part_modules(trainer_parts), *_model_modules(config.model.path)]
        for logger in config.logger.types:
            heavy += _part_modules({"logger": logger})
    if config.trainer.is_offline:
        return [[*ALL_ROLES], [], heavy]
    if has_torch:
        heavy += _hook_modules(TRAINER_HOOKS)
    return [
        [*DATAPIPE, *_hook_modules(DATAPIPE_HOOKS)],
        [*WORKER, *_part_modules(worker_parts), *_hook_modules(WORKER_HOOKS)],
        heavy,
    ]


def _part_modules(types: dict[str, str]) -> list[str]:
    """Return the modules of built-in parts; parts of users are not imported here."""
    targets = [entries.own(kind).get(name) for kind, name in types.items()]
    return [module_of(target) for target in targets if target]


def _hook_modules(groups: Sequence[str]) -> list[str]:
    """Return the modules of AReaLite's own hooks of some groups."""
    return [module_of(value) for group in groups for value in entries.own(group).values()]


def module_of(target: str) -> str:
    """Return the module of a "module:attribute"."""
    return target.partition(":")[0]


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
