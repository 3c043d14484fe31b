"""The HTTP side of an environment server: OpenEnv's routes. Each socket has one session.

A server of several environments has these routes again for each of them, below `/env/TYPE`. The
environments run in the same event loop: an environment that blocks it blocks all sessions.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from typing import Any

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web
from aiohttp.typedefs import Handler
from msgspec import structs

import arealite
from arealite.api.env import make_env
from arealite.api.task import Task
from arealite.base import log
from arealite.base.errors import DeadlineError, UserError
from arealite.base.folder_checks import check_address
from arealite.base.registry import unknown
from arealite.ext.hosting.server import env_messages
from arealite.ext.hosting.server.env_session import EnvSession
from arealite.ext.hosting.server_config import (
    EnvServerConfig,
    Reset,
    SessionMessage,
    Step,
    StepReply,
)
from arealite.ext.http_server.http_guard import guard
from arealite.ext.http_server.http_limits import LimitedRunner
from arealite.system.data.dataset import load_tasks, make_task
from arealite.system.data.tasks import GENERATED, generate, reads_columns
from arealite.system.health.waits import END_S, Wait

logger = log.get(__name__)
decode = env_messages.decoder(SessionMessage)
decode_reset = env_messages.decoder(Reset)
decode_step = env_messages.decoder(Step)
decode_members = env_messages.decoder(dict[str, msgspec.Raw])

CLOSE_S = 1.0
"""Timeout for a client's answer to a closing handshake."""
STATUS = {env_messages.CAPACITY: 503, "EXECUTION_ERROR": 500}
"""HTTP status by error code; the status of other errors is 422."""


class EnvServer:
    """One or several environments and their sessions."""

    def __init__(self, config: EnvServerConfig) -> None:
        """Read the tasks and construct the environments.

        Raises:
            UserError: An environment is unknown, or the token or the file of tasks is missing.
        """
        self.config = config
        self.options = config.server
        self.envs = {
            env_type: make_env(config, env_config) for env_type, env_config in config.hosted.items()
        }
        """The environments by type; the first is the default."""
        self._default = next(iter(self.envs))
        self.sessions: dict[str, EnvSession] = {}
        self.port = 0
        self._ending = set[asyncio.Task[None]]()
        """Cancelled episodes that still clean up."""
        self._tasks: list[Task] = []
        if config.tasks != GENERATED:
            keep = reads_columns(config.env)
            self._tasks = load_tasks(config.tasks, "train", keep=keep)
        self._seeds = count(config.seed)
        self._max_bytes = self.options.max_message_kb * 1024
        self._token = env_messages.read_token(self.options.token_env, "server.")

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[str, None]:
        """Set up the environments and serve them until the body exits.

        Yields:
            The address, as host:port.

        Raises:
            UserError: The server cannot listen at `server.host` and `server.port`.
        """
        host = self.options.host
        port = self.options.port
        await asyncio.to_thread(check_address, host, port, at="server")  # before the costly `setup`
        async with AsyncExitStack() as stack:
            for env in self.envs.values():
                stack.push_async_callback(env.close)
                await env.setup()
            stack.push_async_callback(self._wait_for_cleanup)
            runner = LimitedRunner(
                self._app(),
                bodies=self._body_limits(),
                shutdown_timeout=0.1,
            )
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, host, port).start()
            yield f"{host}:{runner.addresses[0][1]}"

    def _body_limits(self) -> dict[str, int]:
        """Return the longest body in bytes by path, of the paths that take a body."""
        prefixes = ["", *(f"/env/{name}" for name in self.envs)]
        paths = [f"{prefix}/{name}" for prefix in prefixes for name in ("reset", "step")]
        return dict.fromkeys(paths, self._max_bytes)

    def _app(self) -> web.Application:
        request_guard = guard(self._token, self.options.host)
        app = web.Application(middlewares=[request_guard])
        descriptions: dict[str, Callable[[str], object]] = {
            "/health": self._health,
            "/environments": self._environments,
            "/metadata": self._full_metadata,
            "/schema": self._schema,
            "/state": self._new_state,
            "/sessions": self._session_list,
        }
        for prefix in ("", "/env/{env}"):
            app.router.add_get(f"{prefix}/ws", self._socket)
            for path, describe in descriptions.items():
                app.router.add_get(prefix + path, self._get(describe))
            app.router.add_post(f"{prefix}/reset", self._post)
            app.router.add_post(f"{prefix}/step", self._post)
        return app

    def _name(self, request: web.Request) -> str:
        """Return the environment that a request names in its path, else the default.

        Raises:
            web.HTTPNotFound: The server does not host it.
        """
        name = request.match_info.get("env", self._default)
        if name not in self.envs:
            raise web.HTTPNotFound(text=unknown("environment", name, [*self.envs]))
        return name

    async def _wait_for_cleanup(self) -> None:
        if self._ending:
            await asyncio.wait(self._ending, timeout=END_S)

    def _open(self, name: str) -> EnvSession:
        """Return a new session of an environment.

        Raises:
            Refused: `server.max_sessions` sessions are open.
        """
        max_sessions = self.options.max_sessions
        num_open = len(self.sessions) + len(self._ending)
        if num_open >= max_sessions:
            raise env_messages.MessageRefused(
                f"all sessions are in use (server.max_sessions={max_sessions})",
                env_messages.CAPACITY,
            )
        session = EnvSession(
            self.envs[name],
            episode_s=self.options.episode_s,
            name=name,
        )
        self.sessions[session.id] = session
        return session

    def _close(self, session: EnvSession) -> None:
        """Remove a session and cancel its episode, without waiting for the episode's cleanup.

        The caller may be cancelled itself, so it must not wait.
        """
        del self.sessions[session.id]
        run = session.cancel()
        if run is not None:
            self._ending.add(run)
            run.add_done_callback(self._ending.discard)

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        """Answer each message of a socket until it closes or has been idle for `idle_s`."""
        name = self._name(request)
        socket = web.WebSocketResponse(
            max_msg_size=self._max_bytes,
            compress=False,
            timeout=CLOSE_S,
        )
        await socket.prepare(request)
        try:
            session = self._open(name)
        except env_messages.MessageRefused as refused:
            await socket.send_str(self._error_frame(refused))
            await socket.close(code=WSCloseCode.TRY_AGAIN_LATER, message=b"full")
            return socket
        try:
            with suppress(ConnectionError):
                await self._converse(socket, session)
        except DeadlineError:  # the client does not read its answers
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._close(session)
        return socket

    async def _converse(self, socket: web.WebSocketResponse, session: EnvSession) -> None:
        """Answer the messages of a socket, all of which belong to its session."""
        while True:
            try:
                with self._wait_for_peer("a message"):
                    received = await socket.receive()
            except DeadlineError:
                await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"idle for too long")
                return
            if received.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                return
            try:
                message = decode(received.data)
                if message.type == "close":
                    await socket.close()
                    return
                kind, data = await self._answer(message, session)
                reply = env_messages.frame(kind, data, self._max_bytes)
            except Exception as error:  # noqa: BLE001  (the answer may be too long or not JSON)
                if not isinstance(error, env_messages.MessageRefused | msgspec.MsgspecError):
                    await session.end()
                reply = self._error_frame(error)
            with self._wait_for_peer("an answer to be read"):
                await socket.send_str(reply)

    def _wait_for_peer(self, event: str) -> Wait:
        return Wait(event=event, owner="env server", on="its peer", seconds=self.options.idle_s)

    def _error_frame(self, error: BaseException) -> str:
        return env_messages.frame("error", env_messages.refusal(error), self._max_bytes)

    async def _answer(self, message: SessionMessage, session: EnvSession) -> tuple[str, Any]:
        """Return the type and the data of the answer to a message."""
        session.last_message = time.monotonic()
        try:
            match message.type:
                case "step":
                    step = decode_step(message.data)
                    return "observation", await session.step(step)
                case "reset":
                    reset = decode_reset(message.data)
                    return "observation", await self._reset(session, reset)
                case "state" | "close":
                    return "state", session.describe()
            raise env_messages.MessageRefused(
                f"type '{message.type}' is unknown; send reset, step, state or close",
                "UNKNOWN_TYPE",
            )
        except Exception as error:  # noqa: BLE001  (an episode may raise any exception)
            return "error", env_messages.refusal(error)

    async def _reset(self, session: EnvSession, reset: Reset) -> StepReply:
        """Begin an episode of the environment that a reset names, else that of the session.

        Raises:
            Refused: The server does not host the environment, or the task is invalid.
        """
        name = reset.env or session.name
        if name not in self.envs:
            raise env_messages.MessageRefused(unknown("environment", name, [*self.envs]))
        task = await self._task(reset, name)
        return await session.reset(task, reset, self.envs[name])

    async def _task(self, reset: Reset, env: str) -> Task:
        """Return the task of a reset or, without one, the task that its seed draws.

        Equal seeds draw equal tasks.

        Raises:
            Refused: The task is invalid, or the environment generates no tasks.
        """
        try:
            if reset.task is not None:
                row = reset.task
                task_id = str(row.get("task_id") or "task")
                task = make_task(row, task_id, "the task of the reset")
                return structs.replace(task, columns=row.get("columns") or {})
            seed = next(self._seeds) if reset.seed is None else reset.seed
            if self._tasks and env == self._default:
                return self._tasks[seed % len(self._tasks)]
            tasks = generate(self.config.hosted[env], reset.split, seed)
            return await asyncio.to_thread(next, tasks)
        except UserError as error:
            raise env_messages.MessageRefused(str(error)) from error

    async def _post(self, request: web.Request) -> web.Response:
        """Answer POST /reset and /step.

        A session needs a socket. So each of these requests has an episode of its own, which is
        cancelled after the answer. /step takes the keys of /reset and `action`, and resets first.
        """
        try:
            body = await request.read() or b"{}"
            action = decode_members(body).get("action", msgspec.Raw(b"{}"))
            session = self._open(self._name(request))
            try:
                reset_message = SessionMessage(type="reset", data=msgspec.Raw(body))
                kind, data = await self._answer(reset_message, session)
                if request.path == "/step" and kind != "error":
                    step_message = SessionMessage(type="step", data=action)
                    kind, data = await self._answer(step_message, session)
            finally:
                self._close(session)
        except (msgspec.MsgspecError, env_messages.MessageRefused) as error:
            kind = "error"
            data = env_messages.refusal(error)
        status = STATUS.get(data.code, 422) if kind == "error" else 200
        return _json(data, status)

    def _get(self, describe: Callable[[str], object]) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            return _json(describe(self._name(request)))

        return answer

    def _health(self, name: str) -> dict[str, object]:
        return {
            "status": "healthy",
            "sessions": len(self.sessions),
            "max_sessions": self.options.max_sessions,
            "environments": [*self.envs],
        }

    def _environments(self, name: str) -> list[dict[str, object]]:
        return [self._metadata(env_type) for env_type in self.envs]

    def _full_metadata(self, name: str) -> dict[str, object]:
        return self._metadata(name) | {"environments": self._environments(name)}

    def _new_state(self, name: str) -> dict[str, object]:
        """Return the state of a new session, for the answer to GET /state."""
        return EnvSession(self.envs[name], episode_s=0.0).describe()

    def _session_list(self, name: str) -> list[dict[str, object]]:
        return [session.describe() for session in self.sessions.values()]

    def _metadata(self, name: str) -> dict[str, object]:
        env = self.envs[name]
        docstring = type(env).__doc__ or ""
        first_line, _, _ = docstring.strip().partition("\n")
        return {
            "name": name,
            "description": first_line,
            "version": arealite.__version__,
            "seats": list(env.seats),
            "resumable": env.resumable,
        }

    def _schema(self, name: str) -> dict[str, object]:
        return {
            "action": msgspec.json.schema(Step),
            "observation": msgspec.json.schema(StepReply),
            "state": {"type": "object"},
        }


def _json(data: object, status: int = 200) -> web.Response:
    return web.json_response(body=env_messages.encode(data), status=status)
