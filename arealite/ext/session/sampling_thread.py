"""The servers of a session and their client, in an event loop of its own thread.

User code can therefore block its own event loop, and sampling goes on.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from arealite.api.episode import Seat
from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.llm import LLMClient, LLMRequest, SamplingConfig, clients
from arealite.api.publisher import PublishReport
from arealite.api.server_protocol import SERVER_START_S
from arealite.api.tokenizer import Tokenizer
from arealite.base.errors import RoleError
from arealite.cli import configs
from arealite.ext.evaluation.own_servers import own_servers
from arealite.ext.session.adapter_publisher import AdapterPublisher
from arealite.ext.session.adapter_server import StagedAdapter
from arealite.ext.session.calls import AdapterRemoved
from arealite.ext.session.sample_ledger import GROUP, RecordedAnswer, SampleAgent, SampleLedger
from arealite.ext.session.sample_rows import PromptScores, Sample, TokenizedPrompt, top_tokens
from arealite.impl.publisher.loop_thread import LoopThread
from arealite.system.health.waits import cancel_all
from arealite.system.names.name_registry import NameRegistry, with_externals

CLOSE_S = 30.0
"""Longest wait for aborts and for the end of servers; they get SIGKILL before."""


class SamplingThread:
    """Starts the servers, waits for them, and samples."""

    def __init__(
        self,
        config: ExperimentConfig,
        tokenizer: Tokenizer,
        *,
        ledger: SampleLedger | None,
        on_lost: Callable[[], None],
    ) -> None:
        """Start the servers.

        Args:
            config: The session's options.
            tokenizer: The tokenizer of its model.
            ledger: Stores each sample before a call returns it.
            on_lost: Called in the thread if the servers end before `close`.
        """
        self._ledger = ledger
        self._config = config
        self._tokenizer = tokenizer
        self._logs = run_paths(config).logs
        self._client: LLMClient
        self._is_closing = False
        self._main_task: asyncio.Task[Any] | None = None
        self.ready: Future[None] = Future()
        """Resolves when all servers that the session starts, or one other server, are registered;
        with an error if a server cannot be started, or if there is none in time."""
        self.is_lost = False
        """Whether the servers have ended, or are about to, without `close`."""
        self._on_lost = on_lost
        self._groups = itertools.count(ledger.next_group if ledger else 0)
        self._samplings = dict[asyncio.Task[Any], str]()
        """The adapter of each open `sample`."""
        self._adapters = AdapterPublisher(config)
        self._thread = LoopThread("session servers", self._main)
        self._thread.ended.add_done_callback(self._on_end)

    def check(self) -> None:
        """Raise the error that has ended the servers, if they have ended."""
        if self.is_lost:
            self._thread.ended.result()

    def _on_end(self, ended: Future[None]) -> None:
        error = ended.exception()
        if not self.ready.done():
            self.ready.set_exception(error or RoleError("the session was closed at its start."))
        if self.is_lost:
            self._on_lost()

    def submit(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling: SamplingConfig,
        *,
        num_samples: int,
        min_version: int,
        adapter: str,
        seed: int | None,
        is_trained_on: bool,
    ) -> Future[list[Sample]]:
        """Begin to sample `num_samples` answers to each prompt; see `Session.sample`."""
        requests = list[tuple[TokenizedPrompt, LLMRequest]]()
        for prompt in prompts:
            group = f"{GROUP}{next(self._groups)}"
            for member in range(num_samples):
                request = LLMRequest(
                    request_id=f"{group}/{member}",
                    group_id=group,
                    input_ids=prompt.ids,
                    sampling=sampling,
                    min_version=min_version,
                    adapter=adapter,
                    seed=None if seed is None else seed + len(requests),
                )
                requests.append((prompt, request))
        work = self._sample(requests, adapter, is_recorded=is_trained_on)
        return asyncio.run_coroutine_threadsafe(work, self._thread.loop)

    def publish_adapter(
        self,
        name: str,
        version: int,
        staged: Future[StagedAdapter],
        confirm: Callable[[int], None],
    ) -> Future[PublishReport]:
        """Begin to send an adapter to all servers; see `AdapterPublisher.publish`."""
        work = self._adapters.publish(name, version, staged, confirm)
        return asyncio.run_coroutine_threadsafe(work, self._thread.loop)

    def serve_adapter(
        self,
        name: str,
        version: int,
        folder: Path,
        confirm: Callable[[int], None],
    ) -> Future[PublishReport]:
        """Begin to load an adapter of a folder at all servers; see `Session.serve`."""
        adapter = StagedAdapter(name=name, version=version, folder=folder, row=[], scores_T=None)
        staged = Future[StagedAdapter]()
        staged.set_result(adapter)
        return self.publish_adapter(name, version, staged, confirm)

    def score(
        self,
        tokens: list[int],
        sampling: SamplingConfig,
        *,
        targets: list[list[int]],
        min_version: int,
        adapter: str,
    ) -> Future[PromptScores]:
        """Begin to score the tokens of a prompt; see `Session.score`."""
        group = f"{GROUP}{next(self._groups)}"
        request = LLMRequest(
            request_id=f"{group}/score",
            group_id=group,
            input_ids=tokens,
            sampling=sampling,
            min_version=min_version,
            adapter=adapter,
            scores_prompt=True,
            target_ids=targets,
        )
        return asyncio.run_coroutine_threadsafe(self._score(request), self._thread.loop)

    def remove_adapter(self, name: str, removed: Future[None]) -> Future[None]:
        """Begin to end an adapter's open samples, and to unload it at the servers."""
        work = self._remove_adapter(name, removed)
        return asyncio.run_coroutine_threadsafe(work, self._thread.loop)

    def close(self) -> None:
        """Abort open requests, and end the servers that the session started."""
        self._is_closing = True
        self._thread.stop(self._cancel, CLOSE_S)

    def _cancel(self) -> None:
        if self._main_task is not None:
            self._main_task.cancel()

    # ------------------------------------------------------------ in the thread

    async def _main(self) -> None:
        self._main_task = asyncio.current_task()
        if self._is_closing:
            return
        num_servers = self._config.launcher.llm_servers
        file = configs.write_server(self._config, run_paths(self._config).root)
        ranks = self._config.launcher.trainer_ranks
        async with own_servers(num_servers, file, ranks=ranks):
            await with_externals(self._config, self._serve(num_servers))

    async def _serve(self, num_servers: int) -> None:
        client_config = self._config.trainer.ppo.collector.client
        self._client = clients.get(client_config.type)(self._config, client_config)
        self._adapters.open(self._client.switch_adapter)
        try:
            await self._client.start()
            await NameRegistry.of(self._config).wait(
                "llm_server",
                count=max(1, num_servers),
                seconds=SERVER_START_S,
                owner="session",
            )
            if not self.ready.done():  # or the user has given up
                self.ready.set_result(None)
            await self._adapters.watch()  # until it is cancelled
        finally:
            self.is_lost = not self._is_closing
            await cancel_all(self._samplings)
            await self._client.close()
            await self._adapters.close()

    async def _remove_adapter(self, name: str, removed: Future[None]) -> None:
        for task, adapter in self._samplings.items():
            if adapter == name:
                task.cancel(f"sample: the adapter '{name}' was removed.")
        await self._adapters.remove(name, removed)

    async def _sample(
        self,
        requests: Sequence[tuple[TokenizedPrompt, LLMRequest]],
        adapter: str,
        *,
        is_recorded: bool,
    ) -> list[Sample]:
        sampling_task = asyncio.current_task()
        assert sampling_task is not None
        self._samplings[sampling_task] = adapter
        sampling_task.add_done_callback(self._samplings.pop)
        generations = list[asyncio.Task[RecordedAnswer]]()
        try:
            async with asyncio.TaskGroup() as tasks:
                for prompt, request in requests:
                    generations.append(tasks.create_task(self._generate(prompt, request)))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        except asyncio.CancelledError as cancellation:
            for reason in cancellation.args:
                raise AdapterRemoved(reason) from None
            if self.is_lost:
                text = f"sample: the servers have ended. Their logs are in {self._logs}."
                raise RoleError(text) from None
            raise
        answers = [generation.result() for generation in generations]
        if self._ledger is not None and is_recorded:
            return self._ledger.add_samples(answers)
        return [answer.sample for answer in answers]

    async def _score(self, request: LLMRequest) -> PromptScores:
        response = await self._client.generate(request)
        return PromptScores.of(response, num_top=request.sampling.top_logprobs)

    async def _generate(self, prompt: TokenizedPrompt, request: LLMRequest) -> RecordedAnswer:
        agent = SampleAgent(None, client=self._client, tokenizer=self._tokenizer, seat=Seat())
        begin_s = time.perf_counter()
        turn = agent.record.begin(request.input_ids, request.sampling)
        response = await self._client.generate(request)
        agent.record.seconds_generating = time.perf_counter() - begin_s
        agent.record.add(turn, response)
        num_tokens = len(response.output_ids)
        sample = Sample(
            prompt=prompt.prompt,
            prompt_ids=request.input_ids,
            output_ids=response.output_ids,
            logprobs=response.logprobs,
            versions=response.versions,
            stop_reason=response.stop_reason,
            text=self._tokenizer.decode(response.output_ids, skip_special_tokens=True),
            temperature=request.sampling.temperature,
            group=request.group_id,
            adapter=request.adapter,
            routing=response.routing,
            top_ids=top_tokens(response.top_ids, np.int32, num_tokens),
            top_logprobs=top_tokens(response.top_logprobs, np.float32, num_tokens),
        )
        return RecordedAnswer(sample, agent)
