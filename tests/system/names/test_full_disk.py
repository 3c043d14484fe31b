"""A heartbeat that fails on a full disk leaves no temporary file."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from arealite.base.errors import UserError
from arealite.system.names.name_registry import NameRegistry


def test_failed_write_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = NameRegistry(root=tmp_path, ttl_s=600.0)
    names.put("llm_server", "a", {"version": "1"})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(UserError, match="No space left"):
        names.put("llm_server", "a", {"version": "2"})
    assert [path.name for path in (tmp_path / "llm_server").iterdir()] == ["a.json"]
    assert names.list("llm_server")[0].value == {"version": "1"}
