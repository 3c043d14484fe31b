"""The options of an adapter that is added to a session."""

from collections.abc import Mapping
from pathlib import Path

from arealite.api.engine import NewAdapter, Training
from arealite.api.engine_config import NAMED_RANK
from arealite.api.experiment_config import ExperimentConfig
from arealite.base.errors import UserError
from arealite.ext.session.call_loss import changed


def new_adapter(
    config: ExperimentConfig,
    name: str,
    lora: Mapping[str, object] | None = None,
    *,
    seed: int | None = None,
    folder: Path | None = None,
    optimizer: Mapping[str, object] | None = None,
) -> NewAdapter:
    """Return an adapter; options that are absent or None are those of the session.

    Args:
        config: The session's options.
        name: The adapter's name.
        lora: Options of `engine.fsdp.lora`.
        seed: Of its first values.
        folder: An adapter that peft wrote, with which it starts.
        optimizer: Options of `optimizer`.

    Raises:
        UserError: The name or an option is wrong.
    """
    ppo = config.trainer.ppo
    default = ppo.engine.fsdp.lora
    options: dict[str, object] = {"rank": default.rank or NAMED_RANK}
    for option, value in (lora or {}).items():
        if value is not None:
            options[option] = value
    if not options["rank"]:
        raise UserError("add_adapter: rank=0: use at least 1.")
    return NewAdapter(
        name=name,
        config=changed(default, "add_adapter", options),
        training=Training(
            optimizer=changed(ppo.optimizer, "add_adapter", optimizer or {}),
            lr=ppo.lr,
            total_updates=ppo.total_steps * ppo.updates * ppo.epochs,
        ),
        seed=config.seed if seed is None else seed,
        folder=folder,
    )
