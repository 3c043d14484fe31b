"""Checks that a model can be trained to continue texts, before a run starts."""

import importlib.util
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.offline import offline_run
from arealite.base.errors import UserError
from arealite.base.model_folder import Shapes

ENCODERS = "ForMaskedLM", "ForPreTraining", "Classification", "ForQuestionAnswering"
"""Ends of the names of architectures without a head for causal language modelling."""
WITH_IMAGES = "llama4", "mllama"
"""Model types of which transformers cannot load the text part alone."""
CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = "


def check_run(config: ExperimentConfig, model: dict[str, Any], shapes: Shapes) -> None:
    """Check the model of a run that trains a language model (hook `model_check`)."""
    trainer = config.trainer
    head = offline_run(trainer.type).head if trainer.is_offline else "lm"
    if head == "lm":
        check_layers(model, config.model.path)


def check_layers(config: dict[str, Any], path: Path | str) -> None:
    """Raise UserError for a model that generates no text from text alone, or is quantized."""
    if config.get("quantization_config"):
        raise UserError(
            f"model.path={path} is quantized, which cannot be trained. "
            "Use weights in bfloat16, and a config.json without quantization_config."
        )
    model_type = config.get("model_type", "(none)")
    architectures = config.get("architectures") or [""]
    is_encoder = any(architecture.endswith(ENCODERS) for architecture in architectures)
    supported_types = causal_types()
    if config.get("is_encoder_decoder") or is_encoder:
        obstacle = f"a {architectures[0] or model_type}, which cannot continue a text"
    elif supported_types and model_type not in supported_types:
        obstacle = (
            f"of type '{model_type}', "
            "which this version of transformers does not know as a text model"
        )
    elif model_type in WITH_IMAGES and "vision_config" in config:
        obstacle = f"of type '{model_type}' with tensors for images, which are not supported"
    else:
        return
    raise UserError(f"model.path={path} is {obstacle}. Use a model for causal language modelling.")


def causal_types() -> set[str]:
    """Return the model types that transformers loads with AutoModelForCausalLM; {}: unknown.

    They are read from its source, because an import takes seconds.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None:
        return set()
    file = Path(spec.origin or "").parent / "models/auto/modeling_auto.py"
    with suppress(OSError):
        _, _, after_name = file.read_text(encoding="utf-8").partition(CAUSAL)
        mapping = after_name.partition("]\n)")[0]
        return set(re.findall(r'\("([\w-]+)",', mapping))
    return set()
