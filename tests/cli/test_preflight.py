"""`arealite check` reports the needs of a run before it starts."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from arealite.api.algorithm import KLConfig
from arealite.api.engine_config import FSDPConfig, TrainEngineConfig
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.task import Task
from arealite.api.trainer import PPOConfig, TrainerConfig
from arealite.base.printable import unguarded
from arealite.cli import configs
from arealite.cli.main import main
from arealite.ext.machine import estimates
from arealite.ext.prompts.prompt_checks import longest_request
from tests.cli.small_run import small_run
from tests.fakes.chat_families import tokenizer_of
from tests.models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
AGENT = "trainer.ppo.collector.agent.type"
TEMPLATE = "trainer.ppo.collector.agent.math_code_single_step.use_chat_template"


@pytest.fixture
def words(tmp_path: Path, model: Path) -> list[str]:
    """Return the command that checks a small run of a copy of the tiny model."""
    return ["check", *small_run(tmp_path, model), "trainer.ppo.max_staleness=1"]


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
    ("option", "heading", "text"),
    [
        ("trainer.ppo.collector.concurrency=64", "staleness", "32 slots stay empty"),
        ("trainer.ppo.publisher.type=shared", "servers", "the trainer itself"),
        ("launcher.llm_servers=2", "servers", "started with the run"),
        ("cluster.host=auto", "servers", " cluster.host=auto llm_server.host=0.0.0.0 "),
        (
            f"{AGENT}=tool_use",
            "template",
            "has no known format of tool calls, so Hermes calls are read",
        ),
    ],
)
def test_check_describes_options_that_change_the_run(
    words: list[str], capsys: Any, option: str, heading: str, text: str
) -> None:
    assert main([*words, option]) == 0
    assert text in said(capsys)[heading]


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


@pytest.mark.parametrize(
    ("dtype", "kl_coef", "bytes_per_parameter"),
    [
        ("float32", 0.0, 16),
        ("bfloat16", 0.0, 18),
        ("bfloat16", 0.1, 20),
    ],
)
def test_memory_estimate_matches_sums_by_hand(
    dtype: Any, kl_coef: float, bytes_per_parameter: int
) -> None:
    """16 bytes per trained parameter in float32, 2 bytes per frozen parameter in bfloat16."""
    model = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": 10}
    num_parameters = 10**9
    fsdp = FSDPConfig(dtype=dtype, max_tokens_per_microbatch=1, logits_chunk=1)
    ppo = PPOConfig(engine=TrainEngineConfig(fsdp=fsdp), kl=KLConfig(coef=kl_coef))
    config = ExperimentConfig(trainer=TrainerConfig(ppo=ppo))
    (trainer,) = estimates.memory(config, model, {"weight": [num_parameters]})
    assert trainer.role == "trainer, each of 1"
    assert trainer.size == pytest.approx(bytes_per_parameter * num_parameters, rel=1e-3)


def test_ranks_that_share_rows_divide_the_longest_row() -> None:
    model = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4}
    model |= {"max_position_embeddings": 10**6}

    def held(size: int) -> float:
        words = [f"trainer.ppo.engine.fsdp.context_parallel={size}", "launcher.trainer_ranks=4"]
        config = configs.load(ExperimentConfig, configs.CONFIG_DIR / "async_ppo.yaml", words)
        return next(estimates.memory(config, model, {"weight": [1000]}, 400_000)).size

    row = 400_000 * 2 * (8 * 8 + 4 * 4 * 8) * 4
    assert held(1) - held(4) == pytest.approx(row * 3 / 4)


def test_ranks_that_can_share_rows_are_accepted(words: list[str]) -> None:
    options = ["trainer.ppo.engine.fsdp.context_parallel=2", "launcher.trainer_ranks=2"]
    assert main([*words, *options]) == 0


SHARED = "trainer.ppo.publisher.type=shared"
CACHED_NUMBERS = 2 * 2 * 8 * 256 * 100
"""Keys and values of 256 rows of 100 tokens, in 2 layers with 8 numbers for each token."""


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ([SHARED], 4 * CACHED_NUMBERS),
        (
            [
                SHARED,
                "trainer.ppo.engine.fsdp.dtype=bfloat16",
                "trainer.ppo.engine.fsdp.lora.rank=1",
            ],
            2 * CACHED_NUMBERS,
        ),
        (["launcher.llm_servers=1"], 4 * (CACHED_NUMBERS + 1000)),
        (
            ["launcher.llm_servers=1", "launcher.server_args=[model.dtype=bfloat16]"],
            2 * (CACHED_NUMBERS + 1000),
        ),
    ],
    ids=["shared", "shared, of low precision", "of its own", "of its own, of low precision"],
)
def test_server_memory_uses_the_servers_dtype(options: list[str], size: int) -> None:
    """The trainer's model has its compute dtype; a server's dtype may be set separately."""
    model = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 4}
    model |= {"max_position_embeddings": 100}
    file = configs.CONFIG_DIR / "async_ppo.yaml"
    config = configs.load(ExperimentConfig, file, [*options, "model.path=m"])
    *_, server = estimates.memory(config, model, {"weight": [1000]})
    assert server.size == size


ONE_GPU = re.search(
    r"one_gpu.yaml`:\n\n```yaml\n(.*?)```", (ROOT / "docs/real_model.md").read_text(), re.S
)


def test_estimate_of_the_one_gpu_guide_fits_its_gpu(tmp_path: Path) -> None:
    """A row of the cache has the prompt and 1,024 new tokens, not the context of 32,768 tokens."""
    assert ONE_GPU
    (tmp_path / "one_gpu.yaml").write_text(ONE_GPU[1])
    config = configs.load(ExperimentConfig, tmp_path / "one_gpu.yaml", [])
    prompt = "What is 17 * 23? " * 10
    longest = longest_request(
        config,
        [
            Task(task_id="t", prompt=prompt, ground_truth="1", extra_info={}),
            Task(task_id="u", prompt="short", ground_truth="1", extra_info={}),
        ],
    )
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
    assert (
        longest_request(
            config, [Task(task_id="t", prompt="play", ground_truth=None, extra_info={})]
        )
        is None
    )


def test_longest_request_is_bounded_by_the_context(words: list[str], capsys: Any) -> None:
    assert main([*words, SHARED]) == 0
    small = said(capsys)["memory"]
    long = [*words, SHARED, "trainer.ppo.eval.sampling.max_new_tokens=100000"]
    assert main(long) == 0
    assert "shared server" in small and small != said(capsys)["memory"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], f"texts go into the model's chat template; for plain text: {TEMPLATE}=false"),
        ([f"{TEMPLATE}=false"], None),
        ([f"{TEMPLATE}=true"], None),
    ],
    ids=["automatic", "plain text", "chat template"],
)
def test_use_of_the_chat_template_is_printed_if_it_is_automatic(
    words: list[str], options: list[str], line: str | None, capsys: Any
) -> None:
    assert main([*words, *options]) == 0
    assert said(capsys).get("prompts") == line


def test_template_of_an_agent_with_texts_is_checked(
    words: list[str], model: Path, capsys: Any
) -> None:
    (model / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    for agent in ("chat", "tool_use", "reasoning"):
        assert main([*words, f"{AGENT}={agent}"]) == 2, agent
        assert "no prompt can be rendered" in capsys.readouterr().err, agent
    assert main([*words, f"{TEMPLATE}=false"]) == 0


def ask(*messages: str) -> list[dict[str, str]]:
    """Return chat messages, each written as "role: content"."""
    parts = [message.partition(": ") for message in messages]
    return [{"role": role, "content": content} for role, _, content in parts]


def write_prompts(model: Path, family: str, *prompts: Any) -> None:
    """Give the model the tokenizer of a family, and let the first rows have these prompts."""
    shutil.rmtree(model)
    tiny_model(model, vocab_size=len(tokenizer_of(family)))
    tokenizer_of(family).save_pretrained(model)
    file = model.parent / "train.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row, prompt in zip(rows, prompts, strict=False):
        row["prompt"] = prompt
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def remove_chat_template(model: Path) -> None:
    """Remove the chat template from a model's folder."""
    (model / "chat_template.jinja").unlink(missing_ok=True)
    file = model / "tokenizer_config.json"
    options = json.loads(file.read_text())
    options.pop("chat_template", None)
    file.write_text(json.dumps(options))


LATE = ask("user: a", "assistant: b", "system: c", "user: d")
RENDERED = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


def test_prompt_that_the_template_does_not_render_as_written_is_refused(
    words: list[str], model: Path, capsys: Any
) -> None:
    write_prompts(model, "deepseek_v3", "a", ask("user: a"), LATE)
    assert main(words) == 2
    line = capsys.readouterr().err
    assert line == (
        "error: row train-2: the model's chat template leaves out message 3 (system) of its "
        "prompt. Put the text into a message of the user, remove it, or use another template.\n"
    )


def test_rendered_text_is_accepted_if_it_is_sent_as_it_is(
    words: list[str], model: Path, capsys: Any
) -> None:
    write_prompts(model, "qwen3", RENDERED)
    assert main(words) == 2
    assert "row train-0: message 1 (user) of its prompt contains <|im_" in capsys.readouterr().err
    assert main([*words, f"{TEMPLATE}=false"]) == 0


def test_messages_without_a_chat_template_are_refused(
    words: list[str], model: Path, capsys: Any
) -> None:
    write_prompts(model, "qwen3", "a", ask("user: b"))
    remove_chat_template(model)
    assert main(words) == 2
    line = capsys.readouterr().err
    assert "row train-1: The prompt is a list of messages, but the model's tokenizer has no" in line


def test_key_of_messages_that_the_template_does_not_render_is_printed(
    words: list[str], model: Path, capsys: Any
) -> None:
    (message,) = ask("user: b")
    write_prompts(model, "qwen3", "a", [message | {"name": "Ann"}], [message | {"name": "Bob"}])
    assert main(words) == 0
    line = said(capsys)["template"]
    assert (
        line == "warning: the chat template does not render `name` of a message, as in row train-1"
    )


def test_tools_that_the_template_does_not_render_are_printed(
    words: list[str], model: Path, capsys: Any
) -> None:
    assert main([*words, f"{AGENT}=tool_use"]) == 0
    assert "the chat template renders no tools" in capsys.readouterr().out
    write_prompts(model, "qwen3")
    assert main([*words, f"{AGENT}=tool_use"]) == 0
    assert "renders no tools" not in capsys.readouterr().out


def test_samples_of_a_prompt_that_the_template_drops_are_refused(
    words: list[str], model: Path, tmp_path: Path, capsys: Any
) -> None:
    write_prompts(model, "deepseek_v3", "a", LATE)
    rows = tmp_path / "train.jsonl"
    options = [word for word in words if word.startswith(("model.", "cluster."))]
    options += ["name=s", "launcher.llm_servers=1"]
    fault = "the model's chat template leaves out message 3 (sy"

    assert main(["eval", *options, f"dataset.eval={rows}"]) == 2
    assert f"row eval-1: {fault}" in capsys.readouterr().err

    samples = f"out={tmp_path / 'samples.jsonl'}"
    assert main(["collect", *options, f"dataset.train={rows}", samples]) == 2
    assert f"row train-1: {fault}" in capsys.readouterr().err


def test_required_chat_template_must_exist(words: list[str], model: Path, capsys: Any) -> None:
    remove_chat_template(model)
    assert main(words) == 0
    assert "prompts" not in said(capsys)
    assert main([*words, f"{TEMPLATE}=true"]) == 2
    assert f"{TEMPLATE}=true, but the model has no chat template" in capsys.readouterr().err


def test_too_little_memory_is_a_warning(words: list[str], capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(estimates, "available_memory", lambda: 1)
    monkeypatch.setattr(estimates, "_gpu_memory", lambda: 0)
    assert main(words) == 0
    assert "this host has free 1 byte" in said(capsys)["WARNING"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["model.path=/nowhere"], "is no Hugging Face model folder"),
        ([f"trial_name={'x' * 300}"], "up to 200"),
        (["launcher.llm_servers=1", "launcher.server_args=[llm_server.nope=1]"], "unknown key"),
        ([SHARED, "launcher.trainer_ranks=2"], "trainer_ranks=1"),
        ([SHARED, "launcher.llm_servers=1"], "uses no LLM servers"),
        (
            [SHARED, "trainer.ppo.engine.fsdp.dtype=bfloat16"],
            "use engine.fsdp.dtype=float32",
        ),
        (
            ["trainer.ppo.engine.fsdp.context_parallel=2"],
            "context_parallel=2 does not divide the 1 trainer ranks",
        ),
        (["cluster.run_root={folder}/file"], "cannot be written: No"),
        (["cluster.run_root={folder}/link"], "cannot be written: No"),
    ],
)
def test_run_that_cannot_start_is_a_one_line_error(
    words: list[str], tmp_path: Path, capsys: Any, options: list[str], text: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    filled = [option.replace("{folder}", str(tmp_path)) for option in options]
    assert main([*words, *filled]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("command", [["check"], ["train", "--dry-run"]])
def test_check_and_dry_run_write_no_file(
    words: list[str], tmp_path: Path, command: list[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    more = [f"cluster.run_root={tmp_path / 'runs' / 'of mine'}", "launcher.llm_servers=1"]
    assert main([*command, *words[1:], *more]) == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_config_file_may_be_a_positional_argument(
    words: list[str], tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("trainer: {ppo: {max_staleness: 3}}\n")
    assert main(["check", str(file), *words[1:-1]]) == 0
    assert said(capsys)["staleness"].startswith("η=3: ")
