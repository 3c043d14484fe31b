"""Checks that a teacher can score the policy's tokens, before anything is started."""

import json
from collections.abc import Iterable
from pathlib import Path

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import RunFacts
from arealite.base.errors import UserError
from arealite.base.model_folder import read_json, read_model, vocab_size
from arealite.ext.distillation.teacher_trial import options_of, teacher_trials
from arealite.ext.external.external_servers import examine

SECTION = "trainer.ppo.distillation"


def check_run(config: ExperimentConfig, facts: RunFacts) -> Iterable[tuple[str, str]]:
    """Refuse a teacher of another vocabulary, and sampling that it cannot score. Hook `check`.

    Raises:
        UserError: The teacher, its servers or the temperature do not fit.
    """
    options = options_of(config.trainer.ppo)
    if config.trainer.is_offline or not options.is_on:
        return []
    temperature = config.trainer.ppo.collector.sampling.temperature
    if temperature != 1:
        raise UserError(
            f"a teacher scores tokens at temperature 1, and they are sampled at {temperature:g}. "
            "Use trainer.ppo.collector.sampling.temperature=1."
        )
    if options.top_k and config.trainer.ppo.collector.sampling.top_logprobs:
        raise UserError(
            f"{SECTION}.top_k={options.top_k} trains with the teacher's most probable tokens, and "
            "trainer.ppo.collector.sampling.top_logprobs with the sampler's. Set one of them to 0."
        )
    for trial in teacher_trials(config).values():
        check_vocabulary(config.model.path, trial.model.path)
        try:
            examine(trial, read_json(trial.model.path))
        except UserError as error:
            problem = str(error).replace("llm_server.addresses", f"{SECTION}.addresses")
            raise UserError(problem) from error
    return []


def check_vocabulary(policy: str, teacher: str) -> None:
    """Check that two model folders have the same tokens.

    Raises:
        UserError: They do not, or the teacher's folder is no model.
    """
    model, _ = read_model(teacher, f"{SECTION}.teacher")
    teacher_size = vocab_size(model)
    policy_size = vocab_size(read_json(policy))
    difference = ""
    if teacher_size != policy_size:
        difference = f"{teacher_size} tokens, and the policy has {policy_size}"
    elif tokens_of(teacher) != tokens_of(policy):
        difference = "another tokenizer.json than the policy"
    if difference:
        raise UserError(
            f"{SECTION}.teacher={teacher} has {difference}. "
            "Use a teacher with the policy's vocabulary; its scores belong to token ids."
        )


def tokens_of(folder: str) -> object:
    """Return the tokens of a folder's tokenizer.json with their ids; None without that file."""
    file = Path(folder).expanduser() / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = json.loads(file.read_text())
    return tokenizer["model"]["vocab"], tokenizer.get("added_tokens")
