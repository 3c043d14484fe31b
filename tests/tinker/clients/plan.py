"""The numbers of the learning curve, which three programs compute."""

RANK = 4
SEED = 11
NUM_STEPS = 6
NUM_SAMPLES = 4
NUM_TOKENS = 8
PROMPTS = [[5, 6, 7], [20, 21, 22, 23]]
LR = 0.02
ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 0.5}


def seed_of(step: int, prompt: int, member: int) -> int:
    """Return the seed of an answer."""
    return 1000 * step + 100 * prompt + member


def reward_of(tokens: list[int]) -> float:
    """Return the share of even tokens."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)
