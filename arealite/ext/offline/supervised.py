"""The offline trainers: sft trains on messages, dpo and reward on pairs of answers.

DPO trains the policy itself, `reward` a model that scores.
"""

import numpy as np

from arealite.api.engine import LossFn, Sequence
from arealite.api.experiment_config import ExperimentConfig
from arealite.ext.offline.examples import ASSISTANT, Example
from arealite.ext.offline.offline_trainer import OfflineTrainer, Unit
from arealite.ext.offline.preference import bradley_terry, cross_entropy, make_dpo_loss
from arealite.impl.trainer.base import Engines, make_reference
from arealite.impl.trainer.batch import Minibatch

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
        weight_by_kind = np.array([0.0, sft.assistant_weight, sft.next_state_weight])
        weights = [weight_by_kind[example.kinds] for (example,) in examples]
        for weight_T in weights:
            weight_T[:1] = 0.0  # no token comes before it
        row_sums = [float(weight_T.sum()) for weight_T in weights]
        sum_of_weights = sum(row_sums) or 1.0
        units = list[Unit]()
        for (example,), weight_T in zip(examples, weights, strict=True):
            mask_T = weight_T > 0.0
            if not mask_T.any():
                continue
            normalized_T = weight_T / sum_of_weights
            is_answer_T = example.kinds == ASSISTANT
            row = Sequence(
                tokens=example.tokens,
                loss_mask=mask_T,
                temperature=1.0,
                fields={
                    "loss_weight": normalized_T.astype(np.float32),
                    "is_answer": is_answer_T.astype(np.float32),
                },
            )
            units.append([row])
        return units


class DPOTrainer(OfflineTrainer):
    """Direct preference optimization; the reference is a second engine, which is frozen."""

    rows_per_example = 2
    stats = PAIR_STATS

    def load_engines(self, config: ExperimentConfig) -> Engines:
        engines = super().load_engines(config)
        dpo = config.trainer.dpo
        if not dpo.reference_free:
            policy = engines["engine"]
            engines["reference"] = make_reference(config, policy, dpo.reference)
        return engines

    def make_loss(self) -> LossFn:
        return make_dpo_loss(self.config.trainer.dpo)

    def make_units(self, examples: list[list[Example]]) -> list[Unit]:
        """Make two rows of each pair, of equal weight; skip pairs whose prompt leaves no answer."""
        pairs = [pair for pair in examples if has_answers(pair)]
        weight = 1.0 / max(1, len(pairs))
        return [[self._row(example, weight) for example in pair] for pair in pairs]

    def prepare(self, batch: Minibatch) -> None:
        """Set the field `ref_logprobs` of the rows."""
        if self.components.reference is None:
            return
        outputs = self.components.reference.forward(batch.rows)
        logprobs = outputs.get("logprobs", [])
        for row, logprobs_T in zip(batch.rows, logprobs, strict=True):
            row.fields["ref_logprobs"] = logprobs_T

    @staticmethod
    def _row(example: Example, weight: float) -> Sequence:
        weight_T = np.full(len(example.tokens), weight, np.float32)
        return Sequence(
            tokens=example.tokens,
            loss_mask=is_learned(example),
            temperature=1.0,
            fields={"loss_weight": weight_T},
        )


class RewardTrainer(OfflineTrainer):
    """A Bradley–Terry reward model: its score of a text is the value after the last token."""

    rows_per_example = 2
    head = "value"
    stats = PAIR_STATS

    def make_loss(self) -> LossFn:
        return bradley_terry

    def make_units(self, examples: list[list[Example]]) -> list[Unit]:
        """Make two rows of each pair, of equal weight."""
        weight = 1.0 / max(1, len(examples))
        return [[self._row(example, weight) for example in pair] for pair in examples]

    @staticmethod
    def _row(example: Example, weight: float) -> Sequence:
        # The value after token t is read at token t + 1, so append one arbitrary token.
        tokens_T = np.append(example.tokens, example.tokens[-1:])
        num_tokens = len(tokens_T)
        return Sequence(
            tokens=tokens_T,
            loss_mask=np.arange(num_tokens) == num_tokens - 1,
            temperature=1.0,
            fields={"loss_weight": np.full(num_tokens, weight, np.float32)},
        )


def has_answers(pair: list[Example]) -> bool:
    """Return whether each example of a pair has a token of an answer."""
    return all(is_learned(example).any() for example in pair)


def is_learned(example: Example) -> np.ndarray:
    """Return which tokens are of an answer, bool [T]; never the first token."""
    mask_T = example.kinds == ASSISTANT
    mask_T[:1] = False
    return mask_T
