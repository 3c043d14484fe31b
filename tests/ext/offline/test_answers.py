"""The trained tokens of an answer are those that the chat template renders for it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arealite.api.experiment_config import DatasetConfig, ExperimentConfig, ModelConfig
from arealite.base.errors import UserError
from arealite.ext.offline.answers import turn_end
from arealite.ext.offline.examples import ASSISTANT
from arealite.ext.offline.rows import check_examples
from tests.ext.offline.test_rows import encode
from tests.ext.offline.test_rows import settings as sft_settings
from tests.fakes.chat_families import FAMILIES, SHAPES, tokenizer_of
from tests.system.data.test_dataset import jsonl, parquet

USER = {"role": "user", "content": "weather?"}
SUNNY = {"role": "assistant", "content": "Sunny."}
AGAIN = {"role": "user", "content": "and then?"}
RAINY = {"role": "assistant", "content": "Rainy."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "c00010000",
            "type": "function",
            "function": {"name": "search", "arguments": {"query": "Paris"}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c00010000", "name": "search", "content": "20 degrees"}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "search the web",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}


def trained(name: str, messages: list[Any], **row: Any) -> list[str]:
    """Return the texts of the trained answers of a row."""
    tokenizer = tokenizer_of(name)
    (example,) = encode({"messages": messages, **row}, tokenizer=tokenizer)
    texts, previous = list[str](), 0
    for token, kind in zip(example.tokens.tolist(), example.kinds.tolist(), strict=True):
        if kind == ASSISTANT and previous != ASSISTANT:
            texts.append("")
        if kind == ASSISTANT:
            texts[-1] += tokenizer.decode([token])
        previous = kind
    return texts


def thought(text: str, message: dict[str, Any] = SUNNY) -> dict[str, Any]:
    return {**message, "reasoning_content": text}


@pytest.mark.parametrize(
    ("name", "messages", "texts"),
    [
        # The generation prompt opens the thought, so the thought begins after the tag.
        (
            "qwq",
            [USER, {**SUNNY, "content": "<think>\nblue sky\n</think>\n\nSunny."}],
            ["blue sky\n</think>\n\nSunny.<|im_end|>"],
        ),
        ("glm4_7", [USER, thought("blue sky")], ["blue sky</think>Sunny.<|user|>"]),
        (
            "glm4_7",
            [USER, thought("look it up", CALL)],
            [
                "look it up</think><tool_call>search<arg_key>query</arg_key>"
                "<arg_value>Paris</arg_value></tool_call><|observation|>"
            ],
        ),
        # The template writes the thought, also an empty one.
        ("qwen3", [USER, thought("x")], ["<think>\nx\n</think>\n\nSunny.<|im_end|>"]),
        (
            "qwen3",
            [USER, {**SUNNY, "reasoning": "x"}],
            ["<think>\nx\n</think>\n\nSunny.<|im_end|>"],
        ),
        (
            "qwen3",
            [USER, {**SUNNY, "content": "<think>\nx\n</think>\n\nSunny."}],
            ["<think>\nx\n</think>\n\nSunny.<|im_end|>"],
        ),
        ("qwen3", [USER, SUNNY], ["<think>\n\n</think>\n\nSunny.<|im_end|>"]),
        # Before a later question, the template writes no empty thought.
        (
            "qwen3",
            [USER, SUNNY, AGAIN, RAINY],
            ["Sunny.<|im_end|>", "<think>\n\n</think>\n\nRainy.<|im_end|>"],
        ),
        (
            "qwen3",
            [USER, thought("x", CALL), RESULT, thought("y")],
            [
                '<think>\nx\n</think>\n\n<tool_call>\n{"name": "search", "arguments": '
                '{"query": "Paris"}}\n</tool_call><|im_end|>',
                "<think>\ny\n</think>\n\nSunny.<|im_end|>",
            ],
        ),
        # The turn ends with the template's token, not with the tokenizer's EOS.
        ("gemma", [USER, SUNNY], ["Sunny.<end_of_turn>"]),
        (
            "gemma",
            [USER, SUNNY, AGAIN, RAINY],
            ["Sunny.<end_of_turn>", "Rainy.<end_of_turn>"],
        ),
        # The header of the next message ends the turn.
        (
            "glm4_5",
            [USER, CALL, RESULT, SUNNY],
            [
                "\n<think></think>\n<tool_call>search\n<arg_key>query</arg_key>\n"
                "<arg_value>Paris</arg_value>\n</tool_call><|observation|>",
                "\n<think></think>\nSunny.<|user|>",
            ],
        ),
        # Other tokens end the turn of a call, or of the last answer.
        ("gpt_oss", [USER, SUNNY], ["<|channel|>final<|message|>Sunny.<|return|>"]),
        (
            "gpt_oss",
            [USER, CALL],
            [' to=functions.search<|channel|>commentary json<|message|>{"query": "Paris"}<|call|>'],
        ),
        ("mistral", [USER, SUNNY], [" Sunny.</s>"]),
        (
            "llama3_1",
            [USER, CALL, RESULT, SUNNY],
            ['{"name": "search", "parameters": {"query": "Paris"}}<|eot_id|>', "Sunny.<|eot_id|>"],
        ),
        ("kimi_k2", [USER, SUNNY, AGAIN, RAINY], ["Sunny.<|im_end|>", "Rainy.<|im_end|>"]),
    ],
)
def test_answer_has_the_text_that_the_template_renders(
    name: str, messages: list[Any], texts: list[str]
) -> None:
    assert trained(name, messages) == texts


@pytest.mark.parametrize(
    ("name", "messages", "fault"),
    [
        # The generation prompt opens a thought that the answer's rendering does not have.
        ("qwq", [USER, CALL], "<|im_start|>assistant\\n<think>\\n', but the template renders"),
        ("qwq", [USER, SUNNY], "<|im_start|>assistant\\n<think>\\n', but the template renders"),
        ("deepseek_r1", [USER, CALL], "<｜Assistant｜><think>\\n', but"),
        ("deepseek_r1", [USER, SUNNY], "<｜Assistant｜><think>\\n', but"),
        ("glm4_7", [USER, CALL], "<|assistant|><think>', but"),
        ("glm4_7", [USER, SUNNY], "<|assistant|><think>', but"),
        # The template leaves out a part of the answer.
        ("qwen2_5", [USER, thought("x")], "leaves out `reasoning_content` of message 2"),
        ("qwen2_5", [USER, {**SUNNY, "thinking": "x"}], "leaves out `reasoning_content`"),
        (
            "deepseek_v3",
            [USER, {**SUNNY, "content": "<think>x</think>Sunny."}],
            "leaves out `content` of message 2",
        ),
        ("llama3_1", [USER, {**CALL, "content": "ok"}], "leaves out `content` of message 2"),
        # The thought of an earlier answer is gone when the next question is asked.
        ("qwen3", [USER, thought("x"), AGAIN, RAINY], "before message 4 differently"),
        # <|return|> becomes <|end|> when another message follows.
        ("gpt_oss", [USER, SUNNY, AGAIN, RAINY], "before message 4 differently"),
        # The template leaves out a message.
        (
            "qwen3",
            [{"role": "critic", "content": "Be short."}, USER, SUNNY],
            "leaves out message 1, whose role is 'critic'",
        ),
    ],
)
def test_answer_that_the_template_does_not_render_is_refused(
    name: str, messages: list[Any], fault: str
) -> None:
    with pytest.raises(UserError) as caught:
        trained(name, messages)
    text = str(caught.value)
    assert text.startswith("rows.jsonl, line 7: ") and fault in text, text
    assert "\n" not in text


@pytest.mark.parametrize("name", [*FAMILIES, *SHAPES])
def test_turn_ends_with_a_token_that_ends_a_generation(name: str) -> None:
    end = turn_end(tokenizer_of(name))
    generation_ends = (FAMILIES | SHAPES)[name].ends
    assert end.marker in (*generation_ends, "<|end|>")  # gpt_oss: <|return|> after the last answer


SEVERAL = [name for name in [*FAMILIES, "gemma"] if name != "gpt_oss"]


@pytest.mark.parametrize(
    ("name", "number"), [("gpt_oss", 1), *[(name, number) for name in SEVERAL for number in (1, 3)]]
)
def test_tokens_are_the_templates_rendering(name: str, number: int) -> None:
    tokenizer = tokenizer_of(name)
    messages = [USER, SUNNY, *[AGAIN, RAINY] * (number - 1)]
    (example,) = encode({"messages": messages}, tokenizer=tokenizer)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    text = tokenizer.decode(example.tokens)
    assert text.removesuffix("<|user|>").rstrip() == whole.rstrip()


# ------------------------------------------------------------ columns and keys


@pytest.mark.parametrize("tools", [[SCHEMA], json.dumps([SCHEMA])])
def test_column_tools_is_rendered(tools: Any) -> None:
    tokenizer = tokenizer_of("qwen3")
    row = {"messages": [USER, CALL, RESULT, SUNNY], "tools": tools}
    (example,) = encode(row, tokenizer=tokenizer)
    wanted = tokenizer.apply_chat_template(row["messages"], tools=[SCHEMA], tokenize=False)
    assert tokenizer.decode(example.tokens) == wanted.rstrip()
    assert "search the web" in wanted


@pytest.mark.parametrize(
    ("tools", "fault"),
    [
        ("not JSON", "`tools` must be a list of function schemas"),
        ([{"type": "function"}], "`tools` must be a list of function schemas"),
        (7, "`tools` must be a list of function schemas"),
        ([SCHEMA], "leaves out the tool `search`"),
    ],
)
def test_tools_that_cannot_be_rendered_are_refused(tools: Any, fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        trained("gemma", [USER, SUNNY], tools=tools)


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("sft", {"messages": [USER, SUNNY]}),
        ("sft", {"prompt": [USER], "completion": "Sunny."}),
        ("dpo", {"prompt": [USER], "chosen": "Sunny.", "rejected": "Rainy."}),
        ("dpo", {"chosen": [USER, SUNNY], "rejected": [USER, RAINY]}),
        ("sft", {"messages": [{"role": "system", "content": "Be short."}, USER, SUNNY]}),
    ],
)
def test_column_system_is_the_first_message(kind: str, row: dict[str, Any]) -> None:
    tokenizer = tokenizer_of("kimi_k2")
    first = encode({**row, "system": "Be short."}, tokenizer=tokenizer, kind=kind)[0]
    messages = [{"role": "system", "content": "Be short."}, USER, SUNNY]
    wanted = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(first.tokens) == wanted.rstrip()


def test_two_different_system_messages_are_refused() -> None:
    messages = [{"role": "system", "content": "Be long."}, USER, SUNNY]
    with pytest.raises(UserError, match="the column `system` differs from the first message"):
        trained("kimi_k2", messages, system="Be short.")


def test_answer_with_weight_zero_is_not_trained() -> None:
    messages = [USER, {**SUNNY, "weight": 0}, AGAIN, {**RAINY, "weight": 1}]
    assert trained("kimi_k2", messages) == ["Rainy.<|im_end|>"]
    messages = [USER, {**SUNNY, "weight": 1}, AGAIN, {**RAINY, "weight": 0}]
    assert trained("kimi_k2", messages) == ["Sunny.<|im_end|>"]
    with pytest.raises(UserError, match="no message of the assistant to learn from"):
        trained("kimi_k2", [USER, {**SUNNY, "weight": 0}])
    with pytest.raises(UserError, match="`weight` of message 2 must be 0 or 1"):
        trained("kimi_k2", [USER, {**SUNNY, "weight": 0.5}])


def test_completion_continues_the_answer_that_the_prompt_begins() -> None:
    tokenizer = tokenizer_of("kimi_k2")
    prompt = [USER, {"role": "assistant", "content": "It is "}]
    (example,) = encode({"prompt": prompt, "completion": "sunny."}, tokenizer=tokenizer)
    answer = example.tokens[example.kinds == ASSISTANT]
    assert tokenizer.decode(answer) == "sunny.<|im_end|>"
    whole = [USER, {"role": "assistant", "content": "It is sunny."}]
    wanted = tokenizer.apply_chat_template(whole, tokenize=False)
    assert tokenizer.decode(example.tokens) == wanted.rstrip()


def test_marker_that_the_tokenizer_splits_is_refused() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("kimi_k2"))
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|turn_end|>")
    with pytest.raises(
        UserError, match=r"ends a turn with <\|turn_end\|>, but the tokenizer split"
    ):
        encode({"messages": [USER, SUNNY]}, tokenizer=tokenizer)


def test_last_turn_is_the_last_one_with_a_weight() -> None:
    tokenizer = tokenizer_of("kimi_k2")
    messages = [USER, SUNNY, AGAIN, {**RAINY, "weight": 0}]
    (example,) = encode({"messages": messages}, tokenizer=tokenizer, turns="last")
    assert tokenizer.decode(example.tokens[example.kinds == ASSISTANT]) == "Sunny.<|im_end|>"


# ------------------------------------------------------------ names that nothing reads


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_columns_and_keys_that_nothing_reads_are_named(tmp_path: Path, write: Any) -> None:
    rows = [
        {"id": 3, "messages": [{**USER, "name": "Ann", "language": "en"}, SUNNY], "score": 0.5},
        {"id": 4, "messages": [USER, {**SUNNY, "reasoning": None}], "score": None},
    ]
    model = make_model(tmp_path / "model", "kimi_k2")
    config = settings(dataset=DatasetConfig(train=write(tmp_path, rows)), model=model)
    checked = check_examples(config, {})
    assert checked.unread == "columns id, score; keys of messages language, name"
    mapped = replace(config.dataset, columns={"messages": "messages", "reward": "score"})
    assert check_examples(replace(config, dataset=mapped), {}).unread.startswith("columns id; ")


def test_rows_of_texts_do_not_read_tools_and_system(tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": "b", "system": "Be short.", "tools": [SCHEMA]}
    model = make_model(tmp_path / "model", "kimi_k2")
    config = settings(dataset=DatasetConfig(train=jsonl(tmp_path, [row])), model=model)
    assert check_examples(config, {}).unread == "columns system, tools"


def make_model(folder: Path, name: str) -> str:
    """Save a tokenizer as a model's folder, and return it."""
    tokenizer_of(name).save_pretrained(folder)
    return str(folder)


def settings(*, dataset: DatasetConfig, model: str) -> ExperimentConfig:
    return replace(sft_settings(), dataset=dataset, model=ModelConfig(path=model))
