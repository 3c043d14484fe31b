r"""An agent of your own: it asks again until the answer has the form that was asked for.

    python3 examples/custom_agent.py model.path=/models/Qwen2.5-0.5B-Instruct \
        trainer.ppo.collector.agent.retry.cost=0.2

An agent is a seat in an environment; a fresh one acts in each episode. This one holds a
conversation (ChatAgent keeps its exact tokens), so a second try sees the first. Its options are
typed keys like all others. On a laptop:

    python3 examples/custom_agent.py

Watch reward/parts/retries and episode/turns_mean, which fall as the model learns the form (there,
in 60 steps: retries from 0.84 to 0.27, reward from 0.25 to 0.62).
"""

import re
from dataclasses import dataclass

from _run import ONE_GPU, sorting, train

from arealite.api.agent import agents
from arealite.api.agent_config import ChatConfig
from arealite.api.fields import opt
from arealite.impl.agent.chat import ChatAgent


@dataclass(frozen=True, kw_only=True)
class RetryConfig(ChatConfig):
    """What a good answer looks like, and what is said to another."""

    form: str = opt(r"\\boxed\{.+\}", "regular expression that is found in a good answer")
    hint: str = opt(r"Put your final answer into \boxed{}.", "what is said to others")
    cost: float = opt(0.1, "taken from the reward for each further try", at_least=0)
    max_turns: int | None = opt(3, "answers at most", at_least=1)


@agents.register("retry", config=RetryConfig)
class RetryAgent(ChatAgent):
    """Acts with its first answer of the right form, or with its last one."""

    async def act(self, observation):
        action, retries = await super().act(observation), 0
        while not action.is_last and not re.search(self.config.form, action.text):
            action, retries = await super().act(self.config.hint), retries + 1
        self.reward(-self.config.cost * retries, retries=retries)
        return action


AGENT = "trainer.ppo.collector.agent"
OPTIONS = [
    *ONE_GPU,
    f"imports=[{__file__}]",  # every process of the run imports this file, and so knows `retry`
    f"{AGENT}.type=retry",
    "dataset.train=generated",
    "dataset.eval=generated",
    "trainer.ppo.batch_size=256",
    "trainer.ppo.total_steps=200",
    "trainer.ppo.lr=1e-6",
    "trainer.ppo.collector.sampling.max_new_tokens=512",
    "trainer.ppo.eval.sampling.max_new_tokens=512",
]


def laptop() -> list[str]:
    return [*sorting(), f"{AGENT}.retry.form='^[1-9]{{6}}$'", f"{AGENT}.retry.hint='='"]


if __name__ == "__main__":
    train(OPTIONS, laptop)
