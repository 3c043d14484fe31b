"""Invalid combinations of options are a one-line error with the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.trainer import PPOConfig
from arealite.base.config_tree import check_constraints
from arealite.base.errors import UserError
from arealite.cli.configs import load


def configured(folder: Path, options: str) -> PPOConfig:
    file = folder / "empty.yaml"
    file.write_text("")
    words = [f"trainer.ppo.{word}" for word in options.split()]
    return load(ExperimentConfig, file, words).trainer.ppo


ONE = "collector.group_size=1 batch_size=4"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("loss.eps_low=-0.1", "must be a number of at least 0."),
        ("loss.dual_clip=1.0", "must be a number above 1, or null"),
        (
            "loss.dual_clip=3 loss.objective=cispo",
            "dual_clip requires objective=ppo, not objective=cispo",
        ),
        ("loss.sapo_tau=0", "must be a number above 0"),
        ("loss.objective=reinforce loss.decoupled=false", "trainer.ppo.loss.decoupled=true"),
        ("loss.objective=reinforce loss.ratio=sequence", "Use token"),
        ("loss.behav_weight_cap=0", "must be a number above 0, or null"),
        ("loss.behav_weight=mask loss.behav_weight_cap=1", "behav_weight_cap=5.0"),
        ("loss.behav_weight=mask loss.behav_weight_cap=null", "behav_weight_cap=5.0"),
        ("loss.behav_weight=mask loss.decoupled=false", "require the decoupled loss"),
        ("loss.behav_weight_level=sequence loss.decoupled=false", "require the decoupled loss"),
        ("loss.m2_threshold=0", "above 0, or null"),
        ("loss.centering=true", "trainer.ppo.collector.sampling.top_logprobs=20"),
        ("collector.sampling.top_p=0.9", "sampling.top_logprobs=20 and a top_k of at most 20"),
        ("collector.sampling.min_p=0.1", "sampling.top_logprobs=20 and a top_k of at most 20"),
        ("collector.sampling.min_new_tokens=4", "sampling.top_logprobs=20 and a top_k"),
        (
            "collector.sampling.top_k=64 collector.sampling.top_logprobs=63",
            "top_logprobs=63 never records all tokens",
        ),
        (
            "collector.sampling.top_k=1000 collector.sampling.top_logprobs=256",
            "top_logprobs=20 and a top_k of at most 20",
        ),
        ("loss.objective=dppo_tv", "trainer.ppo.loss.decoupled=false"),
        (
            "loss.objective=dppo_kl loss.decoupled=false loss.ratio=sequence",
            "trainer.ppo.loss.ratio=token",
        ),
        ("loss.objective=dppo_kl loss.decoupled=false loss.dual_clip=3", "dual_clip requires"),
        ("loss.entropy_coef=nan", "must be a number."),
        ("kl.coef=-1", "at least 0"),
        ("kl.coef=0.1", "Use trainer.ppo.kl.reference=initial"),
        ("kl.coef=0.1 kl.reference=initial kl.estimator=k1", "Use k2 or k3"),
        ("reward.scale=0", "Use another number"),
        ("reward.clip=0", "must be a number above 0, or null"),
        ("reward.bias=inf", "must be a number."),
        ("reward.overlong_buffer=300 collector.sampling.max_new_tokens=256", "at most"),
        ("reward.overlong_buffer=-1", "at least 0"),
        ("reward.overlong_penalty=0", "must be a number above 0"),
        (ONE, "Use at least 2, or trainer.ppo.advantage.type=reinforce or gae"),
        (f"{ONE} advantage.type=gae filter_zero_variance=true", "filter_zero_variance=false"),
        ("advantage.eps=-1", "at least 0"),
        ("advantage.type=gae advantage.gamma=1.1", "above 0 and at most 1"),
        ("advantage.gae_lambda=2", "of at least 0 and at most 1"),
        ("advantage.gamma=0.9", "Use trainer.ppo.advantage.gamma=1, or type=reinforce or gae"),
        ("critic.path=x", "Use trainer.ppo.advantage.type=gae"),
        ("critic.lr=0", "must be a number above 0"),
        ("critic.value_clip=0", "must be a number above 0, or null"),
    ],
)
def test_invalid_combination_of_options_is_a_one_line_error(
    tmp_path: Path, options: str, says: str
) -> None:
    with pytest.raises(UserError) as refused:
        check_constraints(configured(tmp_path, options), "trainer.ppo.")
    text = str(refused.value)
    assert text.startswith("trainer.ppo.") and says in text and "\n" not in text


@pytest.mark.parametrize(
    "options",
    [
        "",
        f"{ONE} advantage.type=gae",
        f"{ONE} advantage.type=reinforce advantage.normalize=true",
        "advantage.normalize=true advantage.type=rloo",
        "advantage.type=gae advantage.gamma=0.99 critic.path=x critic.value_clip=null",
        "loss.objective=cispo loss.eps_low=1.0",
        "kl.coef=0.1 kl.reference=initial kl.estimator=k1 kl.place=reward",
        "loss.decoupled=false loss.dual_clip=3 loss.m2_threshold=0.04",
        "loss.objective=dppo_kl loss.decoupled=false loss.eps_low=0.05 loss.eps_high=0.05",
        "loss.centering=true collector.sampling.top_logprobs=1 loss.behav_weight=mask",
        "collector.sampling.top_k=64 collector.sampling.top_logprobs=64",
        "collector.sampling.top_p=0.9 collector.sampling.top_logprobs=1",
        "collector.sampling.top_p=0.9 collector.sampling.top_k=9 collector.sampling.top_logprobs=8",
        "collector.sampling.min_new_tokens=4 collector.sampling.top_logprobs=1",
        "reward.scale=-1 reward.clip=1 reward.bias=0.5 reward.overlong_buffer=256",
    ],
)
def test_valid_combination_of_options_is_accepted(tmp_path: Path, options: str) -> None:
    check_constraints(configured(tmp_path, options), "trainer.ppo.")
