"""Unusable models are a one-line error before torch is imported or a process starts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from arealite.api.experiment_config import ExperimentConfig, ModelConfig, ServerConfig
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.base.model_folder import read_model, weight_files
from arealite.cli import configs
from arealite.cli.main import main
from arealite.ext.prompts.prompt_checks import check_prompts, check_tokens
from tests.cli.small_run import small_run
from tests.e2e.conftest import ENVIRONMENT, ROOT
from tests.models import tiny_mixture, tiny_model

RUN_COMMANDS = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from arealite.cli.main import main

results = {}
for name, argv in json.loads(sys.argv[1]).items():
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as errors:
        code = main(argv)
    results[name] = {
        "code": code,
        "output": output.getvalue(),
        "errors": errors.getvalue().splitlines(),
        "imported": sorted({"torch", "transformers"} & sys.modules.keys()),
    }
print(json.dumps(results))
"""
"""A program that runs commands one after the other, and prints what each of them did."""
COMMANDS = ("train", "check", "check --model", "serve-llm")


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    changed = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(load_file(file) | changed, file, {"format": "pt"})


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lose_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001.safetensors")
    where = {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def lose_the_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")


def repeat_a_tensor(folder: Path) -> None:
    lose_a_shard(folder)
    shutil.copy(folder / "model-00001.safetensors", folder / "model-00002.safetensors")


def take_a_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["foreign"] = 64
    file.write_text(json.dumps(tokenizer))


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (cut, "is no safetensors file: "),
    "foreign": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"PK\x03\x04" * 99),
        "model.safetensors is no safetensors file: ",
    ),
    "empty": (
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        "model.safetensors is no safetensors file: ",
    ),
    "shard": (lose_a_shard, "model-00002.safetensors is missing"),
    "index": (lose_the_index, "nor a model.safetensors.index.json with a weight_map. Download"),
    "repeated": (repeat_a_tensor, "model-00002.safetensors and model-00001.safetensors both have "),
    "json": (lambda folder: (folder / "config.json").write_text("{"), "is not valid JSON"),
    "list": (lambda folder: (folder / "config.json").write_text("[1]"), "is not valid JSON"),
    "vocabulary": (
        lambda folder: change_config(folder, vocab_size=72),
        "model.embed_tokens.weight has shape [64, 32], but config.json has vocab_size=72",
    ),
    "width": (
        lambda folder: change_config(folder, hidden_size="32"),
        "has shape [32], but config.json has hidden_size='32'",
    ),
    "tokenizer": (take_a_tokenizer, "its tokenizer has token 64, but its model only 64 tokens"),
}
"""Damages of a model folder, with their error messages."""


def words(model: Path) -> list[str]:
    """Return the options of a small run of a model; its files are beside the model."""
    return [*small_run(model.parent, model), "launcher.llm_servers=1"]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(list(argv)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("how", SPOILED)
def test_invalid_model_folder_is_refused_by_all_commands(
    how: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, says = SPOILED[how]
    spoil(model)
    served = [word for word in words(model) if word.startswith(("model.", "cluster."))]
    assert says in refused(capsys, "train", *words(model))
    assert says in refused(capsys, "check", *words(model))
    assert says in refused(capsys, "serve-llm", *served)
    with pytest.raises(UserError, match=r"trainer\.ppo\.critic\.path="):
        read_model(str(model), "trainer.ppo.critic.path")
    assert not (model.parent / "names").exists()


@pytest.fixture(scope="module")
def results(unchanged_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what each command does with a truncated model; all run in one new process."""
    model = shutil.copytree(unchanged_model, tmp_path_factory.mktemp("truncated") / "model")
    cut(model)
    options = words(model)
    server_options = [word for word in options if word.startswith(("model.", "cluster."))]
    commands = {
        name: [*name.split(), *(server_options if name == "serve-llm" else options)]
        for name in COMMANDS
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN_COMMANDS, json.dumps(commands)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_model_check_imports_no_torch(command: str, results: dict[str, Any]) -> None:
    result = results[command]
    assert (result["code"], result["output"], result["imported"]) == (2, "", [])
    assert len(result["errors"]) == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("foo__weight", "has tensors that the model lacks: foo.weight (1 in all)"),
        (
            "model__norm__weight",
            "model.norm.weight has shape [3], the model of its config.json [32]",
        ),
    ],
)
def test_tensors_that_differ_from_the_model_are_refused_by_check(
    name: str, says: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_tensors(model, **{name: torch.zeros(3)})
    assert says in refused(capsys, "check", *words(model))
    assert says in refused(capsys, "train", "--dry-run", *words(model))


def test_reference_and_critic_need_the_policys_vocabulary(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = tiny_model(tmp_path / "same", hidden_size=16)
    dry = ["train", "--dry-run", *words(model)]
    assert main([*dry, f"trainer.ppo.kl.reference={same}"]) == 0
    assert main([*dry, "trainer.ppo.kl.reference=initial"]) == 0
    other = tiny_model(tmp_path / "other", vocab=32)
    for key, more in (("kl.reference", ""), ("critic.path", "trainer.ppo.advantage.type=gae")):
        line = refused(capsys, *dry, f"trainer.ppo.{key}={other}", *more.split())
        assert f"trainer.ppo.{key}={other} has 32 token ids" in line
        assert "model.path has 64" in line


def test_weight_files_are_those_that_transformers_reads(model: Path) -> None:
    (model / "consolidated.safetensors").write_bytes(b"of another kind")
    read_model(str(model))
    assert weight_files(model) == [model / "model.safetensors"]


def test_model_with_a_tensor_for_each_expert_is_accepted(tmp_path: Path) -> None:
    path = tiny_mixture(tmp_path / "model", "qwen3_moe")
    assert main(["train", "--dry-run", *words(path)]) == 0


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model_type": "qwen2_5_vl"}, "of type 'qwen2_5_vl', which this version of transformers"),
        ({"model_type": "llama4", "vision_config": {}}, "tensors for images, which are not"),
        ({"is_encoder_decoder": True}, "cannot continue a text"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantized, which cannot be trained"),
        ({"architectures": ["BertForMaskedLM"]}, "is a BertForMaskedLM, which cannot continue"),
    ],
)
def test_unsupported_model_family_is_refused(
    values: dict[str, Any], says: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_config(model, **values)
    assert says in refused(capsys, "train", *words(model))


def test_prompts_that_the_tokenizer_cannot_encode_are_reported(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, given = model / "tokenizer.json", words(model)
    rows = [{"prompt": "1+1=", "ground_truth": "2"}] * 64
    rows[7] = {"prompt": "\u4f60", "ground_truth": "2"}
    (model.parent / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["unk_token"] = None
    file.write_text(json.dumps(tokenizer))
    given = [word for word in given if not word.startswith("dataset.")]
    given.append(f"dataset.train={model.parent / 'train.jsonl'}")
    line = refused(capsys, "train", *given)
    assert "row train-7: the tokenizer of model.path" in line and "makes no token of" in line
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 64, "content": "ab"})
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"row t: the tokenizer .* makes 64 of .* has 64 tokens"):
        check_tokens(
            str(model), [Task(task_id="t", prompt="1ab", ground_truth=None, extra_info={})]
        )
    file.write_text("[]")
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        check_tokens(str(model), [Task(task_id="t", prompt="1", ground_truth=None, extra_info={})])


def test_prompts_of_environments_with_their_own_prompts_are_not_tokenized(model: Path) -> None:
    (model / "tokenizer.json").write_text("[]")
    given = ExperimentConfig(model=ModelConfig(path=str(model)))
    collector = given.trainer.ppo.collector

    def check(kind: str) -> None:
        env = replace(collector, env=replace(collector.env, type=kind))
        ppo = replace(given.trainer.ppo, collector=env)
        config = replace(given, trainer=replace(given.trainer, ppo=ppo))
        check_prompts(
            config,
            [Task(task_id="t", prompt="click-test", ground_truth=None, extra_info={})],
            [4096],
        )

    check("browser")
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        check("math")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that cannot be reached; return the names that were asked for."""
    asked = list[str]()

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        raise FileNotFoundError("no route to the hub.\nPlease check your connection.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return asked


def test_hub_id_without_a_network_is_one_line(hub: list[str], capsys: Any) -> None:
    assert main(["check", "model.path=Qwen/Qwen3-0.6B"]) == 2
    shown = capsys.readouterr().err
    assert hub == ["Qwen/Qwen3-0.6B"]
    assert "model.path=Qwen/Qwen3-0.6B is no folder here" in shown
    assert "no route to the hub" in shown and shown.count("\n") == 1


@pytest.mark.parametrize("path", ["/no/where", "./no", "../a/b", "~/models/m", "m", "a/b/c"])
def test_path_of_a_missing_folder_is_not_asked_from_the_hub(
    path: str, hub: list[str], capsys: Any
) -> None:
    assert main(["check", f"model.path={path}"]) == 2
    assert hub == []
    assert f"model.path={path} is no Hugging Face model folder" in capsys.readouterr().err


def test_downloaded_model_is_recorded_as_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: f"{tmp_path}/{name}")
    words = ["model.path=Qwen/Qwen3-0.6B", "launcher.llm_servers=1"]
    [config] = configs.parse_stages(words, command="c", description="")
    assert config.model.path == f"{tmp_path}/Qwen/Qwen3-0.6B"
    assert configs.own_server(config).model.path == config.model.path
    server = configs.parse(ServerConfig, words[:1], command="c", description="")
    assert server.model.path == config.model.path


def test_folder_wins_over_a_hub_id(
    tmp_path: Path, hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen/Qwen3-0.6B").mkdir(parents=True)
    [config] = configs.parse_stages(["model.path=Qwen/Qwen3-0.6B"], command="c", description="")
    assert (config.model.path, hub) == ("Qwen/Qwen3-0.6B", [])
