"""Configs are typed, merged in order, checked with one-line errors, and extended by plugins."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import yaml

from arealite.api.experiment_config import ExperimentConfig, ModelConfig, ServerConfig
from arealite.api.fields import opt
from arealite.api.trainer import TrainerConfig
from arealite.base import config as base_config
from arealite.base import config_tree
from arealite.base.errors import UserError
from arealite.ext.evaluation.config import CollectConfig
from arealite.ext.hosting.server_config import EnvServerConfig


@dataclass(frozen=True, kw_only=True)
class MyAgentConfig:
    my_param: str = "x"
    count: int = 3
    share: float | None = opt(0.5, "of all", above=0, below=1)
    tries: int = opt(1, "times", at_least=1)
    tags: list[str] | None = None


COLLECTOR = "trainer.ppo.collector"
PARTS = {"agent": {"my_agent": MyAgentConfig}}


def load(*overrides: str, files: tuple[Path, ...] = ()) -> ExperimentConfig:
    return base_config.load(ExperimentConfig, base_config.read_layers(files, overrides), PARTS)


def test_overrides_win_over_files_and_files_over_defaults(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("trainer: {ppo: {lr: 0.5, total_steps: 7}}")
    config = load("trainer.ppo.lr=1e-5", files=(file,))
    assert config.trainer.ppo.lr == 1e-5
    assert config.trainer.ppo.total_steps == 7
    assert config.trainer.ppo.updates == 1


def test_loads_share_no_state():
    plain = base_config.load(ExperimentConfig, base_config.read_layers((), []), {})
    lists = ["imports=[a]", "logger.types=[]", "trainer.ppo.collector.envs.x.weight=2"]
    assert base_config.load(ExperimentConfig, base_config.read_layers((), lists), {}) != plain
    plain.imports.append("b")
    again = base_config.load(ExperimentConfig, base_config.read_layers((), []), {})
    assert (again.imports, again.trainer.ppo.collector.envs) == ([], {})
    assert again.logger == plain.logger


def test_every_choice_can_be_written_on_the_command_line():
    kinds = [kind for _, _, kind in config_tree.leaves(ExperimentConfig)]
    choices = {each for kind in kinds if get_origin(kind) is Literal for each in get_args(kind)}
    assert "replay" in choices
    assert [each for each in choices if yaml.safe_load(each) != each] == []  # a bare `off` is false


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().seed = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.ppo.lrr=1", "Did you mean 'trainer.ppo.lr'?"),
        ("lr=1", "Did you mean 'trainer.ppo.lr'?"),
        ("launcher.slurm.server=[x]", "Did you mean 'launcher.slurm.servers'?"),
        ("trainer.ppo.lr=fast", "trainer.ppo.lr: Value 'fast'"),
        ("trainer.ppo.total_steps=1.5", "could not be converted to Integer"),
        ("trainer.ppo.loss.eps_low=null", "trainer.ppo.loss.eps_low has no value. Write"),
        ("trainer.ppo=[3]", "keys with values: trainer.ppo.KEY=VALUE."),
        ("dataset.columns={prompt: [a]}", "dataset.columns[...]: Expected `str`, got `array`."),
        ("lr", "Write key=value"),
        ("--lr=1", "Write key=value"),
        ("a=[1", "cannot be parsed"),
        ("trainer.ppo.collector.agent.my_agent.my_parm=1", "my_agent.my_param"),
        ("trainer.ppo.collector.agent.my_agent.count=x", "could not be converted to Integer"),
    ],
)
def test_invalid_override_is_a_one_line_error_with_the_fix(override: str, says: str):
    with pytest.raises(UserError) as error:
        load(override)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed=[1, 2]", "one value: seed=VALUE."),
        ("trainer.ppo.lr=[0.5]", "one value: trainer.ppo.lr=VALUE."),
        ("trainer.ppo.loss.dual_clip=[3.0]", "one value: trainer.ppo.loss.dual_clip=VALUE."),
        ("trainer.ppo.lr={'a': 1}", "one value: trainer.ppo.lr=VALUE."),
        ("resume=['must']", "one value: resume=VALUE."),
        ("dataset.shuffle=[True]", "one value: dataset.shuffle=VALUE."),
        ("trainer.ppo.staleness_policy=['mask']", "one value: trainer.ppo.staleness_policy=VALUE."),
        ("logger.types=wandb", "a list: logger.types=[VALUE]."),
        ("logger.types={'a': 1}", "a list: logger.types=[VALUE]."),
        ("dataset.columns=['a']", "keys with values: dataset.columns.KEY=VALUE."),
        ("trainer.ppo=3", "keys with values: trainer.ppo.KEY=VALUE."),
        (f"{COLLECTOR}.envs.x=['a']", f"keys with values: {COLLECTOR}.envs.x.KEY=VALUE."),
        (f"{COLLECTOR}.envs.x.weight=[1]", f"one value: {COLLECTOR}.envs.x.weight=VALUE."),
        (f"{COLLECTOR}.agent.my_agent.count=[1]", f"{COLLECTOR}.agent.my_agent.count=VALUE."),
        (f"{COLLECTOR}.agent.my_agent.tags=1", f"a list: {COLLECTOR}.agent.my_agent.tags=[VALUE]."),
    ],
)
def test_list_or_keys_in_the_place_of_one_value_name_the_option_and_the_fix(
    override: str, says: str
):
    with pytest.raises(UserError) as error:
        load(override)
    text = str(error.value)
    assert text.startswith(f"command line: {override} has the wrong form. The option takes ")
    assert text.endswith(says)
    assert "Config" not in text and "\n" not in text


def test_list_of_a_file_names_the_file(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("trainer: {ppo: {total_steps: [5]}}")
    with pytest.raises(UserError, match=rf"^{file}: trainer\.ppo\.total_steps=\[5\] has the wrong"):
        load(files=(file,))


def test_optional_list_takes_a_list_and_null():
    key = f"{COLLECTOR}.agent.my_agent.tags"
    for value, tags in (("[a]", ["a"]), ("null", None)):
        config = load(f"{key}={value}")
        assert config.trainer.ppo.collector.agent.my_agent.tags == tags  # type: ignore[attr-defined]


def test_interpolation_may_stand_for_a_section_or_a_list(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("imports: [a]\nlauncher: {server_args: '${imports}'}\ntrial_name: ${seed}")
    config = load(files=(file,))
    assert (config.launcher.server_args, config.trial_name) == (["a"], "1")


@pytest.mark.parametrize("value", ["#1", "a #1", "[a] # b", " #"])
def test_comment_in_an_override_is_refused(value: str):
    with pytest.raises(UserError) as error:
        load(f"trial_name={value}")
    fix = f"As a text in a shell: trial_name='\"{value}\"'"
    assert str(error.value) == f"trial_name={value}: a comment begins at #. {fix}"


@pytest.mark.parametrize(("value", "text"), [("'#1'", "#1"), ('"a #1"', "a #1"), ("a#1", "a#1")])
def test_number_sign_in_a_text_is_kept(value: str, text: str):
    assert load(f"trial_name={value}").trial_name == text


OWN = "trainer.ppo.collector.agent.my_agent"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.ppo.batch_size=0", "at least 1"),
        ("trainer.ppo.max_staleness=-1", "at least 0"),
        ("trainer.ppo.lr=nan", "a number above 0"),
        ("datapipe.lease_ttl_s=inf", "a number above 0"),
        ("trainer.ppo.kl.coef=-1.0", "a number of at least 0"),
        ("trainer.ppo.reward.bias=inf", "a number"),
        ("trainer.ppo.loss.dual_clip=1.0", "a number above 1, or null"),
        ("trainer.ppo.eval.sampling.top_p=1.5", "a number above 0 and at most 1"),
        ("trainer.dpo.label_smoothing=0.5", "a number of at least 0 and below 0.5"),
        (f"{OWN}.share=1.0", "a number above 0 and below 1, or null"),
        (f"{OWN}.tries=0", "at least 1"),
    ],
)
def test_number_out_of_range_is_a_one_line_error_with_key_value_and_range(override: str, says: str):
    with pytest.raises(UserError) as error:
        load(override)
    assert str(error.value) == f"{override} must be {says}."


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("llm_server.sglang.num_servers=0", "at least 1"),
        ("llm_server.sglang.dp=-1", "at least 1"),
        ("llm_server.context_length=0", "at least 1, or null"),
        ("llm_server.sglang.mem_fraction=1.0", "a number above 0 and below 1, or null"),
        ("cluster.ttl_s=0.0", "a number above 0"),
    ],
)
def test_server_number_out_of_range_is_refused(override: str, says: str):
    with pytest.raises(UserError) as error:
        base_config.load(ServerConfig, base_config.read_layers([], [override]), {})
    assert str(error.value) == f"{override} must be {says}."


def test_numbers_at_their_bounds_and_null_are_accepted():
    load("trainer.ppo.kl.coef=0", "trainer.ppo.advantage.gamma=1", f"{OWN}.share=null")
    load("trainer.ppo.reward.bias=-1e9", f"trainer.ppo.total_steps={10**9}", f"seed={2**63 - 1}")


@pytest.mark.parametrize("root", [ExperimentConfig, ServerConfig, EnvServerConfig, CollectConfig])
def test_infinite_nan_and_huge_numbers_are_refused_for_every_option(root: type):
    for key, item, held in config_tree.leaves(root):
        kinds = {held, *get_args(held)} & {int, float, list[int], list[float]}
        for value in (math.inf, -math.inf, math.nan, 1e308, 2**63) if kinds else ():
            wrong = [value] if kinds & {list[int], list[float]} else value
            same = dataclasses.field(default=None, metadata=item.metadata)
            part = dataclasses.make_dataclass("Part", [(item.name, held, same)], frozen=True)
            with pytest.raises(UserError, match=item.name):
                config_tree.check_ranges(part(**{item.name: wrong}))
                pytest.fail(f"{key}={value} is accepted")


def test_number_of_a_file_is_checked(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("launcher: {rollout_workers: 0}")
    with pytest.raises(UserError, match=r"launcher\.rollout_workers=0 must be at least 1\."):
        load(files=(file,))


def test_defaults_are_within_their_ranges_and_help_shows_ranges():
    config_tree.check_ranges(ExperimentConfig())
    config_tree.check_ranges(ServerConfig())
    told = {key: text for key, _, text in config_tree.keys(ExperimentConfig)}
    assert told["trainer.ppo.eval.sampling.top_p"].endswith("; above 0 and at most 1")
    assert told["trainer.ppo.loss.entropy_coef"] == "coefficient of the entropy bonus"


def test_plugin_options_are_typed_fields_of_the_experiment_config():
    config = load("trainer.ppo.collector.agent.my_agent.my_param='hello'")
    assert isinstance(config, ExperimentConfig)
    own = config.trainer.ppo.collector.agent.my_agent  # type: ignore[attr-defined]
    assert own == MyAgentConfig(my_param="hello", count=3)


def test_extend_keeps_classes_without_plugin_options():
    assert config_tree.extend(ExperimentConfig, {}) is ExperimentConfig
    grown = config_tree.extend(ExperimentConfig, PARTS)
    kept = {field.name: field.type for field in dataclasses.fields(grown)}
    assert kept["model"] is ModelConfig and kept["trainer"] is not TrainerConfig


def test_save_then_load_gives_the_same_tree(tmp_path: Path):
    file = tmp_path / "config.yaml"
    overrides = ["seed=5", "trainer.ppo.loss.behav_weight_cap=null", "imports=[a,b]"]
    config = base_config.load(ExperimentConfig, base_config.read_layers([], overrides), {})
    base_config.save(config, file)
    assert base_config.load(ExperimentConfig, base_config.read_layers([file], []), {}) == config


def test_former_value_is_read_in_a_saved_config_only(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text("trainer: {ppo: {staleness_policy: pace}}")
    config = base_config.load(
        ExperimentConfig, base_config.read_layers([file], []), PARTS, is_saved=True
    )
    assert config.trainer.ppo.staleness_policy == "wait"
    key = "trainer.ppo.staleness_policy"
    with pytest.raises(UserError, match=rf"{key}=pace is called wait now. Write {key}=wait\.$"):
        base_config.load(ExperimentConfig, base_config.read_layers([file], []), PARTS)


def test_unknown_keys_are_left_out_of_a_saved_config_only(tmp_path: Path):
    file = tmp_path / "config.yaml"
    seats = "seats: {a: {type: my_agent, gone: 1, my_agent: {count: 4, gone: 1}}}"
    kwargs = "env: {gymnasium: {kwargs: {any: {name: 1}}}}"
    file.write_text(
        "gone: 1\ncluster: {name_store: etcd, user: u}\nmodel: {path: m, gone: {a: 1}}\n"
        f"trainer: {{ppo: {{collector: {{{seats}, {kwargs}}}}}}}\n"
    )
    config = base_config.load(
        ExperimentConfig, base_config.read_layers([file], ["seed=5"]), PARTS, is_saved=True
    )
    assert (config.seed, config.model.path, config.cluster.user) == (5, "m", "u")
    collector = config.trainer.ppo.collector
    assert collector.seats["a"].my_agent.count == 4  # type: ignore[attr-defined]
    assert collector.env.gymnasium.kwargs == {"any": {"name": 1}}
    with pytest.raises(UserError, match="unknown key 'gone'"):
        load(files=(file,))
    with pytest.raises(UserError, match="unknown key 'gone'"):
        base_config.load(
            ExperimentConfig, base_config.read_layers([file], ["gone=1"]), PARTS, is_saved=True
        )
    file.write_text("cluster: null\ntrainer: {ppo: {collector: {seats: {a: null}}}}\n")
    with pytest.raises(UserError):
        base_config.load(
            ExperimentConfig, base_config.read_layers([file], []), PARTS, is_saved=True
        )


def test_unreadable_config_files_are_refused(tmp_path: Path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1")
    flat = tmp_path / "flat.yaml"
    flat.write_text("[1, 2]")
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    for file, says in [
        (tmp_path / "none.yaml", "does not exist"),
        (broken, "not readable YAML"),
        (flat, "`key: value`"),
    ]:
        with pytest.raises(UserError, match=says):
            load(files=(file,))
    assert (
        base_config.load(ExperimentConfig, base_config.read_layers([empty], []), {})
        == ExperimentConfig()
    )


def test_every_key_of_both_roots_is_documented():
    keys = list(config_tree.keys(config_tree.extend(ExperimentConfig, {})))
    assert len(keys) > 80
    assert all(text for _, _, text in keys)
    assert ("trainer.ppo.lr", 1e-5) in [(key, default) for key, default, _ in keys]
