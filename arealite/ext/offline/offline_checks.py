"""The checks of the offline trainers, which `api/offline.py` describes; no module imports torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from arealite.api.engine_config import Head
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.offline import CheckedRows
from arealite.base import model_folder
from arealite.base.config_tree import check_constraints
from arealite.ext.offline.chat_rows import chat_form
from arealite.ext.offline.rows import check_examples, read_dataset


@dataclass(frozen=True, kw_only=True)
class OfflineChecks:
    """The checks of sft, dpo or reward."""

    head: Head = "lm"

    def check_options(self, config: ExperimentConfig) -> None:
        """Check the constraints of sft."""
        check_constraints(config.trainer.sft, "trainer.sft.")

    def check_rows(self, config: ExperimentConfig, model: dict[str, Any]) -> CheckedRows:
        """Check the vocabulary of a reference model, and all rows."""
        reference = config.trainer.dpo.reference
        model_folder.check_vocabulary(reference, model, key="trainer.dpo.reference")
        return check_examples(config, model)

    def describe_rows(self, config: ExperimentConfig) -> Iterator[tuple[str, str]]:
        """Yield (heading, text) about the rows: their numbers, and the form of the first."""
        train, held_out = read_dataset(config)
        _, first_row = train[0]
        form = chat_form(first_row)
        yield "data", f"{len(train)} rows to train, {len(held_out)} held out; {form}"


LANGUAGE_MODEL = OfflineChecks()
REWARD_MODEL = OfflineChecks(head="value")
