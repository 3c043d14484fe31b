"""Repeats the steps of a session from its ledger, and compares the parameters after each step."""

import json
import tempfile
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from arealite.api.experiment_config import ExperimentConfig
from arealite.base import config_tree
from arealite.base.errors import UserError
from arealite.base.trial_files import RunPaths
from arealite.ext.replay.command import load
from arealite.ext.replay.replay_trainer import Differs
from arealite.ext.session.call_loss import Loss, rebuild_loss
from arealite.ext.session.policy import Policy
from arealite.ext.session.recorded_updates import (
    RecordedBackward,
    RecordedUpdate,
    decode_updates,
    loss_options,
    row_of,
    sample_of,
)
from arealite.system.ledger.ledger import open_read_only, read_payloads

STEPS = """
SELECT s.step, fingerprint, trained, updates FROM steps s LEFT JOIN session_steps USING (step)
ORDER BY s.step"""


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A step of a session."""

    number: int
    fingerprint: str
    updates: list[RecordedUpdate]


def replay_session(paths: RunPaths, to: int | None) -> int:
    """Repeat the steps up to number `to` (None: all); return how many there are.

    Raises:
        UserError: There is no step, or a step cannot be repeated.
        Differs: The parameters of a step are others than in the session.
    """
    load(paths.config)  # checks the model, and lets the functions of this folder be imported
    steps = _read_steps(paths, to)
    with (
        tempfile.TemporaryDirectory(prefix="arealite-replay-") as scratch,
        closing(SessionReplayer(ledger=paths.ledger, scratch=Path(scratch) / "state")) as replayer,
    ):
        for step in steps:
            replayer.use(_config_of(paths, step.number))
            replayer.repeat(step)
    return len(steps)


def _read_steps(paths: RunPaths, to: int | None) -> list[RecordedStep]:
    steps = list[RecordedStep]()
    with open_read_only(paths.ledger) as db:
        rows = db.execute(STEPS).fetchall()
    for number, fingerprint, trained, encoded in rows:
        if to is not None and number >= to:
            break
        updates = decode_updates(encoded) if encoded else []
        recorded_ids = {row.trajectory_id for update in updates for row in update.rows}
        if recorded_ids != {*json.loads(trained)}:
            raise UserError(f"{paths.ledger} lacks the updates of step {number + 1}. Restore it.")
        step = RecordedStep(number=number, fingerprint=fingerprint, updates=updates)
        for update in updates:
            for backward in update.backwards:
                _check_function(step, backward.function)
        steps.append(step)
    if not steps:
        raise UserError(f"{paths.root} has no trained step to replay.")
    return steps


def _check_function(step: RecordedStep, name: str) -> None:
    """Raise UserError if a replay cannot import the loss of a step."""
    if not name:
        return
    try:
        _function(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"step {step.number + 1} cannot be repeated: its loss is the function {name}, which "
            f"cannot be imported ({error}). Define it in a module of this folder; "
            f"or replay the steps before it, with --to {step.number}."
        ) from error


def _function(name: str) -> Any:
    """Return a function of the user by its module:name.

    Raises:
        ImportError: There is no such module; AttributeError: it has no such name; ValueError: the
            name is no module:name.
    """
    module_name, _, function_name = name.partition(":")
    if module_name == "__main__":
        raise ImportError("it is of the script or notebook itself")
    return getattr(import_module(module_name), function_name)


def _config_of(paths: RunPaths, step: int) -> Path:
    """Return the config of the start after which a step was trained."""
    files = [file for first, file in paths.starts.items() if first <= step]
    return files[-1] if files else paths.config


class SessionReplayer:
    """A model that repeats steps."""

    def __init__(self, *, ledger: Path, scratch: Path) -> None:
        """Load no model yet.

        Args:
            ledger: The ledger of the session.
            scratch: Where the state is while the config changes.
        """
        self._ledger = ledger
        self._scratch = scratch
        self._policy: Policy | None = None
        self._config: ExperimentConfig
        self._config_text = ""

    def use(self, file: Path) -> None:
        """Train with a config from now on; a new model gets the state of the one before."""
        config_text = file.read_text("utf-8")
        if config_text == self._config_text:
            return
        self._config_text = config_text
        earlier = self._policy
        if earlier is not None:
            earlier.save(self._scratch, "")
        self.close()
        self._config = self._without_run_folder(load(file))
        policy = Policy()
        self._policy = policy
        policy.load_model(self._config)
        if earlier is not None:
            policy.load(self._scratch, "")

    def _without_run_folder(self, config: ExperimentConfig) -> ExperimentConfig:
        """Return a config with which other ranks write to the scratch folder only."""
        folder = str(self._scratch.parent)
        cluster = replace(config.cluster, run_root=folder, name_root=folder)
        return replace(config, cluster=cluster)

    def close(self) -> None:
        """Release the model."""
        if self._policy is not None:
            self._policy.close()
            self._policy = None

    def repeat(self, step: RecordedStep) -> None:
        """Train a step.

        Raises:
            Differs: The parameters are others than in the session.
        """
        assert self._policy is not None, "use a config first"
        for update in step.updates:
            for backward in update.backwards:
                self._add_gradient(self._policy, backward)
            options_type = type(self._config.trainer.ppo.optimizer)
            optimizer = config_tree.build(options_type, update.optimizer)
            self._policy.optim_step("", update.lr, optimizer)
        fingerprint = self._policy.fingerprint()
        if fingerprint != step.fingerprint:
            raise Differs(
                f"step {step.number + 1} is the first that differs: its parameters are "
                f"{fingerprint} here, {step.fingerprint} in the session."
            )

    def _add_gradient(self, policy: Policy, backward: RecordedBackward) -> None:
        trajectory_ids = [row.trajectory_id for row in backward.rows]
        payloads = read_payloads(self._ledger, trajectory_ids)
        rows = [
            row_of(record, sample_of(record.trajectory_id, payload))
            for record, payload in zip(backward.rows, payloads, strict=True)
        ]
        policy.forward_backward([*rows], self._loss(backward))

    def _loss(self, backward: RecordedBackward) -> Loss:
        options, kl = loss_options(backward, self._config.trainer.ppo)
        function = _function(backward.function) if backward.function else None
        return rebuild_loss(function, options, kl, backward.record_outputs)
