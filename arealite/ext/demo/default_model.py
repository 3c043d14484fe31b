"""The model that `arealite serve-llm` serves without the option `model.path`."""

from pathlib import Path

from arealite.api.experiment_config import ServerConfig
from arealite.base.printable import fold


def sorting_model(config: ServerConfig) -> str:
    """Return the folder of a tiny model that sorts; make it if it does not exist.

    It is the hook `default_model`.
    """
    from arealite.ext.demo.sorting import make_kit  # imports torch

    kit = Path(config.cluster.run_root).expanduser() / "demo" / f"kit-seed{config.seed}"
    print(
        fold(
            f"model.path is not set: {kit}/model is served, a tiny model that sorts six digits. "
            "For your own: model.path=FOLDER"
        ),
        flush=True,
    )
    return str(make_kit(kit, config.seed) / "model")
