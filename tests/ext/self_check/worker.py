"""One of two ranks that run the self-check several times."""

from __future__ import annotations

import json
from pathlib import Path

from arealite.api.experiment_config import ExperimentConfig, ModelConfig
from arealite.base.errors import UserError
from arealite.ext.self_check.check import SelfCheck
from arealite.impl.trainer.rank_group import World
from tests.fakes.embedded import server_config
from tests.impl.engine.helpers import make_engine


def main(folder: Path) -> None:
    """Compare the served model, a model of other weights, and a later version of the latter."""
    world = World.init(threads=1, seed=1)
    served = server_config(folder / "model", folder / "names")
    config = ExperimentConfig(cluster=served.cluster, model=ModelConfig(path=str(folder / "model")))
    found = dict[str, object]()
    for name, model, version in ("same", "model", 0), ("other", "other", 0), ("later", "other", 1):
        engine = make_engine(folder / model)
        check = SelfCheck(config, engine, world, version)
        made = check.compare()
        wrong = [each for each in made if not each.is_equal]
        try:
            text = check.refusal(wrong[0]) if wrong else "equal"
        except UserError as error:
            text = str(error)
        found[name] = [sorted(each.other.partition(" http")[0] for each in made), text]
    (folder / f"found-{world.rank}.json").write_text(json.dumps(found))
    world.destroy()
