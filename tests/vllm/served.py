"""A plugin: the client notes the address of each server that answered, in the file of SERVED.

It changes the client of the process that imports it, so only the processes of a run do.
"""

from __future__ import annotations

import os
from typing import Any

from arealite.api.server_protocol import ServerAnswer
from arealite.impl.client.servers_client import ServersClient

attempt = ServersClient._attempt


async def noting_attempt(self: Any, generation: Any, server: Any) -> ServerAnswer | None:
    answer = await attempt(self, generation, server)
    if answer is not None and answer.output_ids:
        file = os.open(os.environ["SERVED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{server.address}\n".encode())
        os.close(file)
    return answer


ServersClient._attempt = noting_attempt  # type: ignore[method-assign]
