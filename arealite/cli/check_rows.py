"""What can be found wrong with an offline run's rows, found before it starts: each is encoded once.

Apart from the other checks, because rows need the tokenizer and no server.
"""

from __future__ import annotations

from typing import Any

from arealite.api.agent import load_tokenizer
from arealite.api.config import ExperimentConfig
from arealite.api.env import envs
from arealite.base.errors import UserError
from arealite.base.model_folder import vocab_size
from arealite.cli.fold import fold
from arealite.system.data.chats import Row, identity_of_rows, make_encoder, read_dataset
from arealite.system.data.tasks import first_rows


def check_rows(config: ExperimentConfig, model: dict[str, Any]) -> dict[str, str]:
    """Check that every row can be used, and return what must not change within the trial.

    A row whose context leaves no room for its answer within `max_tokens` is only counted.
    """
    train, held_out = read_dataset(config)
    encode = make_encoder(config, load_tokenizer(config.model.path))
    vocabulary = vocab_size(model)

    def is_learned(row: Row) -> bool:
        examples = encode(row)
        for example in examples:
            top, bottom = int(example.tokens.max(initial=0)), int(example.tokens.min(initial=0))
            if bottom < 0 or (vocabulary and top >= vocabulary):
                raise UserError(
                    f"{row[0]}: token {top if bottom >= 0 else bottom} is not among the model's "
                    f"{vocabulary}. Were the rows made with another model's tokenizer?"
                )
        return all(example.kinds[1:].any() for example in examples)

    empty = [row[0] for row in (*train, *held_out) if not is_learned(row)]
    if len(empty) == len(train) + len(held_out):
        limit = config.trainer.offline.max_tokens
        raise UserError(
            f"no row has a token to learn within trainer.offline.max_tokens={limit}. Raise it."
        )
    if empty:
        about = f"{len(empty)} rows have nothing to learn and are left out; the first: {empty[0]}"
        print(fold(about))
    return identity_of_rows(config, train)


def check_first_rows(config: ExperimentConfig) -> None:
    """Check that each environment can read the first rows of its files."""
    for where, part, task in first_rows(config):
        try:
            envs.get(part.env.type).check_row(task)
        except Exception as error:  # an environment may raise anything
            why = f"environment {part.env.type} cannot read it: {type(error).__name__}: {error}"
            raise UserError(f"{where}: {why}. Correct or remove the row.") from error
