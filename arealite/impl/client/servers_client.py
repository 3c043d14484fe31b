"""The client of LLM servers of every kind; `ServerProtocol` has what differs between them.

The client returns complete generations. If a server fails, or a weight update aborts a request, the
client sends the prompt again with the tokens so far. Every token keeps the logprob and the policy
version that its server returned.
"""

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field

import msgspec

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.llm import LLMClient, LLMClientConfig, LLMRequest, LLMResponse
from arealite.api.llm_server import UNTRUSTED
from arealite.api.server_protocol import (
    SERVER_START_S,
    AnswerStream,
    AnswerStreamMaker,
    GenerateRequest,
    ServerAnswer,
    TopRow,
)
from arealite.base import entries, log
from arealite.base.errors import DeadlineError, GenerationRefused, ServerUnavailable
from arealite.base.model_folder import eos_tokens, experts_of, read_json, vocab_size
from arealite.impl.client import answer_checks, top_tokens
from arealite.impl.client.directory import Directory
from arealite.impl.client.server_choice import LLMServerState, Router, SentRequest
from arealite.impl.http_client import Pool, error_message
from arealite.system.health.waits import Wait
from arealite.system.names.name_registry import NameRegistry

logger = log.get(__name__)

MAX_SERVER_ERRORS = 8
"""Server errors (status 5xx, malformed answers) after which a request fails."""
MAX_BACKOFF_S = 2.0
NO_ROUTING = "for SGLang, set --enable-return-routed-experts; else use collector.routing=ignore"
RETRIED_STATUSES = frozenset((408, 425, 429))
COUNTERS = (
    *("requests", "interruptions", "resubmissions", "failovers"),
    *("server_errors", "stale_answers", "server_waits", "server_wait_s"),
)


@dataclass(slots=True, kw_only=True)
class GenerationState:
    """The state of one request: the tokens sampled so far, and the failed attempts."""

    request: LLMRequest
    deadline: float
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routing: bytes = b""
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_tokens: list[TopRow] = field(default_factory=list)
    target_logprobs: bytes = b""
    interruptions: int = 0
    sent: int = 0
    failures: int = 0
    """Consecutive attempts without a new token."""
    errors: int = 0
    failed_at: LLMServerState | None = None
    version_name: str = ""
    """The name of a version that the last attempt had; "": the adapter's own name, or none."""

    def __post_init__(self) -> None:
        resumed = self.request.resumed
        if resumed is not None:
            self.output_ids += resumed.output_ids
            self.logprobs += resumed.logprobs
            self.versions += resumed.versions
            self.interruptions = resumed.interruptions + 1
            self.routing = resumed.routing
            num_top = self.request.sampling.top_logprobs
            self.top_ids, self.top_logprobs = top_tokens.resumed_record(resumed, num_top)

    def response(self, stop_reason: str = "") -> LLMResponse:
        """Return a copy of the tokens sampled so far."""
        return LLMResponse(
            output_ids=self.output_ids[:],
            logprobs=self.logprobs[:],
            versions=self.versions[:],
            stop_reason=stop_reason,
            interruptions=self.interruptions,
            routing=self.routing,
            top_ids=self.top_ids,
            top_logprobs=self.top_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            prompt_top_tokens=self.prompt_top_tokens,
            target_logprobs=self.target_logprobs,
        )

    def add_top(self, record: top_tokens.TopRecord) -> None:
        """Add the most probable tokens of an answer."""
        self.top_ids += record.ids
        self.top_logprobs += record.logprobs

    def add_routing(self, routing: bytes, token_bytes: int) -> None:
        """Set the newest record; without one, mark the tokens since the last as not recorded."""
        if routing:
            self.routing = routing
        elif self.routing:
            num_bytes = self.routed_tokens * token_bytes
            self.routing = self.routing.ljust(num_bytes, b"\xff")

    @property
    def routed_tokens(self) -> int:
        """Number of tokens that a record covers: the last token was no input."""
        num_tokens = len(self.request.input_ids) + len(self.output_ids)
        return num_tokens - 1 - self.request.routing_start


class ServersClient(LLMClient):
    """Generates through the trial's live servers, as the name registry lists them."""

    def __init__(self, args: ExperimentConfig, config: LLMClientConfig) -> None:
        self.config = config.servers
        self._model_path = args.model.path
        self._warned_of_routing = False
        self._records_routing = args.trainer.ppo.collector.routing != "ignore"
        self._server_wait_s = args.server_wait_s
        if args.launcher.llm_servers:
            self._server_wait_s = max(args.server_wait_s, SERVER_START_S)
        self._router = Router()
        self._directory = Directory(
            self._router,
            NameRegistry.of(args),
            refresh_s=self.config.refresh_s,
        )
        self._stats: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        self._aborts: set[asyncio.Task[None]] = set()
        self._stream_makers: list[AnswerStreamMaker] = []
        """Readers of streamed answers; the last one is used."""

    async def start(self) -> None:
        """Open connections; wait up to `server_wait_s` for the first server.

        Raises:
            DeadlineError: no server was registered in that time.
        """
        connect_s = self.config.connect_timeout_s
        self._pool = Pool(connect_s, limit=self.config.max_connections)
        # Aborts have their own connections, because generations may use every one of the pool. Each
        # server has 16 of them, so that a silent server delays aborts at no other server.
        self._abort_pools = defaultdict[str, Pool](lambda: Pool(connect_s, limit=16))
        self._stream_makers = await asyncio.to_thread(entries.hooks, "answer_stream")
        self._eos = await asyncio.to_thread(eos_tokens, self._model_path)
        model_config = await asyncio.to_thread(read_json, self._model_path)
        self._directory.vocab_size = vocab_size(model_config)
        self._experts = experts_of(model_config) if self._records_routing else None
        await self._directory.start()
        first_server = Wait(
            event=f"an llm server in {self._directory.registry.root} "
            "(start one with arealite/launch_llm_server.py, "
            "under the same experiment and trial names)",
            owner="llm client",
            seconds=self._server_wait_s,
        )
        with first_server:
            while not any(server.alive for server in self._router.servers.values()):
                await self._directory.changed()

    async def close(self) -> None:
        """Wait for pending aborts, then close connections."""
        await asyncio.gather(*self._aborts)
        await self._directory.close()
        self._pool.close()
        for pool in self._abort_pools.values():
            pool.close()

    def stats(self) -> dict[str, float]:
        """Return counters since the start, and the requests in flight."""
        in_flight = sum(server.in_flight for server in self._router.servers.values())
        return {**self._stats, "in_flight": float(in_flight)}

    async def generate(self, request: LLMRequest) -> LLMResponse:
        """Return the finished generation; continue it after interruptions and failures of servers.

        Raises:
            ContextOverflow: prompt + budget exceed the server's context.
            GenerationRefused: the request is invalid.
            ServerUnavailable: no server finished it before the deadline.
            InvariantError: a server's tokens, logprobs and versions do not fit together.
        """
        seconds = request.deadline_s or self.config.request_timeout_s
        deadline = asyncio.get_running_loop().time() + seconds
        generation = GenerationState(request=request, deadline=deadline)
        self._stats["requests"] += 1
        while True:
            server = self._router.pick(
                request.group_id,
                request.min_version,
                avoid=generation.failed_at,
                adapter=request.adapter,
            )
            if server is None:
                server = await self._wait_for_server(generation)
            answer_checks.check_request(request, server.vocab_size, server.context_length)
            acknowledged = server.version_of(request.adapter)
            answer = await self._attempt(generation, server)
            if answer is None:
                continue
            if request.adapter and generation.version_name:
                # The labels of the answer are those of the policy.
                answer.newest_version = generation.version_name
                answer.spans = []
            stop_reason = self._add_answer(generation, server, answer, acknowledged)
            if stop_reason:
                self._stats["interruptions"] += generation.interruptions
                return generation.response(stop_reason)
            self._stats["resubmissions"] += 1
            if not answer.output_ids:
                await self._back_off(generation)
            elif request.on_partial is not None:
                request.on_partial(generation.response())

    # ------------------------------------------------------------ one attempt

    async def _attempt(
        self, generation: GenerationState, server: LLMServerState
    ) -> ServerAnswer | None:
        """Send the request with the tokens so far; return the answer.

        If another attempt is needed, return the tokens that were streamed before the failure, or
        None: the caller of the generation already has them, so they are kept.
        """
        request = generation.request
        rid = f"{request.request_id}~{generation.sent}"  # no rid is a prefix of another
        stream = None
        if request.on_tokens is not None:
            stream = self._stream_makers[-1](request, server.protocol)
        generation.version_name = server.version_name(request.adapter)
        names_adapter = bool(request.adapter or generation.version_name)
        body = self._encode_body(generation, server, rid, is_stream=stream is not None)
        generation.sent += 1
        try:
            status, raw = await self._post(generation, server, rid, body, stream)
        except (OSError, DeadlineError) as error:
            if asyncio.get_running_loop().time() >= generation.deadline:
                raise ServerUnavailable(
                    f"{request.request_id}: {server.address} did not finish before the deadline "
                    f"({len(generation.output_ids)} tokens so far; lower collector.concurrency)"
                ) from error
            server.alive = False
            server.mark_entry_stale()
            self._directory.request_refresh()
            await self._retry(generation, server, "failovers", str(error))
            return self._streamed_answer(generation, server, stream)
        if status == 200:
            if stream is not None and stream.answer is not None:
                return self._streamed_answer(generation, server, stream)
            try:
                return server.protocol.decode_answer(raw)
            except msgspec.DecodeError as error:
                message = f"not an answer: {error}"
        elif names_adapter and server.protocol.lacks_adapter(status, raw):
            # It has a newer version, or was restarted.
            if generation.version_name == server.version_name(request.adapter):
                self._expect_new_entry(server, UNTRUSTED, request.adapter)
            return None
        else:
            message = error_message(status, raw)
            if 400 <= status < 500 and status not in RETRIED_STATUSES:
                raise GenerationRefused(f"{server.address}: {message}")
        generation.errors += 1
        await self._retry(generation, server, "server_errors", message)
        return self._streamed_answer(generation, server, stream)

    def _streamed_answer(
        self, generation: GenerationState, server: LLMServerState, stream: AnswerStream | None
    ) -> ServerAnswer | None:
        """Return the tokens that a server streamed; None without any.

        Raises:
            ServerUnavailable: the server did not report their versions, which it does at the end.
        """
        if stream is None or stream.answer is None:
            return None
        if not stream.answer.spans:
            is_withheld = server.protocol.streams_versions
            answer_checks.check_stream(generation.request, stream.answer, is_withheld=is_withheld)
        return stream.answer

    def _encode_body(
        self,
        generation: GenerationState,
        server: LLMServerState,
        rid: str,
        *,
        is_stream: bool,
    ) -> bytes:
        """Return the body of an attempt: the prompt and the tokens so far."""
        request = generation.request
        ids: list[int] | msgspec.Raw
        if request.json and not generation.output_ids:
            ids = msgspec.Raw(request.json)
        else:
            ids = request.input_ids + generation.output_ids
        attempt = GenerateRequest(
            rid=rid,
            input_ids=ids,
            sampling=request.sampling,
            num_top=top_tokens.num_requested(request.sampling, server.vocab_size),
            num_sampled=len(generation.output_ids),
            is_stream=is_stream,
            with_routing=self._experts is not None,
            routing_start=request.routing_start,
            scores_prompt=request.scores_prompt,
            target_ids=request.target_ids,
            adapter=generation.version_name or request.adapter,
            seed=request.seed,
        )
        return server.protocol.encode_request(attempt)

    async def _post(
        self,
        generation: GenerationState,
        server: LLMServerState,
        rid: str,
        body: bytes,
        stream: AnswerStream | None,
    ) -> tuple[int, bytes]:
        """Post a request, and abort it if it is cancelled; return status and body of the reply.

        Raises:
            OSError: the connection failed.
            DeadlineError: the deadline has passed, or the server was lost.
        """
        wait = self._wait(generation, server.name)
        on_data = None if stream is None else stream.feed
        server.waits[wait] = SentRequest(
            rid=rid,
            adapter=generation.request.adapter,
            version_name=generation.version_name,
        )
        server.in_flight += 1
        server.served += 1
        try:
            with wait:
                status, raw = await self._pool.send(server.endpoint, body, on_data)
        except (asyncio.CancelledError, DeadlineError):
            self._abort(server, rid)
            raise
        finally:
            server.in_flight -= 1
            del server.waits[wait]
        if status == 200 and stream is not None:
            stream.feed(raw)
            return stream.failure or (200, b"")
        return status, raw

    def _wait(self, generation: GenerationState, on: str) -> Wait:
        return Wait(
            event=f"generation {generation.request.request_id}",
            owner="llm client",
            on=on,
            seconds=generation.deadline - asyncio.get_running_loop().time(),
        )

    def _add_answer(
        self,
        generation: GenerationState,
        server: LLMServerState,
        answer: ServerAnswer,
        acknowledged: int,
    ) -> str | None:
        """Add the tokens of an answer; return the stop reason, or None if generation must continue.

        Args:
            acknowledged: version that the server had reported before the request was sent.
        """
        newest = acknowledged
        if answer.newest_version is not None:
            newest = answer_checks.parse_version(answer.newest_version)
        versions = answer_checks.token_versions(
            answer,
            acknowledged,
            adapter=generation.version_name,
        )
        if self._is_stale(generation, server, answer, min(versions, default=newest)):
            return None
        adapter = generation.request.adapter
        if newest > server.version_of(adapter) and adapter not in server.version_names:
            server.set_label(answer.newest_version, adapter)
        sampling = generation.request.sampling
        if sampling.top_logprobs:
            record = top_tokens.top_record(answer, sampling, server.vocab_size)
            generation.add_top(record)
            answer.logprobs = record.sampled_logprobs
        generation.output_ids += answer.output_ids
        generation.logprobs += answer.logprobs
        generation.versions += versions
        if generation.request.scores_prompt:
            generation.prompt_logprobs = answer_checks.prompt_logprobs(answer, generation.request)
            generation.prompt_top_tokens = answer.prompt_top_tokens
            generation.target_logprobs = answer_checks.target_logprobs(answer, generation.request)
        if self._experts is not None:
            routing = answer_checks.routing(answer, self._experts, generation.routed_tokens)
            generation.add_routing(routing, self._experts.token_bytes)
        generation.interruptions += answer.num_retractions
        if versions:
            generation.failures = 0
        if answer.finish in ("stop", "length"):
            self._warn_without_routing(generation, server)
            return answer.finish
        if answer.finish not in (None, "abort") or answer.is_refusal:
            raise GenerationRefused(f"finish reason {answer.finish}: {answer.finish_message}")
        generation.interruptions += 1
        return answer_checks.end_of_aborted(
            answer,
            sampling,
            len(generation.output_ids),
            self._eos,
        )

    def _is_stale(
        self,
        generation: GenerationState,
        server: LLMServerState,
        answer: ServerAnswer,
        oldest: int,
    ) -> bool:
        """Return whether an answer must be dropped, and then expect a new entry of the server.

        It restarted with old weights after its entry was renewed, or got weights of another kind
        while the request was sent.

        Args:
            oldest: The oldest version of a token.

        Raises:
            ServerUnavailable: The caller has the tokens already.
        """
        adapter = generation.request.adapter
        has_other_weights = not adapter and answer_checks.has_other_weights(
            answer, generation.version_name
        )
        if oldest >= generation.request.min_version and not has_other_weights:
            return False
        self._expect_new_entry(server, answer.newest_version, adapter)
        is_withheld = server.protocol.streams_versions and not has_other_weights
        answer_checks.check_stream(generation.request, answer, is_withheld=is_withheld)
        return True

    def _expect_new_entry(
        self, server: LLMServerState, label: str | int | None, adapter: str = ""
    ) -> None:
        """Set a version of a server, and ignore its entry until it is renewed."""
        server.set_label(label, adapter)
        server.mark_entry_stale()
        self._stats["stale_answers"] += 1
        self._directory.request_refresh()

    def _warn_without_routing(self, generation: GenerationState, server: LLMServerState) -> None:
        """Log once if a finished generation lacks the record of experts that it needs."""
        needs_routing = self._experts is not None
        if needs_routing and not generation.routing and not self._warned_of_routing:
            self._warned_of_routing = True
            logger.warning("server reports no experts", id=server.id, fix=NO_ROUTING)

    # ------------------------------------------------------------ failures and retries

    async def _retry(
        self,
        generation: GenerationState,
        server: LLMServerState,
        counter: str,
        reason: str,
    ) -> None:
        """Count a failure of the server, and back off; the next attempt prefers another server.

        Raises:
            ServerUnavailable: the request has had MAX_SERVER_ERRORS server errors.
        """
        generation.failed_at = server
        self._stats[counter] += 1
        if generation.errors >= MAX_SERVER_ERRORS:
            raise ServerUnavailable(
                f"{server.address}: {reason} ({generation.errors} errors in all)"
            )
        logger.debug(counter, request=generation.request.request_id, error=reason)
        await self._back_off(generation)

    async def _back_off(self, generation: GenerationState) -> None:
        """Wait before the next attempt: exponential in failed attempts, at most to the deadline."""
        generation.failures += 1
        if generation.failures > 1:
            left_s = generation.deadline - asyncio.get_running_loop().time()
            pause_s = min(MAX_BACKOFF_S, 0.025 * 2**generation.failures)
            await asyncio.sleep(max(0.0, min(pause_s, left_s)))

    async def _wait_for_server(self, generation: GenerationState) -> LLMServerState:
        """Return a server that can take the request; wait for one until the deadline."""
        request = generation.request
        begin = time.perf_counter()
        self._stats["server_waits"] += 1
        self._directory.request_refresh()
        try:
            with self._wait(generation, "llm_server"):
                while True:
                    await self._directory.changed()
                    server = self._router.pick(
                        request.group_id,
                        request.min_version,
                        adapter=request.adapter,
                    )
                    if server is not None:
                        return server
        except DeadlineError as error:
            reason = self._router.no_server_reason(request.min_version, request.adapter)
            raise ServerUnavailable(f"{request.request_id}: {reason}") from error
        finally:
            self._stats["server_wait_s"] += time.perf_counter() - begin

    async def switch_adapter(self, server_id: str, adapter: str, label: str) -> None:
        server = self._router.servers.get(server_id)
        if server is None:
            return
        server.version_names[adapter] = label
        self._directory.request_refresh()  # requests may wait for this version
        rids = [
            sent.rid
            for sent in server.waits.values()
            if sent.adapter == adapter and sent.version_name != label
        ]
        await asyncio.gather(*[self._abort(server, rid) for rid in rids])

    def _abort(self, server: LLMServerState, rid: str) -> asyncio.Task[None]:
        """Abort the request at the server, which may notice a closed connection seconds later."""

        async def send() -> None:
            pool = self._abort_pools[server.id]
            path, body = server.protocol.abort_request(rid)
            try:
                async with asyncio.timeout(self.config.connect_timeout_s):
                    await pool.request(server.address + path, server.headers, body)
            except OSError as error:
                logger.debug("abort failed", rid=rid, error=str(error))

        task = asyncio.create_task(send(), name=f"abort of {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        return task
