"""Options of an environment: its type, its runtime, and the options of each type."""

from dataclasses import dataclass

from arealite.api.fields import Constraints, opt, part, sub
from arealite.api.runtime import RuntimeConfig
from arealite.ext.adapters import config as adapters
from arealite.ext.games import config as games
from arealite.ext.harness.config import HarnessConfig
from arealite.ext.sandbox.config import CodeEnvConfig
from arealite.ext.tools.config import ToolsEnvConfig
from arealite.ext.web.config import BrowserEnvConfig, WebArenaConfig


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """The environment of the episodes."""

    type: str = opt("math", "registered name of the environment")
    runtime: RuntimeConfig = sub(RuntimeConfig, "process and host of the environment")
    math: games.MathEnvConfig = part(games.MathEnvConfig)
    code: CodeEnvConfig = part(CodeEnvConfig)
    tools: ToolsEnvConfig = part(ToolsEnvConfig)
    debate: games.DebateConfig = part(games.DebateConfig)
    tic_tac_toe: games.TicTacToeConfig = part(games.TicTacToeConfig)
    matrix_game: games.MatrixGameConfig = part(games.MatrixGameConfig)
    iterated_prisoners_dilemma: games.PrisonersDilemmaConfig = part(games.PrisonersDilemmaConfig)
    reverse: games.ReverseConfig = part(games.ReverseConfig)
    reverse_echo: games.ReverseConfig = part(games.ReverseConfig)
    browser: BrowserEnvConfig = part(BrowserEnvConfig)
    webarena: WebArenaConfig = part(WebArenaConfig)
    reasoning_gym: adapters.ReasoningGymConfig = part(adapters.ReasoningGymConfig)
    gymnasium: adapters.GymnasiumConfig = part(adapters.GymnasiumConfig)
    gyllm: adapters.GyLLMConfig = part(adapters.GyLLMConfig)
    textarena: adapters.TextArenaConfig = part(adapters.TextArenaConfig)
    openenv: adapters.OpenEnvConfig = part(adapters.OpenEnvConfig)
    verifiers: adapters.VerifiersConfig = part(adapters.VerifiersConfig)
    harness: HarnessConfig = part(HarnessConfig)

    def constraints(self) -> Constraints:
        """Yield the constraint of environments that need the gateway."""
        runtime = self.runtime.type
        can_reach_gateway = self.type != "harness" or runtime == "in_process"
        yield (
            can_reach_gateway,
            (
                f"runtime.type={runtime}: the rollout worker serves the agents of "
                f"type={self.type}. Use runtime.type=in_process."
            ),
        )
