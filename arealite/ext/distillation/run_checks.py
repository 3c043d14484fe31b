"""Checks that a teacher can score the policy's tokens, before anything is started."""

from collections.abc import Iterable

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import RunFacts
from arealite.base.errors import UserError
from arealite.base.model_folder import check_vocabulary, read_json
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
    sampling = config.trainer.ppo.collector.sampling
    temperature = sampling.temperature
    if temperature != 1:
        raise UserError(
            f"a teacher scores tokens at temperature 1, and they are sampled at {temperature:g}. "
            "Use trainer.ppo.collector.sampling.temperature=1."
        )
    if options.top_k_of == "policy":
        if sampling.top_logprobs != options.top_k or sampling.num_truncated:
            raise UserError(
                f"{SECTION}.top_k_of=policy compares the {options.top_k} tokens that the sampler "
                f"records. Set trainer.ppo.collector.sampling.top_logprobs={options.top_k}, "
                "and leave out its top_p, top_k, min_p and min_new_tokens."
            )
    elif options.top_k and sampling.top_logprobs:
        raise UserError(
            f"{SECTION}.top_k={options.top_k} trains with the teacher's most probable tokens, and "
            "trainer.ppo.collector.sampling.top_logprobs with the sampler's. "
            f"Set one of them to 0, or {SECTION}.top_k_of=policy."
        )
    for source, trial in teacher_trials(config).items():
        key = f"{SECTION}.teachers.{source}" if source else f"{SECTION}.teacher"
        check_tokens(config.model.path, trial.model.path, key)
        try:
            examine(trial, read_json(trial.model.path))
        except UserError as error:
            problem = str(error).replace("llm_server.addresses", f"{SECTION}.addresses")
            raise UserError(problem) from error
    return []


def check_tokens(policy: str, teacher: str, key: str) -> None:
    """Check that two model folders have the same tokens; `key` is the teacher's option.

    Raises:
        UserError: They do not, or the teacher's folder is no model.
    """
    check_vocabulary(teacher, read_json(policy), key=key)
    if tokens_of(teacher) != tokens_of(policy):
        raise UserError(
            f"{key}={teacher} has another tokenizer.json than the policy. "
            "Use a teacher with the policy's vocabulary; its scores belong to token ids."
        )


def tokens_of(folder: str) -> object:
    """Return the tokens of a folder's tokenizer.json with their ids; None without that file."""
    tokenizer = read_json(folder, "tokenizer.json")
    return tokenizer and (tokenizer["model"]["vocab"], tokenizer.get("added_tokens"))
