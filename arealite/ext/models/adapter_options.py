"""The options of a run's adapters, and their checks before the run starts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from arealite.api.engine import Head
from arealite.api.engine_config import LoRAConfig
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.fields import Package
from arealite.base.errors import UserError
from arealite.base.extras import extra_requirement
from arealite.base.model_folder import Shapes
from arealite.ext.models.adapter_folder import adapted, read_adapter


def packages_of(config: ExperimentConfig) -> Iterator[Package]:
    """Yield the package of adapters for each option that needs it (hook `packages`)."""
    peft = extra_requirement("lora")
    engine = config.trainer.selected_options.engine
    section = "trainer.offline" if config.trainer.is_offline else "trainer.ppo"
    if engine.type == "fsdp" and engine.fsdp.lora.rank:
        option = f"{section}.engine.fsdp.lora.rank={engine.fsdp.lora.rank}"
        yield Package("peft", peft, option)
    if engine.type == "fsdp" and engine.fsdp.lora.only_named:
        yield Package("peft", peft, f"{section}.engine.fsdp.lora.only_named=true")
    if config.model.adapter:
        yield Package("peft", peft, f"model.adapter={config.model.adapter}")


def check_folder(config: ExperimentConfig, model: dict[str, Any], shapes: Shapes) -> None:
    """Check that the adapters fit the model's folder (hook `model_check`); see lora_of."""
    lora_of(config, shapes)


def check_module(config: ExperimentConfig, module: Any, head: Head) -> None:
    """Check that the adapters fit the empty model, which gets them (hook `module_check`).

    Raises:
        UserError: See lora.inject and lora.load_adapter.
    """
    adapter = config.model.adapter
    folder = Path(adapter).expanduser() if adapter else None
    options = lora_of(config, {})
    if not options.rank:
        return
    from arealite.ext.models import lora  # imports torch

    lora.inject(module, options, head, folder)
    if folder:
        lora.load_adapter(module, folder)


def lora_of(config: ExperimentConfig, shapes: Shapes) -> LoRAConfig:
    """Return the options of the run's adapters, from model.adapter where it is set.

    Raises:
        UserError: Adapter or targets do not fit the model, or options differ from the adapter.
    """
    lora = config.trainer.selected_options.engine.fsdp.lora
    adapter = config.model.adapter
    if not adapter:
        _check_targets(lora, shapes)
        return lora
    if config.trainer.type == "reward":
        raise UserError("trainer.type=reward cannot start from an adapter. Set model.adapter=null.")
    adapter_config = read_adapter(adapter, shapes)
    rank = adapter_config["r"]
    alpha = adapter_config["lora_alpha"]
    if lora.rank:
        _check_equal_option("rank", lora.rank, rank)
        _check_equal_option("alpha", lora.alpha, alpha)
    targets = adapter_config.get("target_modules")
    if not isinstance(targets, list):
        targets = ["all-linear"]
    return replace(lora, rank=rank, alpha=alpha, targets=targets)


def _check_targets(lora: LoRAConfig, shapes: Shapes) -> None:
    """Check the layers that new adapters are for; shapes={}: the layers are unknown."""
    if lora.targets != ["all-linear"] and "all-linear" in lora.targets:
        raise UserError(
            f"engine.fsdp.lora.targets {lora.targets}: all-linear means all layers. "
            "Remove the other names."
        )
    is_adapted = adapted(shapes, lora.targets)
    if lora.rank and is_adapted and not any(is_adapted.values()):
        leaves = sorted({name.rpartition(".")[2] for name in is_adapted})
        raise UserError(
            f"engine.fsdp.lora.targets {lora.targets}: model.path has no such layer. "
            f"Use some of {', '.join(leaves)}, or [all-linear]."
        )


def _check_equal_option(name: str, option: float, of_adapter: float) -> None:
    """Check that an option of the config is equal to that of model.adapter."""
    if option != of_adapter:
        raise UserError(
            f"engine.fsdp.lora.{name}={option}, but model.adapter has {of_adapter}. "
            f"Remove engine.fsdp.lora.{name}."
        )
