"""Supervised fine-tuning: cross entropy, with a weight for each token by its author."""

import numpy as np

from arealite.algo.preference import cross_entropy
from arealite.api.engine import LossFn, Sequence
from arealite.impl.trainer.offline import OfflineTrainer, Unit
from arealite.system.data.chats import ASSISTANT, Example


class SFTTrainer(OfflineTrainer):
    """Trains on tokens of assistants, of environments, or of both."""

    stats = ("loss", "answer", "next_state", "entropy")

    def make_loss(self) -> LossFn:
        return cross_entropy

    def make_units(self, examples: list[list[Example]]) -> list[Unit]:
        """Make a row of each example.

        Tokens are weighted by kind. The weights of a batch sum to 1, so its loss is a weighted mean
        over tokens.
        """
        sft, units = self.config.trainer.sft, list[Unit]()
        weight_of = np.array([0.0, sft.assistant_weight, sft.next_state_weight])
        weights = [weight_of[example.kinds] for (example,) in examples]
        for weight_T in weights:
            weight_T[:1] = 0.0  # no token comes before it
        total = sum(float(weight_T.sum()) for weight_T in weights)
        for (example,), weight_T in zip(examples, weights, strict=True):
            fields = {
                "loss_weight": (weight_T / (total or 1.0)).astype(np.float32),
                "is_answer": (example.kinds == ASSISTANT).astype(np.float32),
            }
            if (mask_T := weight_T > 0.0).any():
                units.append([Sequence(example.tokens, mask_T, 1.0, fields)])
        return units
