"""Content of a report: exact tokens and their values, shares of time, the ledger's balance."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from arealite.base.errors import UserError
from arealite.base.trial_files import RunPaths
from arealite.cli import main as cli
from arealite.ext.step_metrics import token_stats_store as token_stats
from arealite.ext.step_metrics.token_stats_store import TokenStats
from arealite.ext.view import report_rows, report_run
from arealite.ext.view.report import write_report
from arealite.ext.view.report_text import ALPHABET, Vocabulary
from arealite.system.ledger.ledger import connect
from tests.ext.view.runs import (
    add_failure,
    add_token_stats,
    make_run,
    make_tokenizer,
    many,
    metrics,
    page_data,
)
from tests.impl.trainer.trajectories import header, segment

CUP = "☕".encode()


def unpack(planes: bytes, kind: np.dtype) -> np.ndarray:
    """Return the values of a block of byte planes."""
    bytes_ = np.frombuffer(planes, np.uint8).reshape(kind.itemsize, -1).T
    return np.ascontiguousarray(bytes_).view(kind)[:, 0]


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """Two trained groups at step 3, one of them of two segments, and a filtered one."""
    ids = make_tokenizer(
        tmp_path / "run/model", ["a", "b", CUP[:1], CUP[1:2], CUP[2:], "</script>"]
    )
    one = [
        segment([ids["a"], *range(2, 5)], sampled=3, version=[1, 1, 3], logprob=-0.5, reward=1.5)
    ]
    two = [
        segment([0, 1], sampled=1, version=2),
        segment([0, 1, 5], sampled=1, version=3, reward=-1.0),
    ]
    made = [
        (3, header("g0/0/agent", one, reward=1.5, reward_parts={"right": 1.0, "form": 0.5}), one),
        (3, header("g1/0/agent", two, reward=-1.0, source="game"), two),
        (None, header("g2/0/agent", two, reward=0.0), two),
    ]
    paths = make_run(tmp_path / "run", made, lines=metrics(4))
    stats = TokenStats(
        trajectory_ids=["g0/0/agent", "g1/0/agent"],
        counts=[3, 2],
        advantages=np.array([0.25, 0.25, np.nan, -1.0, -2.0], "<f2").tobytes(),
        differences=np.array([0.0, 1e-4, 0.5, 0, 0], "<f2").tobytes(),
    )
    token_stats.write(paths.token_stats, 3, 0, stats)
    return paths


def test_report_has_a_row_for_each_trajectory(paths: RunPaths) -> None:
    assert write_report(paths, paths.report, most=100) == {
        "shown": 3, "trajectories": 3, "bytes": paths.report.stat().st_size,
    }  # fmt: skip
    table = json.loads(page_data(paths.report)["about"])["table"]
    assert table["group_id"] == ["g0", "g1", "g2"]
    assert table["state"] == ["trained", "trained", "filtered"]
    assert table["reason"] == [None, None, "zero_variance"]
    assert table["step"] == [4, 4, None]
    assert table["source"] == ["", "game", ""]
    assert table["reward"] == [1.5, -1.0, 0.0]
    assert table["reward_parts"] == [{"right": 1.0, "form": 0.5}, {"exact": -1.0}, {"exact": 0.0}]
    assert table["oldest_version"] == [1, 2, 2]
    assert table["segment_lengths"] == [[4], [2, 3], [2, 3]]
    assert table["num_tokens"] == [4, 5, 5]
    assert table["chunks"] == [3]


def test_report_has_all_values_of_each_token(paths: RunPaths) -> None:
    write_report(paths, paths.report, most=100)
    blocks = page_data(paths.report)
    ids = unpack(blocks["t0"], np.dtype("<u4"))
    assert ids.tolist() == [0, 2, 3, 4, 0, 1, 0, 1, 5, 0, 1, 0, 1, 5]
    end = json.loads(blocks["end"])
    pieces = dict(zip(end["vocabulary"]["ids"], end["vocabulary"]["pieces"], strict=True))
    text = b"".join(pieces[token].encode("latin-1") for token in ids.tolist())
    assert text.decode() == "a☕abab</script>abab</script>"
    known = unpack(blocks["x0"], report_rows.TOKEN)
    assert known["mask"].tolist() == [0, 1, 1, 1, 0, 1, 0, 0, 1, 0, 1, 0, 0, 1]
    sampled = known[known["mask"] == 1]
    assert sampled["age"].tolist() == [0, 0, 2, 0, 1, 0, 1]
    logprobs, advantages, differences = (
        sampled[name] for name in ("logprob", "advantage", "difference")
    )
    np.testing.assert_array_equal(logprobs, np.array([-0.5] * 3 + [-1.0] * 4, "<f2"))
    np.testing.assert_array_equal(
        advantages, np.array([0.25, 0.25, np.nan, -1.0, -2.0, np.nan, np.nan], "<f2")
    )
    np.testing.assert_array_equal(
        differences, np.array([0.0, 1e-4, 0.5, 0.0, 0.0, np.nan, np.nan], "<f2")
    )
    rewards = {at: reward for at, reward in enumerate(known["reward"].tolist()) if reward}
    assert rewards == {3: 1.5, 8: -1.0, 13: -1.0}


def test_file_contains_no_plain_text_of_a_trajectory(paths: RunPaths) -> None:
    write_report(paths, paths.report, most=100)
    text = paths.report.read_text()
    scripts = text.count("<script")
    assert text.count("</script>") == scripts == 6
    assert "script-src 'sha256-" in text
    assert "unsafe" not in text


def test_tokenizer_falls_back_to_the_export_and_then_to_ids(
    paths: RunPaths,
) -> None:
    (paths.root / "model").rename(paths.export)
    write_report(paths, paths.report, most=100)
    assert json.loads(page_data(paths.report)["end"])["vocabulary"]["ids"] == [0, 1, 2, 3, 4, 5]
    (paths.export / "tokenizer.json").write_text("{")
    write_report(paths, paths.report, most=100)
    vocabulary = json.loads(page_data(paths.report)["end"])["vocabulary"]
    assert vocabulary["pieces"] == [f"{token} " for token in vocabulary["ids"]]
    assert vocabulary["special"] == []


def test_unreadable_payload_is_blank_and_counted(paths: RunPaths) -> None:
    db = connect(paths.ledger)
    db.execute("UPDATE trajectories SET payload = x'00' WHERE group_id = 'g0'")
    db.close()
    write_report(paths, paths.report, most=100)
    blocks = page_data(paths.report)
    assert json.loads(blocks["end"])["unreadable"] == 1
    ids = unpack(blocks["t0"], np.dtype("<u4"))
    assert ids[:9].tolist() == [0, 0, 0, 0, 0, 1, 0, 1, 5]


@pytest.mark.parametrize("most", [0, 1, 50, 333, 400, 10_000])
def test_complete_groups_are_chosen_evenly_over_the_steps(tmp_path: Path, most: int) -> None:
    drawn = many(400, tokens=4, words=9, group_size=4, groups=10)
    paths = make_run(tmp_path / "run", drawn)
    rows, total = report_rows.choose(paths.ledger, most)
    assert total == 400
    groups = list(dict.fromkeys(row.group for row in rows))
    assert len(rows) == 4 * len(groups) <= most
    assert len(groups) >= min(100, most // 4) - 1
    steps = [sum(group.step == step for group in groups) for step in range(10)]
    assert max(steps) - min(steps) <= 1


def test_table_and_tokens_have_the_same_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_rows, "CHUNK_TOKENS", 64)
    paths = make_run(tmp_path / "run", many(40, tokens=30, words=9))
    write_report(paths, paths.report, most=100)
    blocks = page_data(paths.report)
    table = json.loads(blocks["about"])["table"]
    assert sum(table["chunks"]) == 40
    assert len(table["chunks"]) > 5
    begin = 0
    for number, count in enumerate(table["chunks"]):
        assert len(blocks[f"t{number}"]) == 4 * sum(table["num_tokens"][begin : begin + count])
        begin += count
    assert f"t{len(table['chunks'])}" not in blocks


def test_parts_of_each_role_add_up_to_its_time() -> None:
    found = report_run.roles(metrics(11)[1:])
    assert found == {
        "trainer": pytest.approx({"update": 12.1, "batch wait": 7.7, "other": 2.2}),
        "episodes": pytest.approx(
            {"generation": 61.6, "environment": 13.2, "reward": 8.8, "rest": 4.4}
        ),
        "workers": pytest.approx({"full": 35.0, "lease wait": 5.0}),
        "datapipe": pytest.approx({
            "groups wait": 6.6, "slow wait": 1.1,
            "trainer works": 14.3,
        }),
        "servers": pytest.approx({"generate or idle": 20.9, "weights wait": 1.1}),
    }  # fmt: skip


def test_counter_of_a_restarted_worker_counts_nothing_twice() -> None:
    lines = metrics(4)[1:]
    lines[2]["rollout/lease_wait_s"] = 0.1
    workers = report_run.roles(lines)["workers"]
    assert workers == pytest.approx({"full": 10.1, "lease wait": 1.9})


def test_time_between_two_starts_of_a_run_is_not_counted() -> None:
    lines = metrics(4)[1:]
    before = report_run.roles(lines)
    for line in lines[2:]:
        line["time"] += 8 * 3600.0
    assert report_run.roles(lines) == before


def test_report_of_a_running_run_and_of_a_run_without_a_ledger(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.metrics.write_text('{"step": 1, "time": 1.0, "train/epoch": 0.1}\n{"step": 2, "ti')
    assert write_report(paths, paths.report, most=10)["shown"] == 0
    about = json.loads(page_data(paths.report)["about"])
    assert about["metrics"] == {"step": [1], "time": [1.0], "train/epoch": [0.1]}
    assert about["table"] is None
    assert about["ledger"] is None


def test_invalid_ledger_is_a_user_error(paths: RunPaths) -> None:
    paths.ledger.write_bytes(b"x" * 5000)
    with pytest.raises(UserError, match="cannot be read as a ledger"):
        write_report(paths, paths.report, most=100)
    assert not paths.report.exists()


def test_report_has_balance_and_failures(paths: RunPaths) -> None:
    add_failure(paths, "g2", "KeyError: x")
    about = report_run.describe(paths)
    assert about["descriptions"]["reward/mean"].startswith("rewards of the batch's trajectories")
    ledger = about["ledger"]
    assert ledger["groups"] == {
        "offered": 3,
        "trained": 2,
        "filtered": 1,
        "buffered": 0,
        "in_flight": 0,
    }
    assert ledger["filtered_by_reason"] == {"zero_variance": 1}
    assert ledger["examples"] == {"crash": "KeyError: x"}
    younger = [0, 1, 2, 2, 2, 2, 2]  # one trajectory of age 1, one of age 2
    assert ledger["ages"] == [(4,), *((count,) for count in younger), (2,)]


def test_configs_have_the_first_step_they_applied_to(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.config.write_text("lr: 3")
    assert report_run.read_configs(paths) == [{"step": 1, "text": "lr: 3"}]
    paths.configs.mkdir()
    for name, text in (("000000", "lr: 1"), ("000002", "lr: 1"), ("000003", "lr: 2")):
        (paths.configs / f"{name}.yaml").write_text(text)
    assert report_run.read_configs(paths) == [
        {"step": 1, "text": "lr: 1"}, {"step": 4, "text": "lr: 2"},
    ]  # fmt: skip


def test_long_run_has_fewer_points_and_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_run, "POINTS", 4)
    paths = make_run(tmp_path / "run", [], lines=metrics(11))
    about = report_run.describe(paths)
    assert about["stride"] == 3
    assert about["metrics"]["step"] == [0, 1, 4, 7, 10, 11]
    assert about["metrics"]["eval/reward"] == [0.25, *[None] * 5]


def test_tokens_of_other_tokenizers_are_decoded(tmp_path: Path) -> None:
    tokenizer = Tokenizer(BPE({"▁the": 0, "cat": 1, "<0xE2>": 2, "<0x98>": 3, "<0x95>": 4}, []))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)  # type: ignore[assignment]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary.find([tmp_path])
    assert vocabulary
    ids = [0, 1, 2, 3, 4]
    assert b"".join(map(vocabulary.piece, ids)).decode() == " thecat☕" == tokenizer.decode(ids)
    assert vocabulary.piece(7) == "⟨7⟩".encode()


def test_byte_level_alphabet_matches_the_tokenizer() -> None:
    assert len(ALPHABET) == 256 == len(set(ALPHABET.values()))
    text = "".join(ALPHABET)
    joined = decoders.ByteLevel().decode(
        [character for character in text if ALPHABET[character] < 128]
    )
    assert sorted(joined) == [chr(byte) for byte in range(128)]


def test_report_command(
    paths: RunPaths, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["report", str(paths.root), "--trajectories", "1"]) == 0
    said = capsys.readouterr().out
    assert f"{paths.report}: 1 trajectories (2 left out), " in said
    assert not list(paths.root.glob(".report*"))
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "is no run" in capsys.readouterr().err
    for out in (tmp_path / "none/x.html", paths.config / "x.html", Path()):
        assert cli.main(["report", str(paths.root), "--out", str(out)]) == 2
        assert "--out" in capsys.readouterr().err


def test_report_imports_neither_torch_nor_transformers(paths: RunPaths) -> None:
    code = (
        "import sys; from arealite.cli.main import main; "
        f"assert main(['report', {str(paths.root)!r}]) == 0; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_token_stats_of_a_large_run_are_found_by_step(tmp_path: Path) -> None:
    drawn = list(many(16, tokens=8, words=9, group_size=2, groups=4))
    paths = make_run(tmp_path / "run", drawn)
    add_token_stats(paths, drawn)
    write_report(paths, paths.report, most=16)
    known = unpack(page_data(paths.report)["x0"], report_rows.TOKEN)
    advantages = known["advantage"][known["mask"] == 1]
    assert len(advantages) == sum(h.trained_tokens for _, h, _ in drawn)
    assert np.isfinite(advantages).all()
    assert len(set(advantages.tolist())) == 16


def test_report_names_dropped_payloads(paths: RunPaths) -> None:
    db = connect(paths.ledger)
    db.execute("UPDATE trajectories SET payload = NULL WHERE group_id = 'g0'")
    db.execute("INSERT INTO meta VALUES ('dropped', '4')")
    db.close()
    write_report(paths, paths.report, most=100)
    blocks = page_data(paths.report)
    note = "payloads of steps 1 to 4 were dropped (datapipe.keep_payloads)"
    assert json.loads(blocks["about"])["ledger"]["notes"] == [note]
    assert json.loads(blocks["end"])["unreadable"] == 0, "they are no damage"


def test_metric_that_a_step_lacks_is_a_gap(tmp_path: Path) -> None:
    lines = metrics(3)
    del lines[2]["reward/mean"], lines[2]["update/grad_norm"]
    paths = make_run(tmp_path / "run", [], lines=lines)
    drawn = report_run.describe(paths)["metrics"]
    assert drawn["step"] == [0, 1, 2, 3]
    assert [value is None for value in drawn["reward/mean"]] == [True, False, True, False]
    assert [value is None for value in drawn["time/step_s"]] == [True, False, False, False]
