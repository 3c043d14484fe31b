"""Options of an environment: its type, its runtime, and the options of each type."""

from __future__ import annotations

from dataclasses import dataclass

from arealite.api.adapter_config import (
    GyLLMConfig,
    GymnasiumConfig,
    OpenEnvConfig,
    ReasoningGymConfig,
    TextArenaConfig,
    VerifiersConfig,
)
from arealite.api.browser_config import BrowserEnvConfig, WebArenaConfig
from arealite.api.fields import Constraints, opt, sub
from arealite.api.game_config import (
    DebateConfig,
    MathEnvConfig,
    MatrixGameConfig,
    PrisonersDilemmaConfig,
    ReverseConfig,
    TicTacToeConfig,
)
from arealite.api.harness_config import HarnessConfig
from arealite.api.runtime import RuntimeConfig
from arealite.api.sandbox import CodeEnvConfig
from arealite.api.tool_config import ToolsEnvConfig


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """The environment of the episodes."""

    type: str = opt("math", "registered name of the environment")
    runtime: RuntimeConfig = sub(RuntimeConfig, "process and host of the environment")
    math: MathEnvConfig = sub(MathEnvConfig, "options of type=math")
    code: CodeEnvConfig = sub(CodeEnvConfig, "options of type=code")
    tools: ToolsEnvConfig = sub(ToolsEnvConfig, "options of type=tools")
    debate: DebateConfig = sub(DebateConfig, "options of type=debate")
    tic_tac_toe: TicTacToeConfig = sub(TicTacToeConfig, "options of type=tic_tac_toe")
    matrix_game: MatrixGameConfig = sub(MatrixGameConfig, "options of type=matrix_game")
    iterated_prisoners_dilemma: PrisonersDilemmaConfig = sub(
        PrisonersDilemmaConfig, "options of type=iterated_prisoners_dilemma"
    )
    reverse: ReverseConfig = sub(ReverseConfig, "options of type=reverse")
    reverse_echo: ReverseConfig = sub(ReverseConfig, "options of type=reverse_echo")
    browser: BrowserEnvConfig = sub(BrowserEnvConfig, "options of type=browser")
    webarena: WebArenaConfig = sub(WebArenaConfig, "options of type=webarena")
    reasoning_gym: ReasoningGymConfig = sub(ReasoningGymConfig, "options of type=reasoning_gym")
    gymnasium: GymnasiumConfig = sub(GymnasiumConfig, "options of type=gymnasium")
    gyllm: GyLLMConfig = sub(GyLLMConfig, "options of type=gyllm")
    textarena: TextArenaConfig = sub(TextArenaConfig, "options of type=textarena")
    openenv: OpenEnvConfig = sub(OpenEnvConfig, "options of type=openenv")
    verifiers: VerifiersConfig = sub(VerifiersConfig, "options of type=verifiers")
    harness: HarnessConfig = sub(HarnessConfig, "options of type=harness")

    def constraints(self) -> Constraints:
        """Yield the constraint of environments that need the gateway."""
        is_here = self.type != "harness" or self.runtime.type == "in_process"
        what = f"runtime.type={self.runtime.type}: the rollout worker serves the agents of"
        yield is_here, f"{what} type={self.type}. Use runtime.type=in_process."
