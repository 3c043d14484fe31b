"""The offline trainers: sft trains on messages, dpo and reward on pairs of answers.

DPO trains the policy itself, `reward` a model that scores.
"""

import numpy as np

from arealite.algo.preference import bradley_terry, cross_entropy, make_dpo_loss
from arealite.api.config import ExperimentConfig
from arealite.api.engine import LossFn, Sequence
from arealite.impl.trainer.batch import Minibatch
from arealite.impl.trainer.components import Engines, make_reference
from arealite.impl.trainer.offline import OfflineTrainer, Unit
from arealite.system.data.examples import ASSISTANT, Example

PAIR_STATS = ("loss", "accuracy", "margin", "chosen", "rejected")


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
        sft = self.config.trainer.sft
        units = list[Unit]()
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


class DPOTrainer(OfflineTrainer):
    """Direct preference optimization; the reference is a second engine, which is frozen."""

    rows_per_example = 2
    stats = PAIR_STATS

    def load_engines(self, config: ExperimentConfig) -> Engines:
        made = super().load_engines(config)
        dpo = config.trainer.dpo
        if not dpo.reference_free:
            made["reference"] = make_reference(config, made["engine"], dpo.reference)
        return made

    def make_loss(self) -> LossFn:
        return make_dpo_loss(self.config.trainer.dpo)

    def make_units(self, examples: list[list[Example]]) -> list[Unit]:
        """Make two rows of each pair, of equal weight; skip pairs whose prompt leaves no answer."""
        whole = [pair for pair in examples if all(is_learned(each).any() for each in pair)]
        return [[self._row(each, 1.0 / len(whole)) for each in pair] for pair in whole]

    def prepare(self, batch: Minibatch) -> None:
        """Set the field `ref_logprobs` of the rows."""
        if self.components.reference is None:
            return
        outputs = self.components.reference.forward(batch.rows)
        for row, logprobs_T in zip(batch.rows, outputs.get("logprobs", []), strict=True):
            row.fields["ref_logprobs"] = logprobs_T

    @staticmethod
    def _row(example: Example, weight: float) -> Sequence:
        fields = {"loss_weight": np.full(len(example.tokens), weight, np.float32)}
        return Sequence(example.tokens, is_learned(example), 1.0, fields)


class RewardTrainer(OfflineTrainer):
    """A Bradley–Terry reward model: its score of a text is the value after the last token."""

    rows_per_example = 2
    head = "value"
    stats = PAIR_STATS

    def make_loss(self) -> LossFn:
        return bradley_terry

    def make_units(self, examples: list[list[Example]]) -> list[Unit]:
        """Make two rows of each pair, of equal weight."""
        return [[self._row(each, 1.0 / len(examples)) for each in pair] for pair in examples]

    @staticmethod
    def _row(example: Example, weight: float) -> Sequence:
        # The value after token t is read at token t + 1, so append one arbitrary token.
        tokens_T = np.append(example.tokens, example.tokens[-1:])
        mask_T = np.arange(len(tokens_T)) == len(tokens_T) - 1
        fields = {"loss_weight": np.full(len(tokens_T), weight, np.float32)}
        return Sequence(tokens_T, mask_T, 1.0, fields)


def is_learned(example: Example) -> np.ndarray:
    """Return which tokens are of an answer, bool [T]; never the first token."""
    mask_T = example.kinds == ASSISTANT
    mask_T[:1] = False
    return mask_T
