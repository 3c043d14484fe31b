"""An out-of-range port is refused, because uvloop would listen on another port silently."""

from __future__ import annotations

from typing import Any

import pytest

from arealite.api.experiment_config import ServerConfig
from arealite.api.llm_server import LLMServerConfig
from arealite.base.errors import UserError
from arealite.ext.embedded.embedded_server import EmbeddedServer


@pytest.mark.parametrize("port", [-1, 2**16, 99999])
async def test_port_outside_1_to_65535_is_refused(port: int) -> None:
    server = EmbeddedServer(ServerConfig(llm_server=LLMServerConfig(port=port)))
    nothing: Any = None
    with pytest.raises(UserError, match=rf"port={port}"):
        await server._listen(nothing)
