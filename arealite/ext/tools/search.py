"""The tool `search`: full-text search (SQLite FTS5) in a local knowledge base."""

import asyncio
import re
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from arealite.api.tool import Tool, ToolError, function
from arealite.base.errors import UserError
from arealite.ext.tools.config import SearchToolConfig
from arealite.system.data.dataset import jsonl_rows

MAX_WORDS = 32
"""Words of a query that are used; further words are ignored."""
CREATE = """CREATE VIRTUAL TABLE texts
USING fts5(id UNINDEXED, title, text, tokenize = 'porter unicode61')"""
FIND = """SELECT id, title, snippet(texts, 2, '', '', ' … ', ?) FROM texts
WHERE texts MATCH ? ORDER BY bm25(texts, 0, 4, 1), id LIMIT ?"""
"""The weights of bm25 are those of the columns id, title and text: a word in the title counts four
times."""


class SearchTool(Tool):
    """Finds documents by words, ranked by BM25, and returns whole documents by id."""

    deterministic = True
    schema = function(
        "search",
        "Search the knowledge base, or read one of its documents.",
        query={"type": "string", "description": "words to look for"},
        read={"type": "string", "description": "id of a document to read instead"},
    )

    def __init__(self, config: SearchToolConfig) -> None:
        super().__init__(config)
        self.slots = asyncio.Semaphore(1)
        self._lock = threading.Lock()
        """Held by the thread that uses the connection, which allows one thread at a time. A call
        that timed out has left its slot, but its thread may still run."""

    async def setup(self) -> None:
        """Read and index the knowledge base."""
        self.index = await asyncio.to_thread(build, self.config.path)

    async def call(self, arguments: dict[str, Any], state: dict[str, object]) -> str:
        """Return excerpts of the best documents for `query`, or the document `read`."""
        if "read" in arguments:
            return await asyncio.to_thread(self._read, arguments["read"])
        return await asyncio.to_thread(self._find, arguments.get("query", ""))

    async def close(self) -> None:
        """Free the index."""
        if hasattr(self, "index"):
            self.index.close()

    def _find(self, query: str) -> str:
        words = re.findall(r"\w+", query)[:MAX_WORDS]
        if not words:
            raise ToolError("name the words to look for in `query`")
        any_word = " OR ".join(f'"{word}"' for word in words)
        rows = self._rows(FIND, (self.config.excerpt_words, any_word, self.config.top_k))
        if not rows:
            return f"no document has any of these words: {' '.join(words)}"
        excerpts = [f"[{name}] {title}\n{excerpt}" for name, title, excerpt in rows]
        return "\n\n".join(excerpts)

    def _read(self, name: str) -> str:
        rows = self._rows("SELECT title, text FROM texts WHERE id = ?", (name,))
        if not rows:
            raise ToolError(f"no document has the id '{name}'")
        title, body = rows[0]
        return "\n".join(filter(None, (title, body)))

    def _rows(self, statement: str, parameters: tuple[object, ...]) -> list[tuple[Any, ...]]:
        with self._lock:
            return self.index.execute(statement, parameters).fetchall()


class Document(NamedTuple):
    """A document, in the order of the columns of the index."""

    id: str
    title: str
    body: str


def build(source: str) -> sqlite3.Connection:
    """Index a JSONL file, or the .txt and .md files of a folder, in memory.

    Raises:
        UserError: The path does not exist or has no documents, or a document is invalid.
    """
    if not source:
        raise UserError(
            "env.tools.search.path is not set. Set a JSONL file, or a folder of .txt and .md files."
        )
    path = Path(source).expanduser()
    documents = list(_folder(path) if path.is_dir() else _jsonl(path))
    if not documents:
        raise UserError(
            f"env.tools.search.path={path} has no documents. "
            "Name a JSONL file with rows, or a folder of .txt and .md files."
        )
    index = sqlite3.connect(":memory:", check_same_thread=False)
    index.execute(CREATE)
    index.executemany("INSERT INTO texts VALUES (?, ?, ?)", documents)
    return index


def _folder(path: Path) -> Iterator[Document]:
    for file in sorted(path.rglob("*")):
        if file.suffix in (".txt", ".md") and file.is_file():
            yield Document(
                id=file.relative_to(path).as_posix(),
                title=file.stem,
                body=file.read_text(errors="replace"),
            )


def _jsonl(path: Path) -> Iterator[Document]:
    if not path.is_file():
        raise UserError(
            f"env.tools.search.path={path}: neither a file nor a folder. "
            'Name a JSONL file of {"id": …, "title": …, "text": …}, '
            "or a folder of .txt and .md files."
        )
    for number, (place, row) in enumerate(jsonl_rows(path), start=1):
        if "text" not in row:
            raise UserError(f'{place}: a document needs "text"; "id" and "title" are optional.')
        yield Document(
            id=str(row.get("id", number)),
            title=str(row.get("title", "")),
            body=str(row["text"]),
        )
