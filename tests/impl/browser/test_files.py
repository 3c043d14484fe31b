"""The file server: it serves the files of its folder and no other file."""

from __future__ import annotations

import aiohttp
import pytest
from yarl import URL

from arealite.impl.browser.files import FileServer


@pytest.fixture
async def server(tmp_path):
    root = tmp_path / "html"
    (root / "sub").mkdir(parents=True)
    (root / "sub/page.html").write_text("<p>ü</p>", encoding="utf-8")
    (tmp_path / "secret.txt").write_text("secret")
    (root / "out.txt").symlink_to(tmp_path / "secret.txt")
    made = FileServer(root)
    await made.setup()
    yield made
    await made.close()


async def fetch(server: FileServer, path: str) -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as session:
        url = URL(server.address + path, encoded=True)
        async with session.get(url) as reply:
            return reply.status, reply.headers["Content-Type"], await reply.text()


async def test_files_are_served_from_memory_as_utf8(server: FileServer) -> None:
    assert await fetch(server, "/sub/page.html") == (200, "text/html; charset=utf-8", "<p>ü</p>")
    (server.root / "sub/page.html").unlink()
    assert (await fetch(server, "/sub/page.html"))[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/", "/sub", "/none.html", "/out.txt", "/../secret.txt", "/%2e%2e/secret.txt",
     "/sub/..%2f..%2fsecret.txt", "//etc/passwd", "/%2fetc%2fpasswd", "/none%00"],
)  # fmt: skip
async def test_paths_outside_the_folder_are_not_found(server: FileServer, path: str) -> None:
    status, _, text = await fetch(server, path)
    assert status in (400, 404)
    assert "secret" not in text
