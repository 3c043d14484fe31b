"""A debate: the policy has both seats, pro and con, and is judged on what it says.

    python3 examples/debate.py model.path=/models/Qwen2.5-1.5B-Instruct

Rules judge here: they count evidence, reasons, structure, and see no meaning. With a model as the
judge, one that is not trained, behind any OpenAI-style endpoint:

    python3 examples/debate.py model.path=… trainer.ppo.collector.env.debate.judge=model \\
        trainer.ppo.collector.seats.judge.type=fixed_policy \\
        trainer.ppo.collector.seats.judge.fixed_policy.base_url=http://127.0.0.1:8000/v1

On a laptop, where a tiny model that knows forty words learns which of them count
(tools/lessons/debate.py):

    python3 examples/debate.py

Watch reward/parts/score and reward/seat/pro/mean beside reward/seat/con/mean: an episode is one
trajectory a seat, and advantages compare each seat with itself.
"""

from _run import ONE_GPU, lesson, train

COLLECTOR = "trainer.ppo.collector"
OPTIONS = [
    *ONE_GPU,
    "dataset.train=generated",  # the built-in claims, or rows with one as prompt
    f"{COLLECTOR}.env.type=debate",
    f"{COLLECTOR}.env.debate.rounds=2",
    f"{COLLECTOR}.env.debate.words=120",
    f"{COLLECTOR}.env.debate.win_reward=0.5",
    f"{COLLECTOR}.agent.type=math_code_single_step",  # each observation has all that was said
    f"{COLLECTOR}.agent.math_code_single_step.system_prompt='You debate well, and fairly.'",
    "trainer.ppo.batch_size=128",
    "trainer.ppo.total_steps=200",
    "trainer.ppo.lr=1e-6",
    f"{COLLECTOR}.sampling.max_new_tokens=384",
]


def laptop() -> list[str]:
    return [*lesson("debate"), f"{COLLECTOR}.agent.math_code_single_step.system_prompt=null"]


if __name__ == "__main__":
    train(OPTIONS, laptop)
