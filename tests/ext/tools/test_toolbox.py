"""The toolbox: checked arguments, deadlines, truncated answers, and state per episode."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from arealite.api.observation import ToolCall
from arealite.api.task import Task
from arealite.api.tool import Tool, ToolError, function, tools
from arealite.base.errors import RewardTimeout, UserError
from arealite.ext.tools.config import ToolsEnvConfig
from arealite.ext.tools.toolbox import Toolbox, ToolCrash, mismatch

TASK = Task(task_id="t", prompt="do", ground_truth="1", extra_info={})


@tools.register("odd")
class Odd(Tool):
    """Follows the instruction in its argument."""

    schema = function("odd", "?", required=("what",), what={"type": "string"})
    log: list[Any]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.log = []
        self.slots = asyncio.Semaphore(2)
        self.at_once = self.most = 0
        self.hangs = asyncio.Event()

    async def setup(self) -> None:
        self.log.append("setup")

    async def begin(self, task: Task, state: dict[str, Any]) -> None:
        state["calls"] = 0

    async def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> Any:
        state["calls"] += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            return await self._do(arguments["what"], state)
        finally:
            self.at_once -= 1

    async def _do(self, what: str, state: dict[str, Any]) -> Any:
        match what:
            case "hang":
                self.hangs.set()
                await asyncio.Event().wait()
            case "refuse":
                raise ToolError("not so")
            case "crash":
                raise KeyError("lost")
            case "own timeout":
                raise TimeoutError("mine")
            case "episode":
                raise RewardTimeout("killed")
            case "number":
                return 3
            case "long":
                return "x" * 5000
        await asyncio.sleep(0)
        return f"{what} {state['calls']}"

    async def end(self, state: dict[str, Any]) -> None:
        self.log.append(("end", state["calls"]))

    async def close(self) -> None:
        self.log.append("close")


def call(what: Any, name: str = "odd", **more: Any) -> ToolCall:
    return ToolCall(call_id="1", name=name, arguments={"what": what} | more)


@pytest.fixture
async def box():
    made = Toolbox(ToolsEnvConfig(tools=["odd"], timeout_s=0.05, answer_chars=100))
    await made.setup()
    yield made
    await made.close()
    assert made.tools["odd"].log[-1] == "close"


async def test_episodes_have_separate_states(box) -> None:
    async with box.episode(TASK) as one, box.episode(TASK) as other:
        assert await box.call(call("a"), one) == ("a 1", "fine")
        assert await box.call(call("b"), one) == ("b 2", "fine")
        assert await box.call(call("c"), other) == ("c 1", "fine")
    assert box.tools["odd"].log == ["setup", ("end", 1), ("end", 2)]


@pytest.mark.parametrize(
    ("made", "content", "kind"),
    [
        (call("refuse"), "error: not so", "failed"),
        (call("hang"), "error: timed out after 0.05 s", "timeout"),
        (
            call("a", "ood"),
            "error: Unknown tool 'ood'. Did you mean 'odd'? Known: odd.",
            "malformed",
        ),
        (
            ToolCall(call_id="1", name="", arguments={}, error="no JSON"),
            "error: no JSON",
            "malformed",
        ),
        (
            ToolCall(call_id="1", name="odd", arguments={}),
            "error: argument 'what' is missing",
            "malformed",
        ),
        (call(3), "error: argument 'what' must be of type string", "malformed"),
        (
            call("a", extra=1),
            "error: Unknown argument 'extra'. Known: what.",
            "malformed",
        ),
        (call("long"), "x" * 100 + " [4900 more characters]", "fine"),
    ],
)
async def test_failed_call_is_reported_to_the_agent(box, made, content, kind) -> None:
    async with box.episode(TASK) as states:
        assert await box.call(made, states) == (content, kind)


@pytest.mark.parametrize("what", ["crash", "own timeout", "number"])
async def test_unexpected_exception_of_a_tool_fails_the_episode(box, what) -> None:
    with pytest.raises(ToolCrash, match="odd") as raised:
        async with box.episode(TASK) as states:
            await box.call(call(what), states)
    assert raised.value.failure_class == "tool_crash"
    assert box.tools["odd"].log[-1] == ("end", 1)


async def test_episode_errors_of_a_tool_are_raised_unchanged(box) -> None:
    async with box.episode(TASK) as states:
        with pytest.raises(RewardTimeout):
            await box.call(call("episode"), states)


async def test_waiting_for_a_slot_does_not_count_as_call_time(box) -> None:
    async with box.episode(TASK) as states, asyncio.TaskGroup() as group:
        hung = [group.create_task(box.call(call("hang"), states)) for _ in range(4)]
        last = group.create_task(box.call(call("a"), states))
    assert [task.result().kind for task in hung] == ["timeout"] * 4
    assert last.result().kind == "fine"
    assert box.tools["odd"].most == 2


def test_two_tools_of_one_name_are_a_user_error() -> None:
    with pytest.raises(UserError, match="two tools have the name 'odd'"):
        Toolbox(ToolsEnvConfig(tools=["odd", "odd"]))
    with pytest.raises(UserError, match="Did you mean 'calculator'"):
        Toolbox(ToolsEnvConfig(tools=["calculater"]))


def test_toolbox_is_deterministic_if_all_tools_are() -> None:
    assert Toolbox(ToolsEnvConfig(tools=["calculator", "files"])).deterministic
    assert not Toolbox(ToolsEnvConfig(tools=["calculator", "odd"])).deterministic


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"n": 1}, ""),
        ({"n": 1.5}, "integer"),
        ({"n": True}, "integer"),
        ({"n": 1, "f": 2}, ""),
        ({"n": 1, "f": "2"}, "number"),
        ({"n": 1, "l": {}}, "array"),
        ({"n": 1, "c": "red"}, ""),
        ({"n": 1, "c": "blue"}, "one of red, green"),
        ({"n": 1, "any": None}, ""),
        ({"n": 1, "union": [1]}, ""),
        ({"n": 1, "never": 1}, ""),
        ({}, "missing"),
    ],
)
def test_arguments_are_checked_against_plain_schemas(arguments, said) -> None:
    schema = {
        "properties": {
            "n": {"type": "integer"},
            "f": {"type": "number"},
            "l": {"type": "array"},
            "c": {"enum": ["red", "green"]},
            "any": {},
            "union": {"type": ["array", "string"]},
            "never": False,
        },
        "required": ["n"],
    }
    found = mismatch(arguments, schema)
    assert said in found
    assert bool(said) == bool(found)
