"""A tabular critic learns the known values of a small Markov chain.

Token 3 stays, with probability 1/2 and reward 1; token 4 ends the episode. With gamma 0.9 the value
of every state is V = (1 + 0.9 V) / 2. The batch has each episode in proportion to its probability,
truncated after two tokens, so the test is deterministic.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from arealite.algo.losses import make_value_loss
from arealite.api.algorithm import AdvantageConfig, CriticConfig
from arealite.api.engine import LossInput, Sequence
from arealite.api.trainer import PPOConfig
from arealite.api.trajectory import Segment, TrajectoryHeader
from arealite.impl.trainer.batch import make_train_batch
from arealite.impl.trainer.batch_advantages import compute_advantages
from arealite.impl.trainer.rank_group import World
from tests.impl.trainer.trajectories import batch, header, segment

STAY, END = 3, 4
GAMMA = 0.9
VALUE = 0.5 / (1 - 0.5 * GAMMA)


class TabularCritic:
    """One value for each preceding token."""

    def __init__(self) -> None:
        self.values = torch.zeros(5, dtype=torch.float64, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.values], lr=1.5)

    def forward(self, rows: list[Sequence]) -> list[np.ndarray]:
        values = self.values.detach().numpy()
        before = [np.roll(row.tokens, 1) for row in rows]
        return [row.loss_mask * values[b] for row, b in zip(rows, before, strict=True)]

    def train_batch(self, rows: list[Sequence]) -> None:
        masks = [row.loss_mask for row in rows]
        flat = {
            name: torch.from_numpy(np.concatenate([r.fields[name][r.loss_mask] for r in rows]))
            for name in ("values", "returns", "loss_weight")
        }
        before = np.concatenate([np.roll(r.tokens, 1)[m] for r, m in zip(rows, masks, strict=True)])
        outputs = {"values": self.values[torch.from_numpy(before.astype(np.int64))]}
        loss, _ = make_value_loss(CriticConfig(value_clip=None))(
            LossInput(outputs=outputs, rows_N=before, fields=flat)
        )
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def chain() -> list[tuple[TrajectoryHeader, list[Segment]]]:
    """Return 8 episodes; every second episode has an environment step between its tokens."""
    played = []
    for stays, count in ((0, 4), (1, 2), (2, 2)):
        for member in range(count):
            tokens = [STAY] * stays + [END] * (stays < 2)
            name = f"{stays}/{member}/agent"
            parts = turns(tokens) if member % 2 else [one_turn(tokens)]
            cut = stays == 2
            played.append((header(name, parts, reward=float(stays), truncated=cut), parts))
    return played


def one_turn(tokens: list[int]) -> Segment:
    made = segment([2, *tokens], sampled=len(tokens))
    rewards = np.array([0, *(token == STAY for token in tokens)], "<f4")
    return Segment(
        **{name: getattr(made, name) for name in made.__struct_fields__}
        | {"rewards": rewards.tobytes()}
    )


def turns(tokens: list[int]) -> list[Segment]:
    """Return each token in its own segment, after an observation."""
    return [segment([2, token], sampled=1, reward=float(token == STAY)) for token in tokens]


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("bootstraps", [True, False])
def test_tabular_critic_learns_the_values_of_a_markov_chain(lam: float, bootstraps: bool) -> None:
    ppo = PPOConfig(advantage=AdvantageConfig(type="gae", gamma=GAMMA, gae_lambda=lam))
    played = chain()
    if not bootstraps:
        played = [(header(h.trajectory_id, p, reward=h.reward), p) for h, p in played]
    critic = TabularCritic()
    for _ in range(60):
        made = make_train_batch(*batch(played), ppo, rank=0, world_size=1)
        made.fill("prox_logprobs", [row.fields["behav_logprobs"] for row in made.rows])
        made.store_values(critic.forward(made.critic_rows()))
        (minibatch,) = compute_advantages(made, ppo, World())
        critic.train_batch(minibatch.rows)
    start, later = critic.values[2].item(), critic.values[STAY].item()
    if bootstraps:
        assert (start, later) == pytest.approx((VALUE, VALUE), rel=1e-3)
    else:
        assert max(start, later) < 0.9 * VALUE, "a cut taken for an end is worth nothing"
