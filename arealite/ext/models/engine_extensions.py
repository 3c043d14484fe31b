"""The extensions of the engine (hook `engine_extension`).

Each is imported only if its option is on.
"""

from typing import Any

from arealite.api.engine_extension import EngineExtension, EngineSetup
from arealite.base.model_folder import experts_of


def adapters(setup: EngineSetup) -> EngineExtension | None:
    """Return the adapters of a trained model: that of the config, and those added by name."""
    options = setup.config.lora
    has_adapters = options.rank > 0 or options.only_named or setup.adapter
    if not setup.is_trained or not has_adapters:
        return None
    from arealite.ext.models.adapters import Adapters  # imports transformers

    return Adapters(setup)


def context_parallel(setup: EngineSetup) -> EngineExtension | None:
    """Return what divides the tokens of rows among ranks."""
    size = setup.config.context_parallel
    if size == 1:
        return None
    from arealite.ext.models.context_parallel import ContextGroup

    return ContextGroup(size, setup.module, setup.device)


def expert_replay(setup: EngineSetup) -> EngineExtension | None:
    """Return what replays the experts that servers recorded, for a mixture of experts."""
    if not _trains_policy(setup) or not experts_of(setup.module.config.to_dict()):
        return None
    from arealite.ext.models.expert_routing import ExpertReplay

    return ExpertReplay(setup.module)


def router_loss(setup: EngineSetup) -> EngineExtension | None:
    """Return the load-balancing loss, if the model's config asks for it."""
    config: Any = setup.module.config.get_text_config()
    has_logits = getattr(config, "output_router_logits", False)
    if not _trains_policy(setup) or not has_logits or not config.router_aux_loss_coef:
        return None
    from arealite.ext.models.router_loss import RouterLoss

    return RouterLoss.of(setup.module, setup.device)


def _trains_policy(setup: EngineSetup) -> bool:
    return setup.is_trained and setup.head == "lm"
