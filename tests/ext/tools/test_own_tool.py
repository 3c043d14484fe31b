"""A tool of a user: registered with a config class, configured by options, called."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.fields import opt
from arealite.api.observation import ToolCall
from arealite.api.task import Task
from arealite.api.tool import Tool, function, tools
from arealite.cli.configs import load
from arealite.ext.tools.toolbox import Toolbox


@dataclass(frozen=True, kw_only=True)
class DiceConfig:
    """Options of the dice tool."""

    sides: int = opt(6, "numbers from 1 to this", at_least=1)


@tools.register("dice", config=DiceConfig)
class Dice(Tool):
    """Throws dice."""

    schema = function(
        "dice", "Throw dice.", required=("count",), count={"type": "integer", "minimum": 1}
    )

    async def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> str:
        throws = range(arguments["count"])
        return " ".join(str(random.randint(1, self.config.sides)) for _ in throws)


async def test_tool_of_a_user_has_typed_options_and_is_called(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    own = "trainer.ppo.collector.env.tools"
    config = load(
        ExperimentConfig, tmp_path / "empty.yaml", [f"{own}.tools=[dice]", f"{own}.dice.sides=1"]
    )
    box = Toolbox(config.trainer.ppo.collector.env.tools)
    await box.setup()
    async with box.episode(
        Task(task_id="t", prompt="?", ground_truth="1", extra_info={})
    ) as states:
        assert await box.call(
            ToolCall(call_id="1", name="dice", arguments={"count": 3}), states
        ) == ("1 1 1", "fine")
    await box.close()
