"""Self-play: the policy plays tic-tac-toe against itself; held-out games are against a random seat.

    python3 examples/self_play.py model.path=/models/Qwen2.5-0.5B-Instruct

The run has three environments. In `self` both seats are the policy. In `as_x` and `as_o` the other
seat plays at random; they are for held-out games. On a laptop (tools/lessons/tic_tac_toe.py):

    python3 examples/self_play.py

Watch eval/reward/as_x and /as_o, the share of games won, and reward/parts/illegal, which falls.
"""

from _run import ONE_GPU, lesson, train

ENVS = "trainer.ppo.collector.envs"


def against_chance(name: str, chance: str) -> list[str]:
    """Return the options of an environment in which one seat plays at random."""
    return [
        f"{ENVS}.{name}.env.type=tic_tac_toe",
        f"{ENVS}.{name}.seats.{chance}.type=scripted",
        f"{ENVS}.{name}.seats.{chance}.scripted.policy=random",
        f"{ENVS}.{name}.weight=0.02",  # mainly for evaluation
        f"{ENVS}.{name}.eval=generated",
    ]


OPTIONS = [
    *ONE_GPU,
    f"{ENVS}.self.env.type=tic_tac_toe",
    f"{ENVS}.self.env.tic_tac_toe.opening_moves=4",  # random moves: otherwise all games are alike
    *against_chance("as_x", chance="o"),
    *against_chance("as_o", chance="x"),
    "trainer.ppo.batch_size=256",
    "trainer.ppo.total_steps=200",
    "trainer.ppo.lr=1e-6",
    "trainer.ppo.collector.sampling.max_new_tokens=64",
    "trainer.ppo.eval.sampling.max_new_tokens=64",
    "trainer.ppo.eval.every_steps=20",
]


def laptop() -> list[str]:
    return lesson("tic_tac_toe")


if __name__ == "__main__":
    train(OPTIONS, laptop)
