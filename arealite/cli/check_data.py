"""Checks a model's files and a run's rows with the model's tokenizer, before anything starts and
without torch.

Separate from the other checks because these read files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arealite.api.agent import load_tokenizer
from arealite.api.config import ExperimentConfig
from arealite.api.env import envs
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.base.model_folder import read_json, read_shapes, vocab_size
from arealite.cli.fold import fold
from arealite.system.data.chats import Row, identity_of_rows, make_encoder, read_dataset
from arealite.system.data.tasks import FIRST_ROWS, first_rows

RENAMED = re.compile(r"\.experts\.\d+\.|^language_model\.model\.")
"""Tensors that transformers fuses or renames as it loads them."""
SHOWN = {"math", "code", "tools", "debate", "reasoning_gym"}
"""Environments that show a row's prompt to the agent; others may use it as a name of a task."""
ANSWER = "trainer.ppo.collector.sampling.max_new_tokens (for `eval`: trainer.ppo.eval.sampling)"


def check_tensor_names(path: str) -> None:
    """Check that the trainer keeps the tensor names of the folder, which servers use."""
    shapes = read_shapes(Path(path).expanduser())
    if renamed := next((name for name in shapes if RENAMED.search(name)), None):
        raise UserError(
            f"model.path={path}: the trainer holds '{renamed}' under another name, or fused with "
            "others, and cannot publish it to servers. Use trainer.ppo.publisher.type=shared, or "
            "save the model again with save_pretrained(folder, save_original_format=False)."
        )


def check_prompts(config: ExperimentConfig, tasks: Sequence[Task], contexts: Sequence[int]) -> None:
    """Check that every prompt and its answer fit the shortest context of a server."""
    budget = config.trainer.ppo.collector.sampling.max_new_tokens
    if not contexts:
        return
    context = min(contexts)
    if budget >= context:
        raise UserError(
            f"max_new_tokens {budget} leaves no room for a prompt in the server's context of "
            f"{context} tokens. Lower {ANSWER}."
        )
    if not any(Path(config.model.path).expanduser().glob("tokenizer*")):
        raise UserError(f"model.path={config.model.path} has no tokenizer. Save one beside it.")
    parts = config.trainer.ppo.collector.parts.values()
    if {envs.base_of(part.env.type) for part in parts} <= SHOWN:
        check_tokens(config.model.path, tasks)
    # No tokenizer makes more than a couple of tokens of one byte, and to load one takes seconds.
    long = [task for task in tasks if _text_length(task.prompt) * 2 + 64 > context - budget]
    tokenizer = load_tokenizer(config.model.path) if long else None
    for task in long:
        length = _prompt_tokens(tokenizer, task.prompt)
        if length + budget > context:
            raise UserError(
                f"row {task.task_id}: its prompt has {length} tokens, with max_new_tokens {budget} "
                f"that is over the server's context of {context}. Remove the row, lower {ANSWER} "
                "or raise llm_server.context_length."
            )


def check_tokens(path: str, tasks: Sequence[Task]) -> None:
    """Check that text prompts of the first rows have tokens, all of them in the vocabulary."""
    from tokenizers import Tokenizer

    file = Path(path).expanduser() / "tokenizer.json"
    rows = [task for task in tasks[:FIRST_ROWS] if isinstance(task.prompt, str)]
    size = vocab_size(read_json(path)) or 1 << 62
    if not rows or not file.is_file():
        return
    try:
        encode = Tokenizer.from_file(str(file)).encode_batch
    except Exception as error:  # tokenizers has no narrower class
        raise UserError(f"{file} cannot be read: {error}. Download it again.") from error
    for row, encoding in zip(rows, encode([str(row.prompt) for row in rows]), strict=True):
        if not encoding.ids or max(encoding.ids) >= size:
            found = max(encoding.ids, default="no token")
            raise UserError(
                f"row {row.task_id}: the tokenizer of model.path={path} makes {found} of its "
                f"prompt; the model has {size} tokens. Remove the row, or use another tokenizer."
            )


def _text_length(prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(prompt.encode())
    return sum(len(str(message["content"]).encode()) + 32 for message in prompt)


def _prompt_tokens(tokenizer: Any, prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(tokenizer.encode(prompt))
    return len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"])


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
