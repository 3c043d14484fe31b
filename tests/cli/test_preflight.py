"""`arealite check` reports the needs of a run before it starts."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from arealite.api.config import ExperimentConfig
from arealite.api.task import Task
from arealite.base.printable import unguarded
from arealite.cli import configs, estimates
from arealite.cli.main import main
from arealite.system.data.prompts import longest_request
from tests.e2e.conftest import write_rows
from tests.fakes.chat_families import tokenizer_of
from tests.models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "trainer.ppo.collector.agent.math_code_single_step.use_chat_template"


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    tiny_model(tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", 64, seed=1)
    return [
        "check",
        f"model.path={tmp_path / 'model'}",
        f"dataset.train={tmp_path / 'train.jsonl'}",
        f"cluster.run_root={tmp_path}",
        f"cluster.name_root={tmp_path / 'names'}",
        "trainer.ppo.batch_size=16",
        "trainer.ppo.collector.group_size=4",
        "trainer.ppo.collector.concurrency=8",
        "trainer.ppo.collector.sampling.max_new_tokens=6",
        "trainer.ppo.max_staleness=1",
    ]


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    return {line[0]: line[1] for line in lines}


def test_check_describes_a_valid_run(words: list[str], capsys: Any) -> None:
    assert main(words) == 0
    told = said(capsys)
    assert told["model"] == "qwen2, 0.02 M parameters, context 512"
    assert told["data"] == "64 tasks to train, 0 held out"
    assert told["servers"].startswith("none yet; start one: arealite serve-llm experiment_name=")
    names = next(word for word in words if word.startswith("cluster.name_root="))
    assert f" {names} " in told["servers"] and "host=" not in told["servers"]
    assert told["staleness"].startswith("η=1: at most (η + 1) × batch_size = 32 trajectories")
    assert told["staleness"].endswith("a batch takes 2 rounds: raise concurrency")
    assert "WARNING" not in told
    assert "ok:" in told


@pytest.mark.parametrize("width", [80, 60])
def test_check_output_wraps_between_words_on_a_terminal(
    words: list[str], width: int, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(
        free=10**10
    )  # otherwise it may change between the calls
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert main(words) == 0
    rows = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(unguarded(sys.stdout), "isatty", lambda: True)
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.split() == rows.split()
    over = [line for line in shown.splitlines() if len(line) > width and " " in line.strip()]
    assert [line.split()[0] for line in over] == ["servers"], "a command to copy stays whole"
    folded = [line for line in shown.splitlines() if line.startswith(" ")]
    assert folded and all(len(line) - len(line.lstrip()) == 11 for line in folded)


@pytest.mark.parametrize(
    ("more", "what", "text"),
    [
        (["trainer.ppo.collector.concurrency=64"], "staleness", "32 slots stay empty"),
        (["trainer.ppo.publisher.type=shared"], "servers", "the trainer itself"),
        (["launcher.llm_servers=2"], "servers", "started with the run"),
        (["cluster.host=auto"], "servers", " cluster.host=auto llm_server.host=0.0.0.0 "),
    ],
)
def test_check_describes_options_that_change_the_run(
    words: list[str], capsys: Any, more: list[str], what: str, text: str
):
    assert main([*words, *more]) == 0
    assert text in said(capsys)[what]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["total_steps=9"], ["trainer.ppo.optimizer.warmup_steps=10", "9 optimizer", "90% of"]),
        (["total_steps=10"], []),
        (["total_steps=2", "updates=2", "epochs=2"], ["8 optimizer", "80% of trainer.ppo.lr"]),
        (["total_steps=3", "updates=2", "epochs=2"], []),
        (["total_steps=3", "optimizer.warmup_steps=3"], []),
        (
            ["advantage.type=gae", "critic.optimizer.warmup_steps=200"],
            ["trainer.ppo.critic.optimizer.warmup_steps=200", "50% of trainer.ppo.critic.lr"],
        ),
        (["critic.optimizer.warmup_steps=200"], []),
    ],
)
def test_warm_up_that_is_longer_than_the_run_is_printed(
    words: list[str], capsys: Any, more: list[str], says: list[str]
) -> None:
    assert main([*words, *(f"trainer.ppo.{option}" for option in more)]) == 0
    line = said(capsys).get("warm-up", "")
    assert bool(line) == bool(says)
    assert all(text in line for text in says)


def test_memory_estimate_matches_sums_by_hand() -> None:
    """16 bytes per trained parameter in float32, 2 bytes per frozen parameter in bfloat16."""
    from arealite.api.algorithm import KLConfig
    from arealite.api.config import ExperimentConfig
    from arealite.api.engine_config import FSDPConfig, TrainEngineConfig
    from arealite.api.trainer import PPOConfig, TrainerConfig

    model = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": 10}
    numel = 10**9

    def held(dtype: Any = "float32", **ppo: Any) -> float:
        fsdp = FSDPConfig(dtype=dtype, max_tokens_per_microbatch=1, logits_chunk=1)
        engine = TrainEngineConfig(fsdp=fsdp)
        config = ExperimentConfig(trainer=TrainerConfig(ppo=PPOConfig(engine=engine, **ppo)))
        (trainer,) = estimates.memory(config, model, {"weight": [numel]})
        assert trainer.role == "trainer, each of 1"
        return trainer.size

    assert held() == pytest.approx(16 * numel, rel=1e-3)
    assert held("bfloat16") == pytest.approx(18 * numel, rel=1e-3)
    assert held("bfloat16", kl=KLConfig(coef=0.1)) == pytest.approx(20 * numel, rel=1e-3)


def test_ranks_that_share_rows_divide_the_longest_row() -> None:
    from arealite.api.config import ExperimentConfig

    model = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4}
    model |= {"max_position_embeddings": 10**6}

    def held(size: int) -> float:
        words = [f"trainer.ppo.engine.fsdp.context_parallel={size}", "launcher.trainer_ranks=4"]
        config = configs.load(ExperimentConfig, configs.CONFIG_DIR / "async_ppo.yaml", words)
        return next(estimates.memory(config, model, {"weight": [1000]}, 400_000)).size

    row = 400_000 * 2 * (8 * 8 + 4 * 4 * 8) * 4
    assert held(1) - held(4) == pytest.approx(row * 3 / 4)


def test_sizes_that_cannot_share_rows_are_refused(words: list[str], capsys: Any) -> None:
    key = "trainer.ppo.engine.fsdp.context_parallel=2"
    assert main([*words, key]) == 2
    assert "context_parallel=2 does not divide the 1 trainer ranks" in capsys.readouterr().err
    assert main([*words, key, "launcher.trainer_ranks=2"]) == 0


def test_server_memory_uses_the_servers_dtype() -> None:
    """The trainer's model has its compute dtype; a server's dtype may be set separately."""
    from arealite.api.config import ExperimentConfig
    from arealite.cli import configs

    model = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 4}
    model |= {"max_position_embeddings": 100}
    file = configs.CONFIG_DIR / "async_ppo.yaml"

    def held(*words: str) -> float:
        config = configs.load(ExperimentConfig, file, [*words, "model.path=m"])
        return [*estimates.memory(config, model, {"weight": [1000]})][-1].size

    keys = 2 * 2 * 8 * 256 * 100
    shared = "trainer.ppo.publisher.type=shared"
    assert held(shared) == 4 * keys
    low = ["trainer.ppo.engine.fsdp.dtype=bfloat16", "trainer.ppo.engine.fsdp.lora.rank=1"]
    assert held(shared, *low) == 2 * keys
    own = "launcher.llm_servers=1"
    assert held(own) == 4 * (keys + 1000)
    assert held(own, "launcher.server_args=[model.dtype=bfloat16]") == 2 * (keys + 1000)


ONE_GPU = re.search(
    r"one_gpu.yaml`:\n\n```yaml\n(.*?)```", (ROOT / "docs/real_model.md").read_text(), re.S
)


def test_estimate_of_the_one_gpu_guide_fits_its_gpu(tmp_path: Path) -> None:
    """A row of the cache has the prompt and 1,024 new tokens, not the context of 32,768 tokens."""
    assert ONE_GPU
    (tmp_path / "one_gpu.yaml").write_text(ONE_GPU[1])
    config = configs.load(ExperimentConfig, tmp_path / "one_gpu.yaml", [])
    prompt = "What is 17 * 23? " * 10
    longest = longest_request(config, [Task("t", prompt, "1", {}), Task("u", "short", "1", {})])
    system = "Reason step by step, and put your final answer into \\boxed{}."
    assert longest == 1024 + len(prompt) + len(system) + 64
    model = {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12}
    model |= {"num_key_value_heads": 2, "max_position_embeddings": 32768, "vocab_size": 151936}
    *_, server = estimates.memory(config, model, {"weight": [1_543_714_304]}, longest)
    assert server.size == 28 * 2 * 2 * 128 * 4 * 128 * longest  # layers, K and V, heads, …
    assert server.size < 11e9


def test_conversations_of_several_turns_may_fill_the_context() -> None:
    file = configs.CONFIG_DIR / "env/tic_tac_toe.yaml"
    config = configs.load(ExperimentConfig, file, [])
    assert longest_request(config, [Task("t", "play", None, {})]) is None


def test_longest_request_is_bounded_by_the_context(words: list[str], capsys: Any) -> None:
    shared = "trainer.ppo.publisher.type=shared"
    assert main([*words, shared]) == 0
    small = said(capsys)["memory"]
    long = [*words, shared, "trainer.ppo.eval.sampling.max_new_tokens=100000"]
    assert main(long) == 0
    assert "shared server" in small and small != said(capsys)["memory"]


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("", "texts go into the model's chat template; for plain text: trainer.ppo.collector."),
        ("false", None),
        ("true", None),
    ],
)
def test_use_of_the_chat_template_is_printed_if_it_is_automatic(
    words: list[str], option: str, line: str | None, capsys: Any
) -> None:
    more = [f"{TEMPLATE}={option}"] if option else []
    assert main([*words, *more]) == 0
    told = said(capsys).get("prompts")
    assert told == line if line is None else told and told.startswith(line)
    assert line is None or told == f"{line}agent.math_code_single_step.use_chat_template=false"


AGENT = "trainer.ppo.collector.agent.type"


@pytest.mark.parametrize("agent", ["chat", "tool_use", "reasoning"])
def test_template_of_an_agent_with_texts_is_checked(
    agent: str, words: list[str], tmp_path: Path, capsys: Any
) -> None:
    refusal = "{{ raise_exception('no') }}"
    (tmp_path / "model/chat_template.jinja").write_text(refusal)
    assert main([*words, f"{AGENT}={agent}"]) == 2
    assert "no prompt can be rendered" in capsys.readouterr().err
    assert main([*words, f"{TEMPLATE}=false"]) == 0


def ask(*messages: str) -> list[dict[str, str]]:
    """Return chat messages, each written as "role: content"."""
    parts = [message.partition(": ") for message in messages]
    return [{"role": role, "content": content} for role, _, content in parts]


def write_prompts(words: list[str], family: str, *prompts: Any) -> None:
    """Give the model the tokenizer of a family, and let the first rows have these prompts."""
    folder = Path(next(word for word in words if word.startswith("model.path="))[11:])
    shutil.rmtree(folder)
    tiny_model(folder, vocab_size=len(tokenizer_of(family)))
    tokenizer_of(family).save_pretrained(folder)
    file = folder.parent / "train.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row, prompt in zip(rows, prompts, strict=False):
        row["prompt"] = prompt
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


LATE = ask("user: a", "assistant: b", "system: c", "user: d")


def test_prompt_that_the_template_does_not_render_as_written_is_refused(
    words: list[str], capsys: Any
) -> None:
    write_prompts(words, "deepseek_v3", "a", ask("user: a"), LATE)
    assert main(words) == 2
    line = capsys.readouterr().err
    assert line == (
        "error: row train-2: the model's chat template leaves out message 3 (system) of its "
        "prompt. Put the text into a message of the user, remove it, or use another template.\n"
    )


def test_rendered_text_is_accepted_if_it_is_sent_as_it_is(words: list[str], capsys: Any) -> None:
    write_prompts(words, "qwen3", "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
    assert main(words) == 2
    assert "row train-0: message 1 (user) of its prompt contains <|im_" in capsys.readouterr().err
    assert main([*words, f"{TEMPLATE}=false"]) == 0


def test_messages_without_a_chat_template_are_refused(words: list[str], capsys: Any) -> None:
    write_prompts(words, "qwen3", "a", ask("user: b"))
    folder = Path(next(word for word in words if word.startswith("model.path="))[11:])
    (folder / "chat_template.jinja").unlink()
    file = folder / "tokenizer_config.json"
    values = json.loads(file.read_text())
    values.pop("chat_template", None)
    file.write_text(json.dumps(values))
    assert main(words) == 2
    line = capsys.readouterr().err
    assert "row train-1: The prompt is a list of messages, but the model's tokenizer has no" in line


def test_key_of_messages_that_the_template_does_not_render_is_printed(
    words: list[str], capsys: Any
) -> None:
    (message,) = ask("user: b")
    write_prompts(words, "qwen3", "a", [message | {"name": "Ann"}], [message | {"name": "Bob"}])
    assert main(words) == 0
    line = said(capsys)["template"]
    assert (
        line == "warning: the chat template does not render `name` of a message, as in row train-1"
    )


def test_tools_that_the_template_does_not_render_are_printed(words: list[str], capsys: Any) -> None:
    assert main([*words, f"{AGENT}=tool_use"]) == 0
    assert "the chat template renders no tools" in capsys.readouterr().out
    write_prompts(words, "qwen3")
    assert main([*words, f"{AGENT}=tool_use"]) == 0
    assert "renders no tools" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["eval", "collect"])
def test_samples_of_a_prompt_that_the_template_drops_are_refused(
    command: str, words: list[str], tmp_path: Path, capsys: Any
) -> None:
    write_prompts(words, "deepseek_v3", "a", LATE)
    split = "eval" if command == "eval" else "train"
    data = next(word for word in words if word.startswith("dataset.train="))
    folders = [word for word in words if word.startswith(("model.", "cluster."))]
    given = [f"dataset.{split}={data[14:]}", "name=s", "launcher.llm_servers=1"]
    given += [f"out={tmp_path / 'samples.jsonl'}"] * (command == "collect")
    assert main([command, *folders, *given]) == 2
    assert f"row {split}-1: the model's chat template leaves out message 3 (sy" in (
        capsys.readouterr().err
    )


def test_unknown_format_of_tool_calls_is_printed(words: list[str], capsys: Any) -> None:
    assert main([*words, f"{AGENT}=tool_use"]) == 0
    assert "has no known format of tool calls, so Hermes calls are read" in said(capsys)["template"]


def test_required_chat_template_must_exist(words: list[str], tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "model"
    for file in folder.glob("chat_template*"):
        file.unlink()
    saved = json.loads((folder / "tokenizer_config.json").read_text())
    saved.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(saved))
    assert main(words) == 0
    assert "prompts" not in said(capsys)
    assert main([*words, f"{TEMPLATE}=true"]) == 2
    assert f"{TEMPLATE}=true, but the model has no chat template" in capsys.readouterr().err


def test_too_little_memory_is_a_warning(words: list[str], capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(estimates.os, "sysconf", lambda name: 1)
    monkeypatch.setattr(estimates, "_gpu_memory", lambda: 0)
    assert main(words) == 0
    assert "this host has free 1 byte" in said(capsys)["WARNING"]


@pytest.mark.parametrize(
    ("more", "fix"),
    [
        (["model.path=/nowhere"], "is no Hugging Face model folder"),
        ([f"trial_name={'x' * 300}"], "up to 200"),
        (["launcher.llm_servers=1", "launcher.server_args=[llm_server.nope=1]"], "unknown key"),
        (["trainer.ppo.publisher.type=shared", "launcher.trainer_ranks=2"], "trainer_ranks=1"),
        (
            ["trainer.ppo.publisher.type=shared", "launcher.llm_servers=1"],
            "uses no LLM servers",
        ),
        (
            ["trainer.ppo.publisher.type=shared", "trainer.ppo.engine.fsdp.dtype=bfloat16"],
            "use engine.fsdp.dtype=float32",
        ),
    ],
)
def test_run_that_cannot_start_is_a_one_line_error(
    words: list[str], capsys: Any, more: list[str], fix: str
):
    assert main([*words, *more]) == 2
    error = capsys.readouterr().err
    assert fix in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("command", [["check"], ["train", "--dry-run"]])
def test_check_and_dry_run_write_no_file(
    words: list[str], tmp_path: Path, command: list[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    more = [f"cluster.run_root={tmp_path / 'runs' / 'of mine'}", "launcher.llm_servers=1"]
    assert main([*command, *words[1:], *more]) == 0
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["file", "link"])
def test_run_folder_that_cannot_be_created_is_refused(
    words: list[str], tmp_path: Path, capsys: Any, kind: str
) -> None:
    place = tmp_path / "place"
    place.touch() if kind == "file" else place.symlink_to(tmp_path / "nowhere")
    assert main([*words, f"cluster.run_root={place}"]) == 2
    assert "cannot be written: No" in capsys.readouterr().err


def test_config_file_may_be_a_positional_argument(
    words: list[str], tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("trainer: {ppo: {max_staleness: 3}}\n")
    assert main(["check", str(file), *words[1:-1]]) == 0
    assert said(capsys)["staleness"].startswith("η=3: ")
