"""The lesson `calculator`, learned by an agent of OpenAI's SDK: `make learn LESSON=foreign_agent`.

The agent is `solve` of examples/openai_agent.py, and talks to the model through the gateway. Other
agents of examples/ learn the same lesson:

    python3 tools/learn.py foreign_agent trainer.ppo.collector.env.harness.run=examples/messages_agent.py:solve
"""  # noqa: E501  (the command is one line)

from __future__ import annotations

from dataclasses import replace

from tools.learn import ROOT
from tools.lessons import calculator

ENV = calculator.ENV
NATIVE = (f"{ENV}.type=", f"{ENV}.tools.", "trainer.ppo.collector.agent.")
"""Options of the lesson `calculator` that belong to AReaLite's own agent and environment."""

LESSON = replace(
    calculator.LESSON,
    about="an agent of OpenAI's SDK learns when to call the calculator",
    overrides=[
        f"{ENV}.type=harness",
        f"{ENV}.harness.run={ROOT / 'examples/openai_agent.py'}:solve",
        *(f'{ENV}.harness.arithmetic.{name}="{each}"' for name, each in calculator.TASKS.items()),
        "launcher.rollout_workers=2",  # the SDK takes more CPU time than one process has
        *(word for word in calculator.LESSON.overrides if not word.startswith(NATIVE)),
    ],
)
