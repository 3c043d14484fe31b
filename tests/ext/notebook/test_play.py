"""`arealite play` reads actions from stdin and prints the observations of agents."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from arealite.cli import main as cli
from arealite.ext.notebook.play_command import full_key
from tests.impl.rollout import worlds

Play = Callable[..., tuple[int, str, str]]


@pytest.fixture
def play(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Play]:
    """Run `arealite play` with given input lines; return exit code, stdout and stderr."""
    kept, before = os.dup(0), {*threading.enumerate()}

    def run(typed: str, *argv: str, from_file: bool = False) -> tuple[int, str, str]:
        if from_file:
            (tmp_path / "typed").write_text(typed)
            end = os.open(tmp_path / "typed", os.O_RDONLY)
        else:
            end, begin = os.pipe()
            os.write(begin, typed.encode())
            os.close(begin)
        os.dup2(end, 0)
        os.close(end)
        code = cli.main(["play", *argv])
        # A thread that still reads would take the input of the next run.
        for thread in {*threading.enumerate()} - before:
            thread.join(60)
            assert not thread.is_alive()
        return code, *capsys.readouterr()

    yield run
    os.dup2(kept, 0)
    os.close(kept)


def test_user_plays_against_a_random_opponent(play: Play) -> None:
    code, out, _ = play("1\n2\n3\n4\n5\n6\n7\n8\n9\n", "tic_tac_toe", "--seed", "3")
    assert code == 0
    first, second = out.split("x> ")[:2]
    assert "You are x." in first
    assert first.endswith("\n1 2 3\n4 5 6\n7 8 9\nchoices: 1, 2, 3, 4, 5, 6, 7, 8, 9\n")
    assert second.startswith("[o] ")
    assert "\nx: reward " in out
    assert "(win=" in out


def test_equal_seeds_give_equal_games(play: Play) -> None:
    argv = "5\n", "tic_tac_toe", "opening_moves=4", "--seat", "o", "--seed"
    outs = [play(*argv, seed)[1] for seed in ("1", "1", "2")]
    assert outs[0] == outs[1] != outs[2]


def test_end_of_input_ends_the_game(play: Play) -> None:
    code, out, err = play("", "tic_tac_toe")
    assert (code, err) == (0, "")
    assert out.endswith("x> \nyou left\n")
    code, out, _ = play("", "matrix_game")  # in a group of tasks
    assert code == 0
    assert out.endswith("you left\n")


@pytest.mark.parametrize("from_file", [False, True])
def test_last_input_line_needs_no_newline(play: Play, from_file: bool) -> None:
    code, out, _ = play("cba", "reverse", "--task", _tasks("abc"), from_file=from_file)
    assert code == 0
    assert out.endswith("agent: reward 1 (exact=1)\n")


def test_answer_without_a_score_is_shown(play: Play, tmp_path: Path) -> None:
    file = tmp_path / "my_none.py"
    file.write_text("def f(completion): return None")
    paths = f"reward.function.paths=[{file}:f]"
    code, out, _ = play("4\n", "math", "reward.type=function", paths)
    assert code == 0
    assert out.endswith("agent: no score\n")


def test_user_can_play_all_seats(play: Play) -> None:
    code, out, _ = play("defect\ncooperate\n", "matrix_game", "--seat", "all")
    assert code == 0
    assert "row: reward 5 (" in out
    assert "column: reward 0 (" in out


def test_seat_with_text_actions_is_played_by_the_user(play: Play) -> None:
    code, out, _ = play("Zoos are good.\nZoos are bad.\n", "debate", "rounds=1")
    assert code == 0
    assert "pro> " in out
    assert "con> " in out
    assert "con: reward" in out


def test_simultaneous_choices_are_shown_after_the_round(play: Play) -> None:
    seats = ["seats.column.type=scripted", "seats.column.scripted.answers=[cooperate, defect]"]
    _, out, _ = play("defect\ndefect\n", "iterated_prisoners_dilemma", "rounds=2", *seats)
    first, second, rest = out.split("row> ")
    assert "[column]" not in first
    assert second.startswith("[column] cooperate")
    assert rest.startswith("[column] defect")
    assert "row: reward 3 (" in rest


def _tasks(*prompts: str) -> str:
    file = Path(os.environ["PYTEST_TASKS"])
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return str(file)


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_TASKS", str(tmp_path / "tasks.jsonl"))


def test_tasks_are_read_from_a_file(play: Play) -> None:
    _, out, _ = play("fed\n", "reverse", "--task", _tasks("abc", "def"), "--row", "1")
    assert ": def\nagent> " in out
    assert "reward 1" in out
    code, _, err = play("", "reverse", "--task", _tasks("abc"), "--row", "1")
    assert code == 2
    assert "--row 1" in err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["tictactoe"], "tic_tac_toe"),
        (["tic_tac_toe", "--seat", "y"], "Unknown seat 'y'"),
        (["tic_tac_toe", "seats.z.type=scripted"], "Unknown seat 'z'"),
        (["tic_tac_toe", "--opponent", "math_code_single_step"], "fixed_policy"),
        (["tic_tac_toe", "oppening_moves=1"], "opening_moves"),
        (["world"], "generates no tasks"),
    ],
)
def test_invalid_play_arguments_are_a_one_line_error(
    play: Play, argv: list[str], said: str
) -> None:
    assert worlds is not None
    code, _, err = play("", *argv)
    assert code == 2
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1


def test_failed_episode_shows_no_rewards(play: Play, tmp_path: Path) -> None:
    file = _tasks("check")
    code, out, _ = play("hi\n", "world", "--task", file)
    assert code == 1
    assert "no reward: killed" in out
    assert "agent: reward" not in out


def test_short_option_names_are_expanded_for_the_environment() -> None:
    own = "trainer.ppo.collector.env"
    for word, key in (
        ("rounds=2", f"{own}.debate.rounds=2"),
        ("debate.rounds=2", f"{own}.debate.rounds=2"),
        ("runtime.type=remote", f"{own}.runtime.type=remote"),
        ("seats.con.type=chat", "trainer.ppo.collector.seats.con.type=chat"),
        ("model.path=m", "model.path=m"),
    ):
        assert full_key(word, "debate") == key


def test_option_of_the_environment_takes_precedence_over_the_runs() -> None:
    for env, word in (
        ("reasoning_gym", "dataset=x"),
        ("tools", "tools=[x]"),
        ("gyllm", "seats=[x]"),
    ):
        assert full_key(word, env) == f"trainer.ppo.collector.env.{env}.{word}"
    assert full_key("tools.tools=[x]", "tools") == "trainer.ppo.collector.env.tools.tools=[x]"
    assert full_key("dataset.train=x", "math") == "dataset.train=x"


def test_tools_are_listed_once(play: Play):
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "138+463"}}</tool_call>'
    code, out, _ = play(f"{call}\n601\n", "tools")
    assert code == 0
    assert out.count("tool: {'name': 'calculator'") == 1
    assert "tool: 601" in out and "reward 1 " in out


def test_rewards_of_gyllm_are_shown(play: Play) -> None:
    options = "factory=tests.fakes.foreign:Sum", "seats=[a, b]", "--seat", "all"
    code, out, _ = play("hi\nho\n3\n4\n", "gyllm", *options)
    assert code == 0
    assert out.endswith("a: reward 0\nb: reward 1\n")


def test_rewards_of_textarena_are_shown(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("textarena")
    module.make = lambda env_id, **_: HighestNumber()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "textarena", module)
    options = "env_id=HighestNumber-v0", "observation=whole", "--seat", "all"
    code, out, _ = play("3\n4\n", "textarena", *options)
    assert code == 0
    assert out.endswith("player_0: reward -1 (invalid=0)\nplayer_1: reward 1 (invalid=0)\n")


class HighestNumber:
    """A TextArena game in which both players choose a number in turn."""

    def reset(self, players: int, seed: int) -> None:
        self.said = list[int]()

    def get_observation(self) -> tuple[int, str]:
        return len(self.said), "Say a number."

    def step(self, text: str) -> tuple[bool, dict[str, Any]]:
        self.said.append(int(text))
        return len(self.said) == 2, {}

    def close(self) -> tuple[dict[int, float], dict[int, Any]]:
        return {
            n: 1.0 if number == max(self.said) else -1.0 for n, number in enumerate(self.said)
        }, {}
