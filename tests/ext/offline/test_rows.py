"""Rows have the tokens that an agent would send and sample; errors name the row."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arealite.api.episode import EpisodeRecord
from arealite.api.experiment_config import DatasetConfig, ExperimentConfig
from arealite.api.llm import LLMResponse, SamplingConfig
from arealite.api.trainer import TrainerConfig
from arealite.api.trajectory import Segment, TrajectoryHeader
from arealite.base.errors import UserError
from arealite.base.trial_files import RunPaths
from arealite.ext.demo.tiny_model import make_tokenizer
from arealite.ext.offline import examples
from arealite.ext.offline import rows as chats
from arealite.ext.offline.config import OfflineConfig, SFTConfig
from arealite.impl.rollout.tree_maker import make_tree
from arealite.system.data import templates
from arealite.system.ledger.ledger import Ledger
from tests.models import tiny_tokenizer
from tests.payloads import encode_segments
from tests.system.data.test_dataset import jsonl, parquet

USER, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
AGAIN, SECOND = {"role": "user", "content": "+1?"}, {"role": "assistant", "content": "3"}
KINDS = {examples.CONTEXT: ".", examples.ASSISTANT: "A", examples.NEXT_STATE: "n"}
WRITERS = [jsonl, parquet]


def settings(kind: str = "sft", *, max_tokens: int = 4096, **sft: Any) -> ExperimentConfig:
    offline = OfflineConfig(max_tokens=max_tokens, batch_size=2)
    return ExperimentConfig(trainer=TrainerConfig(type=kind, offline=offline, sft=SFTConfig(**sft)))


def encode(row: dict[str, Any], *, tokenizer: Any = None, **config: Any) -> list[examples.Example]:
    made = examples.RowEncoder(settings(**config), tokenizer or make_tokenizer_with_chat()).encode
    return made(("rows.jsonl, line 7", row))


def make_tokenizer_with_chat() -> Any:
    """A template that concatenates contents and closes the assistant's with EOS."""
    return make_tokenizer("0123456789+?=")


def shown(example: examples.Example, tokenizer: Any) -> str:
    """Return each token as text with its kind."""
    texts = tokenizer.convert_ids_to_tokens(example.tokens.tolist())
    return " ".join(text + KINDS[kind] for text, kind in zip(texts, example.kinds, strict=True))


def test_equal_prompts_are_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tok = tiny_tokenizer()
    calls = []
    monkeypatch.setattr(
        type(tok), "__call__", lambda self, text: calls.append(text) or {"input_ids": [len(text)]}
    )
    first = templates.tokenize(tok, "abc")
    assert templates.tokenize(tok, "abc") is first
    assert templates.tokenize(tok, "abcd") == [4]
    assert calls == ["abc", "abcd"]
    assert templates.tokenize(tiny_tokenizer(), "abc") is not first
    long = "a" * 2 * templates.SHORT
    assert templates.tokenize(tok, long) is templates.tokenize(tok, long)
    sizes = [cache.cache_info().maxsize for cache in (templates._short, templates._long)]
    assert sizes == [16384, 2048]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "1+1=", "completion": "2"}, "1. +. 1. =. 2A <eos>A"),
        ({"prompt": [USER], "completion": "2"}, "1. +. 1. ?. 2A <eos>A"),
        ({"prompt": [USER], "completion": [ANSWER]}, "1. +. 1. ?. 2A <eos>A"),
        ({"messages": [USER, ANSWER]}, "1. +. 1. ?. 2A <eos>A"),
        (
            {"messages": [USER, ANSWER, AGAIN, SECOND]},
            "1. +. 1. ?. 2A <eos>A +n 1n ?n 3A <eos>A",
        ),
        (  # an observation after the last answer is a next state, too
            {"messages": [USER, ANSWER, AGAIN]},
            "1. +. 1. ?. 2A <eos>A +n 1n ?n",
        ),
        (  # answers of the prompt are context
            {"prompt": [USER, ANSWER, AGAIN], "completion": [SECOND]},
            "1. +. 1. ?. 2. <eos>. +. 1. ?. 3A <eos>A",
        ),
    ],
)
def test_rows_become_tokens_with_kinds(row: dict[str, Any], expected: str) -> None:
    tokenizer = make_tokenizer_with_chat()
    (example,) = encode(row, tokenizer=tokenizer)
    assert shown(example, tokenizer) == expected
    assert example.tokens.dtype == np.int32 and example.kinds.dtype == np.uint8


def test_turns_last_trains_only_the_last_answer() -> None:
    tokenizer = make_tokenizer_with_chat()
    row = {"messages": [USER, ANSWER, AGAIN, SECOND, USER]}
    (example,) = encode(row, tokenizer=tokenizer, turns="last")
    assert shown(example, tokenizer) == "1. +. 1. ?. 2. <eos>. +. 1. ?. 3A <eos>A"


def test_chat_row_has_the_tokens_of_agent_and_collector() -> None:
    tokenizer = make_tokenizer_with_chat()
    messages, record = [USER, ANSWER, AGAIN, SECOND], EpisodeRecord()
    for index in (1, 3):
        said = tokenizer(messages[index]["content"])["input_ids"] + [tokenizer.eos_token_id]
        count = len(said)
        response = LLMResponse(
            output_ids=said, logprobs=[-1.0] * count, versions=[0] * count, stop_reason="stop"
        )
        turn = record.begin(templates.tokenize(tokenizer, messages[:index]), SamplingConfig())
        record.add(turn, response)
    (segment,) = make_tree(record.turns).segments()
    (example,) = encode({"messages": messages}, tokenizer=tokenizer)
    assert segment.tokens == example.tokens.tobytes()
    assert segment.loss_mask == (example.kinds == examples.ASSISTANT).astype(np.uint8).tobytes()


def test_template_that_does_not_extend_its_prefix_is_refused() -> None:
    tokenizer = tiny_tokenizer()  # "role: content\n": no EOS after an answer
    messages = [USER, ANSWER, AGAIN, SECOND]
    with pytest.raises(UserError) as caught:
        encode({"messages": messages}, tokenizer=tokenizer)
    told = str(caught.value)
    assert told.startswith("rows.jsonl, line 7: from token ")
    assert "before message 4" in told and "trainer.sft.turns=last" in told
    (example,) = encode({"messages": messages}, tokenizer=tokenizer, turns="last")
    assert tokenizer.decode(example.tokens).endswith("user: +1?\nassistant: 3<eos>")


PAIRS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
    {"prompt": [USER], "chosen": [ANSWER], "rejected": [SECOND]},
    {"prompt": [USER], "chosen": "2", "rejected": "3"},
    {"chosen": [USER, ANSWER], "rejected": [USER, SECOND]},
]


@pytest.mark.parametrize("kind", ["dpo", "reward"])
@pytest.mark.parametrize("row", PAIRS)
def test_preference_rows_become_pairs(kind: str, row: dict[str, Any]) -> None:
    tokenizer = make_tokenizer_with_chat()
    chosen, rejected = (shown(example, tokenizer) for example in encode(row, kind=kind))
    asked = "1. +. 1. =." if row.get("prompt") == "1+1=" else "1. +. 1. ?."
    assert (chosen, rejected) == (f"{asked} 2A <eos>A", f"{asked} 3A <eos>A")


def test_long_row_is_truncated_at_its_end() -> None:
    (example,) = encode({"prompt": "1+1=", "completion": "2"}, max_tokens=5)
    assert example.tokens.shape == example.kinds.shape == (5,)
    assert example.kinds.tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("write", WRITERS)
def test_collected_columns_are_read(tmp_path: Path, write: Any) -> None:
    rows = [
        {"tokens": [3, 4, 5, 6, 7], "loss_mask": [0, 1, 1, 0, 1], "reward": 1.0, "more": "x"},
        {"tokens": [3, 4], "loss_mask": [False, True], "reward": 0.25},
        {"tokens": [3, 5], "loss_mask": [False, True], "reward": None},
    ]
    if write is parquet:
        rows[0]["loss_mask"] = [False, True, True, False, True]
    path = write(tmp_path, rows)
    loaded = chats.load_rows(path, "train")
    made = examples.RowEncoder(settings(), tiny_tokenizer()).encode
    (first,), (second,), _ = map(made, loaded)
    assert first.tokens.tolist() == [3, 4, 5, 6, 7]
    assert "".join(KINDS[kind] for kind in first.kinds) == ".AAnA"
    assert second.kinds.tolist() == [0, 1]
    # Rows whose reward is not known are kept.
    kept = chats.load_rows(path, "train", min_reward=0.5)
    assert [row["tokens"] for _, row in kept] == [[3, 4, 5, 6, 7], [3, 5]]
    with pytest.raises(UserError, match=r"none of its 2 rows has a reward of at least .*=2\.0"):
        chats.load_rows(write(tmp_path, rows[:2]), "train", min_reward=2.0)
    bad = write(tmp_path, [{"tokens": [3], "loss_mask": [True], "reward": "much"}])
    with pytest.raises(UserError, match="`reward` must be a number"):
        chats.load_rows(bad, "train", min_reward=2.0)


def collected(folder: Path) -> Path:
    """Write a run folder whose ledger has two trajectories, the second with two segments."""
    paths = RunPaths(folder)
    ledger = Ledger(paths.ledger, fingerprint={})
    for member, reward, lengths in ((0, 1.0, [4]), (1, 0.0, [3, 5])):
        segments = []
        for length in lengths:
            mask = bytes([0, 1] + [0] * (length - 3) + [1])
            tokens = np.arange(10 * member, 10 * member + length, dtype="<i4").tobytes()
            blank = bytes(4 * length)
            rewards = np.zeros(length, "<f4")
            rewards[-1] = 0.0 if segments else reward
            segments.append(
                Segment(
                    tokens=tokens,
                    loss_mask=mask,
                    logprobs=blank,
                    versions=blank,
                    rewards=rewards.tobytes(),
                    temperature=0.7,
                )
            )
        header = TrajectoryHeader(
            trajectory_id=f"g/{member}/agent",
            group_id="g",
            member=member,
            seat="agent",
            task_id="t",
            reward=reward,
            reward_parts={},
            segment_lengths=lengths,
            trained_tokens=2 * len(lengths),
            oldest_version=0,
            newest_version=0,
            turns=1,
            truncated=False,
            interruptions=0,
            seconds=0.1,
            waits={},
        )
        ledger.add_trajectory(header, encode_segments(segments))
    ledger.commit()
    ledger.close()
    return folder


def test_changed_payload_of_a_run_folder_is_refused(tmp_path: Path) -> None:
    run = collected(tmp_path / "run")
    with closing(sqlite3.connect(RunPaths(run).ledger)) as db, db:
        db.execute("UPDATE trajectories SET payload = X'c1' WHERE member = 1")
    with pytest.raises(UserError, match=r"g/1/agent: its payload differs .*arealite audit"):
        chats.load_rows(str(run), "train")


def test_run_folder_is_read_as_a_dataset(tmp_path: Path) -> None:
    run = collected(tmp_path / "run")
    rows = chats.load_rows(str(run), "train")
    assert rows == chats.load_rows(str(RunPaths(run).ledger), "train")
    made = examples.RowEncoder(settings(), tiny_tokenizer()).encode
    encoded = [made(row)[0] for row in rows]
    assert [example.tokens.tolist() for example in encoded] == [
        [0, 1, 2, 3],
        [10, 11, 12],
        [10, 11, 12, 13, 14],
    ]
    assert ["".join(KINDS[k] for k in each.kinds) for each in encoded] == [".AnA", ".AA", ".AnnA"]
    (good,) = chats.load_rows(str(run), "train", min_reward=0.5)
    assert good[0].endswith("ledger.sqlite, g/0/agent")
    with pytest.raises(UserError, match="no ledger at"):
        chats.load_rows(str(tmp_path), "train")


NONSENSE: list[tuple[str, dict[str, Any], str]] = [
    ("sft", {}, "a row needs the columns `messages`"),
    ("sft", {"question": "1", "answer": "2"}, "it has question, answer"),
    ("sft", {"prompt": "1", "completion": None}, "it has prompt"),
    ("sft", {"prompt": "1", "completion": ""}, "`completion` must be a text"),
    ("sft", {"prompt": 1, "completion": "2"}, "`prompt` must be a text"),
    ("sft", {"prompt": "1", "completion": [ANSWER]}, "must both be texts, or both messages"),
    ("sft", {"messages": "hello"}, "`messages` must be a list of"),
    ("sft", {"messages": []}, "`messages` must be"),
    ("sft", {"messages": [{"role": "assistant", "content": None}]}, "`messages` must be"),
    ("sft", {"messages": [USER]}, "no message of the assistant"),
    ("sft", {"prompt": [USER], "completion": [AGAIN]}, "no message of the assistant"),
    ("sft", {"tokens": [1, 2]}, "as many 0 and 1"),
    ("sft", {"tokens": [1, 2], "loss_mask": [1]}, "as many 0 and 1"),
    ("sft", {"tokens": ["a"], "loss_mask": [1]}, "`tokens` must be token ids"),
    ("sft", {"tokens": [0.5, 1.5], "loss_mask": [0, 1]}, "`tokens` must be token ids"),
    ("sft", {"tokens": [], "loss_mask": []}, "`tokens` must be token ids"),
    ("dpo", {"prompt": "1", "chosen": "2"}, "needs the columns `chosen` and `rejected`"),
    ("dpo", {"prompt": "1", "chosen": "2", "rejected": None}, "it has prompt, chosen"),
    ("dpo", {"prompt": "1", "chosen": "2", "rejected": "2"}, "are equal"),
    ("dpo", {"chosen": "2", "rejected": "3"}, "must both be texts"),
    ("dpo", {"prompt": "1", "chosen": "2", "rejected": 3}, "`rejected` must be a text"),
    ("reward", {"messages": [USER, ANSWER]}, "needs the columns `chosen`"),
    ("reward", {"chosen": [USER, ANSWER], "rejected": "3"}, "both"),
]


@pytest.mark.parametrize(("kind", "row", "says"), NONSENSE)
def test_invalid_row_is_refused_with_its_place(kind: str, row: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        encode(row, kind=kind)
    told = str(caught.value)
    assert told.startswith("rows.jsonl, line 7: ") and says in told, told
    assert "\n" not in told


def test_chat_without_a_template_is_refused_with_its_row() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"line 7: .*no chat template"):
        encode({"messages": [USER, ANSWER]}, tokenizer=tokenizer)
    tokenizer.chat_template = "{{ raise_exception('only users speak') }}"
    with pytest.raises(UserError, match=r"line 7: .*only users speak"):
        encode({"messages": [USER, ANSWER]}, tokenizer=tokenizer)


def test_identity_changes_with_the_rows_of_a_step(tmp_path: Path) -> None:
    config = settings()
    run = chats.load_rows(str(collected(tmp_path / "run")), "train")
    file = chats.load_rows(jsonl(tmp_path, [{"prompt": "1", "completion": "2"}] * 3), "train")
    assert json.dumps(chats.identity_of_rows(config, run))
    found = [
        chats.identity_of_rows(config, run),
        chats.identity_of_rows(config, run[1:]),
        chats.identity_of_rows(config, file),
        chats.identity_of_rows(replace(config, seed=5), file),
        chats.identity_of_rows(replace(config, dataset=DatasetConfig(shuffle=False)), file),
        chats.identity_of_rows(settings("dpo"), file),
    ]
    assert len({json.dumps(each) for each in found}) == len(found)
    assert chats.identity_of_rows(config, list(run)) == found[0]


CALLING = """{% for m in messages %}<{{ m.role }}>{{ m.content or "" }}{% for c in m.tool_calls %}\
[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}\
{% if m.role == "assistant" %}<eos>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}"""


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}


def tool_tokenizer() -> Any:
    tokenizer = make_tokenizer('0123456789+?=<>[]{}": abcdefghijklmnopqrstuvwxyz')
    tokenizer.chat_template = CALLING.replace("\\\n", "")
    return tokenizer


TALK = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}')]},
    {"role": "tool", "content": "2"},
    ANSWER,
]
RENDERED = '<user>1+1?<assistant>[add {"a": 1}]<eos><tool>2<assistant>'


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}, {"a": 1, "b": None}])
def test_tool_calls_are_rendered_by_the_template(arguments: Any) -> None:
    tokenizer = tool_tokenizer()
    messages = [TALK[0], {**TALK[1], "tool_calls": [call(arguments)]}, TALK[2]]
    assert templates.render(tokenizer, messages) == RENDERED
    assert tokenizer.decode(templates.tokenize(tokenizer, messages)) == RENDERED


def test_tool_calls_of_parquet_have_no_null_values(tmp_path: Path) -> None:
    ((_, row),) = chats.load_rows(parquet(tmp_path, [{"messages": TALK}]), "train")
    assert row["messages"][0] == {**USER, "tool_calls": None}
    assert templates.render(tool_tokenizer(), row["messages"][:3]) == RENDERED


def test_answer_with_tool_calls_is_trained_as_the_template_renders_it() -> None:
    tokenizer = tool_tokenizer()
    (example,) = encode({"messages": TALK}, tokenizer=tokenizer)
    trained = tokenizer.decode(example.tokens[example.kinds == examples.ASSISTANT])
    assert trained == '[add {"a": 1}]<eos>2<eos>'
    assert tokenizer.decode(example.tokens) == RENDERED + "2<eos>"


def test_template_without_tool_calls_is_refused() -> None:
    with pytest.raises(
        UserError, match="line 7: the model's chat template renders no `tool_calls`"
    ):
        encode({"messages": TALK})


@pytest.mark.parametrize(
    "message", [{"role": "assistant", "content": None}, {**TALK[1], "tool_calls": []}]
)
def test_message_without_content_and_tool_calls_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="`messages` must be"):
        encode({"messages": [USER, message]})
