"""Checks context parallelism against the model before a run starts."""

from typing import Any

from arealite.api.experiment_config import ExperimentConfig
from arealite.base.errors import UserError
from arealite.base.model_folder import Shapes, text_part

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers in which a token depends on others through attention alone."""


def check_run(config: ExperimentConfig, model: dict[str, Any], shapes: Shapes) -> None:
    """Check the context parallelism of a run (hook `model_check`); see check_context_parallel."""
    check_context_parallel(
        model,
        size=config.trainer.selected_options.engine.fsdp.context_parallel,
        ranks=config.launcher.trainer_ranks,
    )


def check_context_parallel(config: dict[str, Any], *, size: int, ranks: int) -> None:
    """Raise UserError unless groups of `size` of the `ranks` can share the tokens of a row."""
    key = f"engine.fsdp.context_parallel={size}"
    text_model = text_part(config)
    layer_types: list[str] = text_model.get("layer_types") or []
    recurrent = {*layer_types} - ATTENTION_LAYERS
    if size > 1 and recurrent:
        raise UserError(
            f"{key}: the model has layers of {', '.join(sorted(recurrent))}, "
            "whose tokens depend on each other. Use 1."
        )
    if size > 1 and text_model.get("output_router_logits"):
        raise UserError(f"{key}: the loss of output_router_logits needs whole rows. Use 1.")
    heads = text_model.get("num_attention_heads") or size
    for number, unit in (ranks, "trainer ranks"), (heads, "attention heads of the model"):
        if number % size:
            raise UserError(f"{key} does not divide the {number} {unit}. Use a divisor.")
