"""Hooks of mkdocs for `make docs`: examples become pages, and links may leave docs/.

mkdocs.yml names this file. Pages are written for the repository. On the site, a link to an example
leads to the example's page, and a link to another file of the repository becomes the file's name.
The search is docs/search.js, which works without a web server.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each example, and the list of them."""
    for file in examples():
        files.append(File.generated(config, f"examples/{file.stem}.md", content=page(file)))
    listed = (EXAMPLES / "README.md").read_text("utf-8")
    files.append(File.generated(config, "examples/index.md", content=listed))
    return files


def on_config(config: Any) -> Any:
    """Put the examples' pages below Examples, and docs/search.js in place of mkdocs' search."""
    config.extra_javascript[:] = ["search.js"]
    (entry,) = [item for item in config.nav if "Examples" in item]
    entry["Examples"] = [
        {"All": "examples/index.md"},
        *(f"examples/{f.stem}.md" for f in examples()),
    ]
    return config


def examples() -> list[Path]:
    """List the examples' files."""
    return sorted(EXAMPLES.glob("[!_]*.py"))


def page(file: Path) -> str:
    """Return an example as a page: its name, its docstring, its code."""
    source = file.read_text("utf-8")
    told = ast.get_docstring(ast.parse(source)) or ""
    code = source.partition('"""')[2].partition('"""')[2].strip()
    return f"# {file.stem}\n\n{told}\n\n```python\n{code}\n```\n"


def on_post_build(config: Any) -> None:
    """Turn the index for the search into a script, which a page opened from a file can load."""
    folder = Path(config.site_dir) / "search"
    index = (folder / "search_index.json").read_text("utf-8")
    (folder / "search_index.js").write_text(f"window.searchIndex = {index};\n", "utf-8")
    for name in ("search_index.json", "main.js", "worker.js"):
        (folder / name).unlink()


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links that leave docs/ into links to pages, or into names."""
    uri = page.file.src_uri
    here = EXAMPLES if uri.startswith("examples/") else (ROOT / "docs" / uri).parent
    site = Path(uri).parent

    def rewritten(match: re.Match[str]) -> str:
        text, target, anchor = match[1], (here / match[2]).resolve(), match[3] or ""
        if not target.exists():  # no link, but code
            return match[0]
        if target.is_relative_to(ROOT / "docs"):
            place = target.relative_to(ROOT / "docs")
        elif target.parent == EXAMPLES:
            place = Path("examples") / (
                "index.md" if target.name == "README.md" else f"{target.stem}.md"
            )
        else:
            return text
        return f"[{text}]({os.path.relpath(place, site)}{anchor})"

    return LINK.sub(rewritten, markdown)
