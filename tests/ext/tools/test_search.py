"""Search in a local knowledge base."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from arealite.api.tool import ToolError
from arealite.base.errors import UserError
from arealite.ext.tools.config import SearchToolConfig
from arealite.ext.tools.search import SearchTool

NONE = "no document has any of these words: zebra"
TEXTS = [
    {"id": "paris", "title": "Paris", "text": "Paris is the capital of France. " + "river " * 200},
    {"id": "berlin", "title": "Berlin", "text": "Berlin is the capital of Germany, on the Spree."},
    {"id": "spree", "title": "Spree", "text": "A river of 400 km that\u2028runs through Berlin."},
    {"title": "Nameless", "text": 'O\'Neill said: "capitals" AND (cheese)'},
]


@pytest.fixture
async def search(tmp_path: Path):
    file = tmp_path / "kb.jsonl"
    file.write_text("\n".join(json.dumps(text, ensure_ascii=False) for text in TEXTS) + "\n\n")
    tool = SearchTool(SearchToolConfig(path=str(file), top_k=2, excerpt_words=8))
    await tool.setup()
    yield tool
    await tool.close()


async def names(tool: SearchTool, query: str) -> list[str]:
    found = await tool.call({"query": query}, {})
    return [block.partition("]")[0][1:] for block in found.split("\n\n")]


async def test_best_documents_come_first(search) -> None:
    assert await names(search, "Spree") == ["spree", "berlin"]
    assert await names(search, "what is the capital of Germany?") == ["berlin", "paris"]
    assert await names(search, "running") == ["spree"], "words are found by their stems"


async def test_excerpts_are_short_and_documents_can_be_read(search) -> None:
    found = await search.call({"query": "France"}, {})
    assert found.startswith("[paris] Paris\nParis is the capital of France.")
    assert len(found.split()) < 15
    whole = await search.call({"read": "paris"}, {})
    assert whole.startswith("Paris\nParis is") and whole.count("river") == 200
    assert (await search.call({"read": "4"}, {})).startswith("Nameless\n"), "id is its number"


@pytest.mark.parametrize(
    "query",
    [
        '"',
        'a" OR "b',
        "NEAR(x y)",
        "cheese) OR (",
        "title:Paris*",
        "* - ^",
        "x" * 10_000,
        "a " * 9_999,
    ],
)
async def test_query_syntax_is_treated_as_words(search, query) -> None:
    try:
        await names(search, query)
    except ToolError as error:
        assert "name the words" in str(error)


async def test_missing_documents_are_reported(search) -> None:
    assert await search.call({"query": "zebra"}, {}) == NONE
    for arguments in ({"query": "?!"}, {}, {"read": "rome"}):
        with pytest.raises(ToolError):
            await search.call(arguments, {})


async def test_concurrent_searches_work(search) -> None:
    found = await asyncio.gather(*(names(search, "capital") for _ in range(50)))
    assert all(each == found[0] for each in found)


async def test_unset_path_is_a_user_error() -> None:
    with pytest.raises(UserError, match="path is not set"):
        await SearchTool(SearchToolConfig()).setup()


async def test_folder_of_texts_is_indexed(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.md").write_text("apples and pears")
    (tmp_path / "b.txt").write_bytes(b"plums \xff")
    (tmp_path / "c.py").write_text("apples")
    tool = SearchTool(SearchToolConfig(path=str(tmp_path)))
    await tool.setup()
    assert await names(tool, "apples plums") == ["b.txt", "deep/a.md"]
    await tool.close()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"text": "a"}\n{"title": "b"}', 'line 2: a document needs "text"'),
        ("[1]", "line 1"),
        ("{", "line 1"),
        ("", "no documents"),
        (None, "neither a file nor a folder"),
    ],
)
async def test_invalid_knowledge_base_is_a_user_error(tmp_path: Path, text, error) -> None:
    file = tmp_path / "kb.jsonl"
    if text is not None:
        file.write_text(text)
    tool = SearchTool(SearchToolConfig(path=str(file)))
    with pytest.raises(UserError, match=error):
        await tool.setup()
    await tool.close()
