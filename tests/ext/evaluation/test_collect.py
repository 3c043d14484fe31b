"""`arealite collect` writes filtered rows of exact tokens that sft can read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from arealite.api.agent import load_tokenizer
from arealite.api.experiment_config import ExperimentConfig
from arealite.base.errors import UserError
from arealite.ext.offline.config import SFTConfig
from arealite.ext.offline.examples import NEXT_STATE, RowEncoder
from arealite.ext.offline.rows import load_rows
from tests.ext.evaluation.sampled import Answering, Command, no_servers


@pytest.fixture
def collect(tmp_path: Path, monkeypatch, capsys) -> Command:
    no_servers(monkeypatch)
    command = Command(tmp_path, "collect", capsys)
    chat = [{"role": "user", "content": "ok"}]
    command.write({"prompt": "ok", "ground_truth": "1"}, {"prompt": chat})
    return command


def written(command: Command, name: str = "out.jsonl") -> list[dict]:
    return [json.loads(line) for line in (command.folder / name).read_text().splitlines()]


def out(command: Command, name: str = "out.jsonl") -> str:
    return f"out={command.folder / name}"


def test_rows_equal_the_sampled_trajectories(collect: Command) -> None:
    assert collect("n=2", out(collect)) == 0, collect.out
    first, *_, last = rows = written(collect)
    assert len(rows) == 4
    assert "4 rows of 4 trajectories" in collect.out
    prompt = Answering.asked[0].input_ids
    assert first["tokens"] == [*prompt, 13]
    assert first["loss_mask"] == [False] * len(prompt) + [True]
    assert first["logprobs"] == [0.0] * len(prompt) + [-0.5]
    assert first["versions"] == [-1] * len(prompt) + [5]
    assert (first["reward"], first["reward_parts"], first["turns"]) == (
        1.0,
        {"length": 1.0, "rare": 0.5},
        1,
    )
    assert (first["task_id"], first["sample"], first["seat"]) == ("train-0", 0, "agent")
    assert (first["prompt"], first["messages"], first["ground_truth"]) == ("ok", None, "1")
    assert (last["prompt"], last["messages"]) == (None, [{"role": "user", "content": "ok"}])
    tokenizer = load_tokenizer(str(collect.model))
    assert last["text"] == tokenizer.decode([13, 13])
    assert Answering.asked[0].sampling.temperature == 1.0, "as training samples"


def test_parquet_has_the_same_rows_and_sft_trains_on_both(collect: Command) -> None:
    assert collect("n=2", out(collect)) == 0
    asked = len(Answering.asked)
    assert collect("n=2", out(collect, "out.parquet")) == 0
    assert len(Answering.asked) == asked, "nothing is sampled again"
    read = pq.read_table(collect.folder / "out.parquet").to_pylist()
    for row in read:
        row["reward_parts"] = dict(row["reward_parts"])
    assert read == written(collect)
    config = ExperimentConfig()
    config = replace(config, trainer=replace(config.trainer, type="sft"))
    encode = RowEncoder(config, load_tokenizer(str(collect.model))).encode
    for name in ("out.jsonl", "out.parquet"):
        rows = load_rows(str(collect.folder / name), "train", min_reward=2.0)
        examples = [example for row in rows for example in encode(row)]
        assert [example.tokens.tolist() for example in examples] == [
            row["tokens"] for row in read if row["reward"] >= 2.0
        ]


@pytest.mark.parametrize(
    ("words", "rewards"),
    [
        (["min_reward=2"], [2.0, 3.0, 2.0, 3.0]),
        (["max_reward=1"], [1.0, 1.0]),
        (["best_of=1"], [3.0, 3.0]),
        (["best_of=2", "max_reward=2"], [1.0, 2.0, 1.0, 2.0]),
        (["min_reward=9"], []),
    ],
)
def test_reward_filters_and_best_of_select_rows(
    collect: Command, words: list[str], rewards: list[float]
) -> None:
    assert collect("n=3", out(collect), *words) == (0 if rewards else 1)
    assert [row["reward"] for row in written(collect)] == rewards


@pytest.mark.parametrize(
    ("words", "rewards"),
    [([], [None, 2.0, None]), (["best_of=2"], [None, 2.0]), (["max_reward=9"], [2.0])],
)
def test_trajectory_without_a_score_is_within_no_bound_and_comes_last(
    collect: Command, words: list[str], rewards: list[float | None]
) -> None:
    collect.write({"prompt": "unscored"})
    assert collect("n=3", out(collect), *words) == 0, collect.out
    assert [row["reward"] for row in written(collect)] == rewards


def test_best_of_applies_to_each_seat(collect: Command) -> None:
    assert collect("n=2", "best_of=1", "tasks=1", out(collect), env="duel") == 0
    assert [(row["seat"], row["sample"]) for row in written(collect)] == [
        *(("first", 0), ("first", 0)),  # one segment per turn: this agent keeps no history
        *(("second", 0), ("second", 0)),
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "out is not set"),
        (["out=x.csv"], "Unknown suffix '.csv'"),
        (["out=/nowhere/x.jsonl"], "its parent folder does not exist"),
        (["out=x.jsonl", "dataset.train=''"], "dataset.train is not set"),
    ],
)
def test_invalid_arguments_are_refused(collect: Command, words: list[str], says: str) -> None:
    assert collect(*words) == 2
    assert says in collect.out
    assert not Answering.asked


PLAIN = "trainer.ppo.collector.agent.math_code_single_step.use_chat_template=false"
"""The model's template would stand between an answer and the next observation."""


def examples(collect: Command, **sft: float) -> list[tuple[list[int], list[int]]]:
    """Return tokens and next-state tokens of each collected row, as sft encodes it."""
    config = ExperimentConfig()
    trainer = replace(config.trainer, type="sft", sft=SFTConfig(**sft))
    tokenizer = load_tokenizer(str(collect.model))
    encode = RowEncoder(replace(config, trainer=trainer), tokenizer).encode
    made = [encode(row)[0] for row in load_rows(str(collect.folder / "out.jsonl"), "train")]
    return [(e.tokens.tolist(), e.tokens[e.kinds == NEXT_STATE].tolist()) for e in made]


def test_row_has_the_next_observation_and_sft_trains_exactly_its_tokens(collect: Command) -> None:
    collect.write({"prompt": "reverse abc\necho def\necho ghi"})
    assert collect("n=1", PLAIN, out(collect), env="reverse_echo") == 0, collect.out
    rows = written(collect)
    prompts = [request.input_ids for request in Answering.asked]
    assert len(rows) == 3, "this agent keeps no history: each turn is a segment"
    texts = [row["next_state"] for row in rows]
    assert texts == [f"Repeat this, and nothing else: {text}" for text in ("def", "ghi")] + [None]
    for (tokens, states), row, following in zip(
        examples(collect, assistant_weight=0.0, next_state_weight=1.0),
        rows,
        [*prompts[1:], []],
        strict=True,
    ):
        assert states == following, "the tokens that the agent saw next, and no others"
        assert tokens == row["tokens"] + following
    policy = [tokens for tokens, _ in examples(collect)]
    assert policy == [row["tokens"] for row in rows], "without a weight, rows are as sampled"


def test_observation_inside_a_segment_is_trained_without_the_column(collect: Command) -> None:
    collect.write({"prompt": "ok"})
    assert collect("n=1", PLAIN, out(collect), env="counter") == 0, collect.out
    (row,) = written(collect)
    assert row["next_state"] is None, "no turn follows the last one"
    ((tokens, states),) = examples(collect, next_state_weight=1.0)
    assert tokens == row["tokens"]
    decode = load_tokenizer(str(collect.model)).decode
    assert decode(states) == "!!", "what the environment added after the first two answers"


def test_last_observation_of_an_agent_that_stops_is_the_next_state(collect: Command) -> None:
    collect.write({"prompt": "reverse abc\necho def\necho ghi"})
    words = [
        "trainer.ppo.collector.agent.type=chat",
        "trainer.ppo.collector.agent.chat.max_turns=2",
    ]
    assert collect("n=1", "tasks=1", out(collect), *words, env="reverse_echo") == 0, collect.out
    row = written(collect)[-1]
    assert row["turns"] == 2
    assert row["next_state"] == "Repeat this, and nothing else: ghi"


@pytest.mark.parametrize("state", [5, ["a"]])
def test_next_state_that_is_no_text_is_refused(collect: Command, state: object) -> None:
    row = {"tokens": [3, 4], "loss_mask": [0, 1], "next_state": state}
    (collect.folder / "out.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match="line 1: `next_state` must be a text, or null"):
        examples(collect, next_state_weight=1.0)
    assert examples(collect) == [([3, 4], [])]
