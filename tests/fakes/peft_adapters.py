"""Adapters that peft itself has made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

theirs_warns = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
"""Mark of tests in which peft changes a model."""
PATTERNS = {
    "rank_pattern": {"layers.1.mlp.down_proj": 2},
    "alpha_pattern": {"layers.0.self_attn.q_proj": 7},
}


def write_peft_adapter(model: Path, folder: Path, **options: Any) -> Any:
    """Write an adapter whose layers have several ranks and alphas; return peft's model.

    Args:
        model: Folder of the base model.
        folder: Gets the adapter.
        options: Other options of peft.
    """
    import peft

    options_of_all: dict[str, Any] = {
        "r": 3,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": ["q_proj", "down_proj"],
        "init_lora_weights": False,
        "task_type": "CAUSAL_LM",
        **PATTERNS,
        **options,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(model)
        theirs = peft.get_peft_model(base, peft.LoraConfig(**options_of_all))
    theirs.save_pretrained(str(folder))
    return theirs
