r"""PPO with a critic (arXiv 1707.06347): GAE instead of groups, a KL penalty in the reward.

    python3 examples/ppo_critic.py model.path=/models/Qwen2.5-0.5B-Instruct dataset.train=math.jsonl

The critic starts as a copy of the policy with a new head, and estimates a value for every token. So
one answer per question is enough; GRPO compares eight. On a laptop:

    python3 examples/ppo_critic.py

Watch critic/explained_variance: a critic at 0 is no better than the mean return (on a laptop, in 60
steps: from 0.00 to 0.19; right held-out answers from 0.31 to 0.67).
"""

from _run import ONE_GPU, sorting, train

AGENT = "trainer.ppo.collector.agent.math_code_single_step"
OPTIONS = [
    *ONE_GPU,
    "dataset.train=generated",
    "dataset.eval=generated",
    f"{AGENT}.system_prompt='Reason step by step, and put your final answer into \\boxed{{}}.'",
    # the algorithm
    "trainer.ppo.collector.group_size=1",
    "trainer.ppo.advantage.type=gae",
    "trainer.ppo.advantage.gae_lambda=1.0",  # reward at the end only: the critic is a baseline
    "trainer.ppo.advantage.normalize=true",
    "trainer.ppo.critic.lr=1e-5",
    "trainer.ppo.kl.place=reward",
    "trainer.ppo.kl.estimator=k1",
    "trainer.ppo.kl.coef=0.001",
    "trainer.ppo.kl.reference=initial",
    # the run
    "trainer.ppo.max_staleness=1",
    "trainer.ppo.batch_size=512",
    "trainer.ppo.updates=4",  # minibatches of 128
    "trainer.ppo.total_steps=200",
    "trainer.ppo.lr=1e-6",
    "trainer.ppo.collector.sampling.max_new_tokens=1024",
    "trainer.ppo.eval.sampling.max_new_tokens=1024",
    "trainer.ppo.eval.every_steps=20",
]


def laptop() -> list[str]:
    return [*sorting(), "trainer.ppo.critic.lr=1e-3", f"{AGENT}.system_prompt=null"]


if __name__ == "__main__":
    train(OPTIONS, laptop)
