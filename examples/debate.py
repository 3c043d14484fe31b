"""A debate: the policy has both seats, pro and con; a judge scores their texts.

    python3 examples/debate.py model.path=/models/Qwen2.5-1.5B-Instruct

Here rules are the judge: they count evidence, reasons and structure, and ignore meaning. To use a
model as the judge, which is not trained, behind any OpenAI-style endpoint:

    python3 examples/debate.py model.path=… trainer.ppo.collector.env.debate.judge=model \\
        trainer.ppo.collector.seats.judge.type=fixed_policy \\
        trainer.ppo.collector.seats.judge.fixed_policy.base_url=http://127.0.0.1:8000/v1

On a laptop, a tiny model with a vocabulary of forty words learns which words the rules count
(tools/lessons/debate.py):

    python3 examples/debate.py

Watch reward/parts/score, reward/seat/pro/mean and reward/seat/con/mean. An episode has one
trajectory for each seat; advantages compare a seat with the same seat in other episodes.
"""

from _run import ONE_GPU, lesson, train

COLLECTOR = "trainer.ppo.collector"
OPTIONS = [
    *ONE_GPU,
    "dataset.train=generated",  # built-in claims, or rows with a claim as prompt
    f"{COLLECTOR}.env.type=debate",
    f"{COLLECTOR}.env.debate.rounds=2",
    f"{COLLECTOR}.env.debate.words=120",
    f"{COLLECTOR}.env.debate.win_reward=0.5",
    f"{COLLECTOR}.agent.type=math_code_single_step",  # each observation contains the whole debate
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
