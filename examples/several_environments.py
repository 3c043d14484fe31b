"""Several environments in a run: sums without and with a calculator, in a ratio of two to one.

    python3 examples/several_environments.py model.path=/models/Qwen2.5-1.5B-Instruct

Each environment has its own tasks, seats and weight; metrics are reported for each. A curriculum
draws more tasks of an environment in which some episodes succeed and some fail. On a laptop, with
the model of tools/lessons/calculator.py:

    python3 examples/several_environments.py

Watch reward/sums/mean, reward/calls/mean, and curriculum/<class>/share: `calls` soon succeeds, and
is then drawn less often (on a laptop, in 36 steps: right answers from 0.5 to 0.9, share from 0.36
to 0.26).
"""

import random

from _run import ONE_GPU, lesson, train, write

ENVS = "trainer.ppo.collector.envs"
OPTIONS = [
    *ONE_GPU,
    f"{ENVS}.sums.env.type=math",
    f"{ENVS}.sums.weight=2",
    f"{ENVS}.sums.train=generated",  # or a file
    f"{ENVS}.sums.eval=generated",
    f"{ENVS}.calls.env.type=tools",
    f"{ENVS}.calls.env.tools.tools=[calculator]",
    f"{ENVS}.calls.seats.agent.type=tool_use",
    f"{ENVS}.calls.eval=generated",
    "datapipe.curriculum.by=env",
    "trainer.ppo.batch_size=256",
    "trainer.ppo.total_steps=200",
    "trainer.ppo.lr=1e-6",
    "trainer.ppo.collector.sampling.max_new_tokens=512",
    "trainer.ppo.eval.sampling.max_new_tokens=512",
]


def laptop() -> list[str]:
    model, *_ = lesson("calculator")
    dice = random.Random(1)
    sums = [(dice.randint(1, 9), dice.randint(1, 9)) for _ in range(1024)]
    rows = [{"prompt": f"{a}+{b}=", "ground_truth": str(a + b)} for a, b in sums]
    return [
        model,
        f"{ENVS}.sums.train={write('sums.jsonl', rows)}",
        f"{ENVS}.sums.eval=null",
        f"{ENVS}.calls.env.tools.arithmetic.digits=2",
        f"{ENVS}.calls.env.tools.arithmetic.prompt='{{}}='",
        f"{ENVS}.calls.env.tools.max_turns=3",
        "trainer.ppo.total_steps=40",
        "trainer.ppo.updates=2",
        "trainer.ppo.max_staleness=2",
        "trainer.ppo.lr=4e-4",
        "trainer.ppo.optimizer.schedule=linear",
        "trainer.ppo.collector.sampling.max_new_tokens=12",
        "trainer.ppo.eval.sampling.max_new_tokens=12",
    ]


if __name__ == "__main__":
    train(OPTIONS, laptop)
