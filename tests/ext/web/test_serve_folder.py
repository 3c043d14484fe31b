"""The file server: it serves the files of its folder and no other file."""

from __future__ import annotations

import aiohttp
import pytest
from yarl import URL

from arealite.ext.web.miniwob import serve_folder


@pytest.fixture
async def address(tmp_path):
    root = tmp_path / "html"
    (root / "sub").mkdir(parents=True)
    (root / "sub/page.html").write_text("<p>ü</p>", encoding="utf-8")
    (tmp_path / "secret.txt").write_text("secret")
    (root / "out.txt").symlink_to(tmp_path / "secret.txt")
    async with serve_folder(root) as address:
        yield address


async def fetch(address: str, path: str) -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as session:
        url = URL(address + path, encoded=True)
        async with session.get(url) as reply:
            return reply.status, reply.headers["Content-Type"], await reply.text()


async def test_files_are_served_as_utf8(address: str) -> None:
    assert await fetch(address, "/sub/page.html") == (200, "text/html; charset=utf-8", "<p>ü</p>")


async def test_browser_may_keep_files(address: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{address}/sub/page.html") as reply:
        assert reply.headers["Cache-Control"] == "max-age=86400"


@pytest.mark.parametrize(
    "path",
    ["/", "/sub", "/none.html", "/out.txt", "/../secret.txt", "/%2e%2e/secret.txt",
     "/sub/..%2f..%2fsecret.txt", "//etc/passwd", "/%2fetc%2fpasswd", "/none%00"],
)  # fmt: skip
async def test_paths_outside_the_folder_are_not_found(address: str, path: str) -> None:
    status, _, text = await fetch(address, path)
    assert status in (400, 403, 404)
    assert "secret" not in text
