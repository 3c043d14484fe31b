"""Process 1 of a harness's sandbox: run one program, and give it the gateway's port.

The sandbox has a loopback of its own. This process listens there at the gateway's port, and passes
each connection to the Unix socket of the gateway. `programs.py` sends the text of this file to
a new Python process, so it imports nothing of the package.

Arguments: the path of the Unix socket, the port, then the program's words. When stdin closes, this
process exits, and the kernel kills all processes of the sandbox.
"""

import asyncio
import os
import sys
from contextlib import suppress

CHUNK_BYTES = 1 << 16


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until either end closes; then close the writer."""
    with suppress(OSError):
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
    writer.close()


async def main(path: str, port: str, *command: str) -> None:
    """Serve the port while the program runs; exit with its code."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gateway_reader, gateway_writer = await asyncio.open_unix_connection(path)
        await asyncio.gather(
            relay(reader, gateway_writer),
            relay(gateway_reader, writer),
        )

    def parent_closed() -> None:
        if not os.read(0, CHUNK_BYTES):
            os._exit(1)

    loop = asyncio.get_running_loop()
    loop.add_reader(0, parent_closed)
    await asyncio.start_server(connect, "127.0.0.1", int(port))
    try:
        program = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
    except OSError as error:
        message = f"{command[0]} cannot be started: {error}"
        os.write(2, message.encode())
        os._exit(127)
    code = await program.wait()
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
