"""A teacher that cannot score the policy's tokens is refused before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from arealite.base.errors import UserError
from arealite.ext.distillation.run_checks import check_run
from tests.ext.distillation.teachers import FACTS, run_of
from tests.models import tiny_model


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("policy") / "model")


def test_larger_model_with_the_same_tokens_may_teach(policy: Path, tmp_path: Path) -> None:
    teacher = tiny_model(tmp_path / "teacher", seed=1, hidden_size=128)
    assert list(check_run(run_of(policy, teacher), FACTS)) == []


def test_another_number_of_tokens_is_refused(policy: Path, tmp_path: Path) -> None:
    teacher = tiny_model(tmp_path / "teacher", vocab_size=80)
    with pytest.raises(UserError, match=r"has 80 token ids, but model\.path has 64"):
        check_run(run_of(policy, teacher), FACTS)


def test_other_tokens_are_refused(policy: Path, tmp_path: Path) -> None:
    teacher = tiny_model(tmp_path / "teacher")
    file = teacher / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second, *_ = vocabulary
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"another tokenizer\.json than the policy"):
        check_run(run_of(policy, teacher), FACTS)


def test_teacher_without_a_model_is_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.ppo\.distillation\.teacher="):
        check_run(run_of(policy, tmp_path), FACTS)


def test_another_temperature_is_refused(policy: Path, tmp_path: Path) -> None:
    config = run_of(policy, policy)
    ppo = config.trainer.ppo
    sampling = replace(ppo.collector.sampling, temperature=0.7)
    ppo = replace(ppo, collector=replace(ppo.collector, sampling=sampling))
    config = replace(config, trainer=replace(config.trainer, ppo=ppo))
    with pytest.raises(UserError, match=r"they are sampled at 0\.7"):
        check_run(config, FACTS)


def test_address_of_no_server_is_refused_under_its_own_option(policy: Path) -> None:
    config = run_of(policy, policy, addresses=["127.0.0.1:9"])
    with pytest.raises(UserError, match=r"trainer\.ppo\.distillation\.addresses: 127\.0\.0\.1:9"):
        check_run(config, FACTS)
