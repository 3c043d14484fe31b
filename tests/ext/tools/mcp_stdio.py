"""A small MCP server by stdio, without the SDK: it starts at once. `mcp_stdio.py FOLDER`.

It writes its process id into a file of FOLDER, so that tests can count starts and kill it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
TOOLS = {
    "add": ("Add two integers.", {"a": INTEGER, "b": INTEGER}),
    "greet": ("Greet, by the environment.", {"name": TEXT}),
    "hang": ("Never answer.", {}),
    "die": ("End the process, unless it was started more often.", {"times": INTEGER}),
}
PAGE = 3
FOLDER = Path(sys.argv[1])


class RPCError(Exception):
    """A JSON-RPC error."""


def answer(method: str, asked: dict[str, Any]) -> Any:
    """Return the result of a request, None for no answer at all."""
    if method == "initialize":
        about = {"serverInfo": {"name": "tests", "version": "1"}, "capabilities": {"tools": {}}}
        return about | {"protocolVersion": asked["protocolVersion"]}
    if method == "tools/list":
        begin = int(asked.get("cursor", 0))
        page = [
            {"name": name, "description": about, "inputSchema": schema(properties)}
            for name, (about, properties) in [*TOOLS.items()][begin : begin + PAGE]
        ]
        more = {"nextCursor": str(begin + PAGE)} if begin + PAGE < len(TOOLS) else {}
        return {"tools": page} | more
    if method == "tools/call":
        return call(asked["name"], asked["arguments"])
    raise RPCError(-32601, f"no method {method}")


def schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


def call(name: str, arguments: dict[str, Any]) -> Any:
    match name:
        case "add":
            return text(str(arguments["a"] + arguments["b"]))
        case "greet" if arguments["name"] == "nobody":
            return text("there is nobody") | {"isError": True}
        case "greet" if arguments["name"] == "invalid":
            raise RPCError(-32602, "a name must be valid")
        case "greet" if arguments["name"] == "forgotten" and len([*FOLDER.iterdir()]) == 1:
            raise RPCError(-32600, "Session terminated")
        case "greet" if arguments["name"] == "broken":
            raise RPCError(-32603, "broken")
        case "greet" if arguments["name"] == "picture":
            return {"content": [{"type": "image", "data": "", "mimeType": "image/png"}]}
        case "greet":
            return text(f"{os.environ['GREETING']} {arguments['name']}")
        case "die" if len([*FOLDER.iterdir()]) <= arguments["times"]:
            os._exit(1)
        case "die":
            return text("alive")
    return None


def text(said: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": said}]}


def main() -> None:
    """Answer until stdin ends."""
    FOLDER.mkdir(exist_ok=True)
    whole = FOLDER.with_name(f"{os.getpid()}.new")
    whole.write_text(str(os.getpid()))
    whole.rename(FOLDER / f"{len([*FOLDER.iterdir()])}.pid")  # a kill here leaves no partial file
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        told: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        try:
            result = answer(message["method"], message.get("params", {}))
            if result is None:
                continue
            told["result"] = result
        except RPCError as error:
            told["error"] = {"code": error.args[0], "message": error.args[1]}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
