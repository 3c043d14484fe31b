"""The offline trainers: sft trains on messages, dpo and reward on pairs of answers.

DPO trains the policy itself, `reward` a model that scores.
"""

from abc import abstractmethod

import numpy as np

from arealite.api.engine import LossFn, Sequence
from arealite.api.experiment_config import ExperimentConfig
from arealite.ext.offline.examples import ASSISTANT, Example
from arealite.ext.offline.offline_trainer import OfflineTrainer, Unit
from arealite.ext.offline.preference import bradley_terry, cross_entropy, make_dpo_loss
from arealite.impl.trainer.base import Engines, make_reference
from arealite.impl.trainer.batch import Minibatch


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


class PairTrainer(OfflineTrainer):
    """Trains on pairs of answers, a preferred and a rejected one."""

    rows_per_example = 2
    stats = ("loss", "accuracy", "margin", "chosen", "rejected")

    @abstractmethod
    def make_row(self, example: Example) -> Sequence:
        """Make the row of an example, without its loss weight."""

    def make_units(self, examples: list[list[Example]]) -> list[Unit]:
        """Make two rows of each pair, of equal weight; skip pairs whose prompt leaves no answer."""
        pairs = [[self.make_row(example) for example in pair] for pair in examples]
        units = [pair for pair in pairs if all(row.loss_mask.any() for row in pair)]
        weight = 1.0 / max(1, len(units))
        for pair in units:
            for row in pair:
                row.fields["loss_weight"] = np.full(len(row.tokens), weight, np.float32)
        return units


class DPOTrainer(PairTrainer):
    """Direct preference optimization; the reference is a second engine, which is frozen."""

    def load_engines(self, config: ExperimentConfig) -> Engines:
        engines = super().load_engines(config)
        dpo = config.trainer.dpo
        if not dpo.reference_free:
            policy = engines["engine"]
            engines["reference"] = make_reference(config, policy, dpo.reference)
        return engines

    def make_loss(self) -> LossFn:
        return make_dpo_loss(self.config.trainer.dpo)

    def make_row(self, example: Example) -> Sequence:
        is_answer_T = example.kinds == ASSISTANT
        is_answer_T[:1] = False  # no token comes before it
        return Sequence(
            tokens=example.tokens,
            loss_mask=is_answer_T,
            temperature=1.0,
        )

    def prepare(self, batch: Minibatch) -> None:
        """Set the field `ref_logprobs` of the rows."""
        if self.components.reference is None:
            return
        outputs = self.components.reference.forward(batch.rows)
        logprobs = outputs.get("logprobs", [])
        for row, logprobs_T in zip(batch.rows, logprobs, strict=True):
            row.fields["ref_logprobs"] = logprobs_T


class RewardTrainer(PairTrainer):
    """A Bradley–Terry reward model: its score of a text is the value after the last token."""

    head = "value"

    def make_loss(self) -> LossFn:
        return bradley_terry

    def make_row(self, example: Example) -> Sequence:
        # The value after token t is read at token t + 1, so append one arbitrary token.
        tokens_T = np.append(example.tokens, example.tokens[-1:])
        num_tokens = len(tokens_T)
        is_last_T = np.arange(num_tokens) == num_tokens - 1
        return Sequence(
            tokens=tokens_T,
            loss_mask=is_last_T,
            temperature=1.0,
        )
