"""`arealite.session`: the parts of a training loop as calls, for a loop of your own."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from arealite.api.agent import load_tokenizer
from arealite.api.engine import Sequence, Stats
from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.llm import SamplingConfig
from arealite.api.publisher import PublishReport
from arealite.base.errors import UserError
from arealite.base.folder_checks import check_name
from arealite.base.model_folder import vocab_size
from arealite.cli import preflight
from arealite.ext.notebook.command_line import checked
from arealite.ext.session.adapter_records import AdapterRecord, forget_if_failed
from arealite.ext.session.added_adapter import new_adapter
from arealite.ext.session.call_loss import (
    OwnLoss,
    adapters_of,
    changed,
    changed_optimizer,
    check_staleness,
    make_loss,
)
from arealite.ext.session.calls import DEFAULT, Call, Calls, results_ahead
from arealite.ext.session.policy import Policy
from arealite.ext.session.ranks import check_sendable
from arealite.ext.session.recorded_policy import RecordedPolicy
from arealite.ext.session.sample_ledger import SampleLedger
from arealite.ext.session.sample_rows import (
    PromptInput,
    PromptScores,
    Sample,
    check_targets,
    make_rows,
    tokenized,
)
from arealite.ext.session.sampling_thread import SamplingThread
from arealite.ext.session.server_updates import ServerUpdates
from arealite.ext.session.start_checks import (
    check_adapters,
    check_no_ledger,
    check_sampling,
    check_served,
    prepared,
)

T = TypeVar("T")


class Session:
    """A model that is trained in this process and sampled by servers; see `arealite.session`.

    Each call returns at once with a `Call`, the future of its result. Engine calls (`forward`,
    `forward_backward`, `optim_step`, `publish`, `save`, `load`, `export`) run one after the other,
    in the order of the calls; samples are drawn meanwhile. Wrong arguments raise UserError at
    once. A call that fails raises when it is awaited, or else at the next call or await for the
    same adapter, or at the end of the `async with` block. Engine calls for the adapter that were
    made before that do not run.
    """

    def __init__(
        self,
        model: str | Path,
        user_words: Seq[str],
        adapters: Seq[str] = (),
        *,
        has_ledger: bool = False,
    ) -> None:
        self._model = model
        self._words = user_words
        self._first_adapters = adapters
        self._has_ledger = has_ledger
        self._ledger: SampleLedger | None = None
        self._resources = ExitStack()
        self._policy = Policy()
        self._calls = Calls(on_failure=lambda adapters: self._policy.drop_gradient(adapters))
        self._updates = ServerUpdates(self._calls)
        self._records = dict[str, AdapterRecord]()
        """The record of each adapter, by its name; "": of the default weights."""
        self._next_versions = dict[str, int]()
        """The first version of an adapter that gets the name of a removed one."""
        self._config: ExperimentConfig
        self.vocabulary_size = 0
        """Number of the model's token ids; 0: unknown, or not started."""
        self.context_length = 0
        """Largest number of tokens of prompt and answer; 0: unknown, or not started."""
        self._sampler: SamplingThread | None = None

    # ------------------------------------------------------------ start and end

    async def __aenter__(self) -> Self:
        return await self._start()

    def __await__(self) -> Generator[Any, None, Self]:
        return self._start().__await__()

    async def _start(self) -> Self:
        """Check the input; start servers and load the model at the same time."""
        try:
            self._config = await asyncio.to_thread(checked, self._prepare)
            optimizer = self._config.trainer.ppo.optimizer
            first = self._ledger.start.step if self._ledger else 0
            self._records[""] = AdapterRecord(optimizer=optimizer, version=first)
            loading = self._calls.submit(self._policy.start, self._config)
            path = self._config.model.path
            self._tokenizer = await asyncio.to_thread(load_tokenizer, path)
            self._sampler = SamplingThread(
                self._config,
                self._tokenizer,
                ledger=self._ledger,
                on_lost=self._policy.stop_publisher,
            )
            await asyncio.wrap_future(loading)
            await asyncio.wrap_future(self._sampler.ready)
            if not self._is_base_frozen or self._config.llm_server.addresses:
                await self._publish("")  # servers of addresses may have other weights
            for name in self._first_adapters:
                await self.add_adapter(name)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(self._end, cancel=True))
            raise
        return self

    def _prepare(self) -> ExperimentConfig:
        """Return the checked options, and lock the trial's folders."""
        config, model = prepared(
            self._model, self._words, self._resources, has_ledger=self._has_ledger
        )
        self.vocabulary_size = vocab_size(model) or 0
        self.context_length = min(preflight.contexts(config, model, []), default=0)
        check_adapters(config, self._first_adapters)
        if self._has_ledger:
            self._ledger = SampleLedger(config)
            self._resources.callback(self._ledger.close)
            self._policy = RecordedPolicy(self._ledger)
        return config

    async def close(self) -> None:
        """Finish all engine calls, cancel samples, and end the servers that the session started.

        Raises:
            Exception: A call has failed, and nobody has waited for it.
        """
        await asyncio.shield(asyncio.to_thread(self._end, cancel=False))
        self._calls.check()

    async def __aexit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            await self.close()
        else:
            await asyncio.shield(asyncio.to_thread(self._end, cancel=True))

    def _end(self, *, cancel: bool) -> None:
        """Release everything; `cancel`: without the engine calls that have not begun."""
        is_lost = self._sampler is not None and self._sampler.is_lost
        if cancel or is_lost:
            self._policy.stop_publisher()
        self._calls.close(cancel=cancel)
        self._updates.close(cancel=cancel)
        try:
            self._policy.close()
        finally:
            if self._sampler is not None:
                self._sampler.close()
                self._sampler = None
            self._resources.close()

    @property
    def _is_base_frozen(self) -> bool:
        """Whether the default weights are the base model."""
        lora = self._config.trainer.ppo.engine.fsdp.lora
        return lora.only_named and not lora.rank and not self._config.model.adapter

    def _check(self, adapters: Collection[str] = DEFAULT) -> SamplingThread:
        """Return the sampling thread of a started session.

        Args:
            adapters: The adapters of the call.

        Raises:
            Exception: The session is not running, there is no such adapter, a server has ended, or
                an earlier call for one of the adapters has failed and nobody has waited for it.
        """
        if self._sampler is None:
            raise UserError(
                "the session is not running. Use `async with arealite.session(…) as s`."
            )
        for name in adapters:
            self.adapter_version(name)
        self._sampler.check()
        self._calls.check(adapters)
        return self._sampler

    def _check_trained(self, call: str, adapters: Collection[str]) -> None:
        """Raise UserError if a call would train or read the weights of a frozen model."""
        for name in adapters:
            if name in self._records and not self._records[name].is_trained:
                raise UserError(f"{call}: servers have the adapter '{name}' from a folder only.")
        if "" in adapters and self._is_base_frozen:
            raise UserError(
                f"{call}: the model itself is frozen. Name one of the adapters "
                f"({', '.join(self.adapters)}), or start the session with lora=32."
            )

    def _begin(self, adapters: Collection[str], job: Callable[..., T], *args: object) -> Call[T]:
        """Begin an engine call for some adapters."""
        self._check(adapters)
        future = self._calls.submit(job, *args, adapters=adapters)
        return Call(future, self._calls, adapters=adapters)

    # ------------------------------------------------------------ adapters

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that train, in the order in which they were added."""
        records = self._records.items()
        return tuple(name for name, record in records if name and record.is_trained)

    def add_adapter(
        self,
        name: str,
        *,
        rank: int | None = None,
        alpha: float | None = None,
        targets: Seq[str] | None = None,
        seed: int | None = None,
        folder: Path | None = None,
        optimizer: Mapping[str, object] | None = None,
    ) -> Call[PublishReport]:
        """Add an adapter with weights, optimizer and versions of its own, and publish it.

        It starts as the base model, as version 0, or after the last version of an earlier adapter
        of this name. Other calls may name it at once.

        Args:
            name: Letters, digits, "_" and "-".
            rank: Its rank; None: `lora` of the session, or 32.
            alpha: The adapter is scaled by alpha / rank; None: `engine.fsdp.lora.alpha`.
            targets: Names of the layers; None: `engine.fsdp.lora.targets`.
            seed: Of its first values; None: that of the session.
            folder: An adapter that peft wrote, with which it starts in place of these options.
            optimizer: Options of `optimizer` for it, as in {"beta2": 0.99}.

        Raises:
            UserError: The name or an option is wrong, or the name is taken; in the call: the model
                or a server cannot have the adapter.
        """
        self._check([])
        check_no_ledger("add_adapter", has_ledger=self._has_ledger)
        if name in self._records:
            raise UserError(f"add_adapter: there is an adapter '{name}' already. Use another name.")
        lora = {"rank": rank, "alpha": alpha, "targets": targets and [*targets]}
        adapter = new_adapter(
            self._config, name, lora, seed=seed, folder=folder, optimizer=optimizer
        )
        first = self._next_versions.get(name, 0)
        options = adapter.training.optimizer
        self._records[name] = AdapterRecord(optimizer=options, version=first, confirmed=first)
        added = self._calls.submit(self._policy.add_adapter, adapter, adapters=[name])
        forget_if_failed(self._records, name, added)
        return self._publish(name)

    def serve(self, name: str, folder: Path) -> Call[PublishReport]:
        """Load an adapter that peft wrote at the servers, for samples, until `remove_adapter`.

        Args:
            name: A name that no other adapter has.
            folder: Its files, which must stay: a server that restarts reads them again.

        Raises:
            UserError: The name is taken, or the folder has no adapter.
            RoleError: In the call: no server takes the adapter.
        """
        check_no_ledger("serve", has_ledger=self._has_ledger)
        check_served(name, folder)
        if name in self._records:
            raise UserError(f"serve: there is an adapter '{name}' already. Use another name.")
        sampler = self._check()
        first = self._next_versions.get(name, 0)
        record = AdapterRecord(is_trained=False, version=first, confirmed=first)
        self._records[name] = record
        loaded = self._updates.add(sampler.serve_adapter(name, first, folder, record.confirm))
        forget_if_failed(self._records, name, loaded)
        return Call(loaded, self._calls, adapters=[name])

    def remove_adapter(self, name: str) -> Call[None]:
        """Remove an adapter, also at the servers; its open samples fail.

        Raises:
            UserError: There is no such adapter.
        """
        sampler = self._check([name])
        record = self._records.pop(name)
        self._next_versions[name] = record.version + 1
        removed = self._calls.submit(self._policy.remove_adapter, name, adapters=[])
        unloaded = self._updates.add(sampler.remove_adapter(name, removed))
        return Call(unloaded, self._calls, adapters=[name])

    # ------------------------------------------------------------ samples

    @property
    def version(self) -> int:
        """The version that the newest `publish` has given the weights, or that of the start."""
        return self.adapter_version()

    def adapter_version(self, name: str = "") -> int:
        """Return the version that the newest `publish` has given an adapter.

        Raises:
            UserError: There is no such adapter.
        """
        if name not in self._records:
            known = ", ".join(self.adapters) or "(none)"
            raise UserError(f"there is no adapter '{name}'. Adapters: {known}.")
        return self._records[name].version

    def sample(
        self,
        prompts: PromptInput | Seq[PromptInput],
        *,
        n: int = 1,
        max_tokens: int | None = None,
        adapter: str = "",
        seed: int | None = None,
        is_trained_on: bool = True,
        **options: Any,
    ) -> Call[list[Sample]]:
        """Sample answers from the newest weights that the servers have confirmed, or newer ones.

        A `publish` interrupts open answers; they continue under the new weights. Cancelling the
        call aborts its requests.

        Args:
            prompts: Texts, lists of token ids, or lists of chat messages; or one of them.
            n: Answers to each prompt.
            max_tokens: Longest answer in tokens; None: `collector.sampling.max_new_tokens`.
            adapter: Name of the adapter that samples.
            seed: Makes the answers reproducible on embedded servers: answer k of the call is
                sampled with seed + k.
            is_trained_on: False: the samples are not for training, and may be truncated (top_p,
                top_k, min_p).
            options: Other options of `collector.sampling`, such as temperature=0.7, stop=["\\n"].

        Returns:
            The answers to the first prompt, then those to the second, and so on.

        Raises:
            UserError: A prompt or an option is wrong.
            EpisodeError: In the call: a prompt does not fit the context of a server, or no server
                has finished the request in time.
        """
        sampler = self._check([adapter])
        if n < 1:
            raise UserError(f"sample: n={n}: use at least 1.")
        if max_tokens is not None:
            options["max_new_tokens"] = max_tokens
        sampling = changed(self._config.trainer.ppo.collector.sampling, "sample", options)
        if is_trained_on:
            check_sampling(sampling)
        future = sampler.submit(
            tokenized(prompts, self._tokenizer),
            sampling,
            num_samples=n,
            min_version=self._records[adapter].confirmed,
            adapter=adapter,
            seed=seed,
            is_trained_on=is_trained_on,
        )
        return Call(future, self._calls, adapters=[adapter], is_cancelled_with_its_wait=True)

    def score(
        self,
        prompt: PromptInput,
        *,
        adapter: str = "",
        top: int = 0,
        targets: Seq[Seq[int]] = (),
    ) -> Call[PromptScores]:
        """Return the log-probabilities of a prompt's tokens, as the servers compute them.

        Args:
            prompt: A text, token ids, or chat messages.
            adapter: Name of the adapter that scores.
            top: K, the number of most probable tokens to return at each place.
            targets: Tokens to score at each place, [T - 1][M]; -1: none.

        Raises:
            UserError: The prompt or an option is wrong.
            EpisodeError: In the call: see `sample`.
        """
        sampler = self._check([adapter])
        sampling = changed(SamplingConfig(max_new_tokens=1), "score", {"top_logprobs": top})
        (tokens,) = tokenized([prompt], self._tokenizer)
        check_targets(targets, len(tokens.ids), self.vocabulary_size)
        future = sampler.score(
            tokens.ids,
            sampling,
            targets=[[*row] for row in targets],
            min_version=self._records[adapter].confirmed,
            adapter=adapter,
        )
        return Call(future, self._calls, adapters=[adapter], is_cancelled_with_its_wait=True)

    def batches(
        self,
        prompts: Iterable[PromptInput | Seq[PromptInput]],
        *,
        ahead: int | None = None,
        **options: Any,
    ) -> AsyncIterator[list[Sample]]:
        """Return the samples of each batch of prompts, while `ahead` further batches are sampled.

        If one `publish` is awaited for each batch, no token is older than `ahead` versions.

        Args:
            prompts: Batches of prompts. A batch is read when its sampling begins.
            ahead: Number of batches; None: `max_staleness`.
            options: Options of `sample`.
        """
        num_ahead = self._config.trainer.ppo.max_staleness if ahead is None else ahead
        return results_ahead(partial(self.sample, **options), prompts, num_ahead)

    def rows(
        self,
        samples: Seq[Sample],
        rewards: Seq[float | None],
        *,
        advantage: str | None = None,
        **options: Any,
    ) -> list[Sequence]:
        """Return training rows: each sample with its advantage relative to its prompt's samples.

        Args:
            samples: The samples.
            rewards: One for each. None: no reward; the sample gets no row.
            advantage: grpo, dr_grpo, rloo, …; None: that of the options.
            options: Other options of `advantage`.

        Raises:
            UserError: The numbers of samples and rewards differ, or an option is wrong.
        """
        if advantage is not None:
            options["type"] = advantage
        config = changed(self._config.trainer.ppo.advantage, "rows", options)
        return make_rows(samples, rewards, config)

    # ------------------------------------------------------------ training

    def forward(self, rows: Seq[Sequence], *, field: str = "") -> Call[list[np.ndarray]]:
        """Compute the logprobs of rows under the weights that are trained, without gradient.

        Args:
            rows: The rows.
            field: The result also becomes this field of the rows: "prox_logprobs", if several
                updates train on the rows and the loss clips the ratio to the weights before them.

        Returns:
            Logprobs at the row's temperature, float32 [T] for each row, 0 outside `loss_mask`.
        """
        return self._begin(adapters_of(rows), self._policy.logprobs, [*rows], field)

    def forward_backward(
        self,
        rows: Seq[Sequence],
        loss: str | OwnLoss | None = None,
        *,
        record_outputs: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Call[Stats]:
        """Add the gradient of a loss to that of the calls since the last `optim_step`.

        If the rows have no field `loss_weight`, the loss is the mean over their loss tokens (or
        `loss.reduction`): gradients of several calls are then a sum of means. If they have no
        field `prox_logprobs`, a decoupled loss takes them from this pass and sets the field.

        Each row trains its adapter. The mean is over the loss tokens of the adapter's rows.

        Args:
            rows: Rows of `Session.rows`, of `Sample.row`, or your own. Do not change them before
                the call has ended.
            loss: An objective (ppo, cispo, sapo, …); a preset (grpo, gspo, dapo, …), of which the
                loss and its KL penalty are used; or a function of a `LossInput` that returns a
                loss, or a loss and a dict of sums. None: `loss` of the options.
            record_outputs: {output: field}: outputs of the pass, such as `logprobs`, that become
                fields of the rows.
            options: Options of the loss, as in eps_high=0.28.

        Returns:
            The loss's sums over tokens, each weighted by `loss_weight`, such as `loss`, `ratio` and
            `entropy`; and `tokens`, `microbatches`, `computed_tokens`. If the call fails, the whole
            gradient since the last `optim_step` is dropped.

        Raises:
            UserError: There are no rows, a row is older than `max_staleness`, or the loss is
                wrong; in the call: a row lacks a field, or its sample is not in the ledger, is
                filtered there, or was trained by an ended step.
        """
        ready = make_loss(self._config, loss, options)
        check_sendable(ready, self._config)
        if record_outputs:
            recorded = {**(ready.record_outputs or {}), **record_outputs}
            ready = replace(ready, record_outputs=recorded)
        adapters = adapters_of(rows)
        self._check(adapters)
        self._check_trained("forward_backward", adapters)
        check_staleness(rows, self._records, limit=self._config.trainer.ppo.max_staleness)
        return self._begin(adapters, self._policy.forward_backward, [*rows], ready)

    def evaluate(
        self,
        rows: Seq[Sequence],
        loss: OwnLoss,
        *,
        record_outputs: Mapping[str, str] | None = None,
    ) -> Call[Stats]:
        """Compute a loss as `forward_backward` does, without gradient."""
        ready = replace(make_loss(self._config, loss, {}), record_outputs=record_outputs)
        return self._begin(adapters_of(rows), self._policy.evaluate, [*rows], ready)

    def optim_step(
        self,
        lr: float | None = None,
        *,
        adapter: str = "",
        **options: object,
    ) -> Call[Stats]:
        """Apply the gradient of all `forward_backward` calls since the last update.

        Args:
            lr: Learning rate; None: that of the schedule (`lr`, `optimizer`, `total_steps`).
            adapter: The adapter to update.
            options: Options of `optimizer` from now on, as in clip_grad_norm=0.5.

        Returns:
            `grad_norm` before clipping, `lr`, and `skipped_update`: 1 if the norm is not finite;
            the update was then skipped.

        Raises:
            UserError: `lr` is negative, or an option is wrong; in the call: there is no gradient.
        """
        if lr is not None and not 0 <= lr < float("inf"):
            raise UserError(f"optim_step: lr={lr}: use a number of at least 0.")
        self._check_trained("optim_step", [adapter])
        self._check([adapter])
        record = self._records[adapter]
        record.optimizer = changed_optimizer(record.optimizer, options)
        record.is_updated = True
        return self._begin([adapter], self._policy.optim_step, adapter, lr, record.optimizer)

    def drop_gradient(self, *, adapter: str = "") -> Call[None]:
        """Drop the gradient of all `forward_backward` calls since the last update."""
        return self._begin([adapter], self._policy.drop_gradient, [adapter])

    def publish(self, *, adapter: str = "") -> Call[PublishReport]:
        """Update all servers to the weights that are trained, as their next version.

        Servers pause, load the weights, and continue open answers after their last token. Later
        engine calls run during the update. With a ledger, this ends a step.

        Args:
            adapter: The adapter to send; only its answers are interrupted.

        Returns:
            The costs in seconds; `version`.

        Raises:
            RoleError: In the call: no server has confirmed the version.
        """
        self._check([adapter])
        self._check_trained("publish", [adapter])
        self._records[adapter].next_version()
        return self._publish(adapter)

    def _publish(self, name: str) -> Call[PublishReport]:
        """Begin to send an adapter, or the default weights, as the version of its record."""
        record = self._records[name]
        version = record.version
        sampler = self._check([name])
        if name:
            staged = self._calls.submit(self._policy.stage_adapter, name, version, adapters=[name])
            pushed = sampler.publish_adapter(name, version, staged, record.confirm)
            self._updates.add(pushed)
        else:
            pushed = self._updates.push(
                self._policy, version, confirm=record.confirm, check_servers=sampler.check
            )
        return Call(pushed, self._calls, adapters=[name])

    # ------------------------------------------------------------ files

    def save(self, name: str | Path, *, adapter: str = "") -> Call[Path]:
        """Write the weights and the optimizer's state under a name; an older state is replaced.

        With a ledger, this ends a step.

        Args:
            name: The name; or the folder, as a Path.
            adapter: The adapter to write.

        Returns:
            The folder, `runs/arealite/TRIAL/checkpoints/NAME` for a name. It is complete or absent.

        Raises:
            UserError: The name is no file name.
        """
        self._check_trained("save", [adapter])
        folder = self._state_folder(name)
        saved = self._begin([adapter], self._policy.save, folder, adapter)
        if self._has_ledger:
            self._records[adapter].end_step()
        return saved

    def load(self, name: str | Path, *, adapter: str = "") -> Call[None]:
        """Read a state that `save` wrote, in this session or in an earlier one of the same trial.

        The gradient is dropped. Servers keep their weights until `publish`. A ledger undoes the
        steps that the state does not have.

        Args:
            name: The name; or the folder, as a Path.
            adapter: The adapter that gets the state. It may be of another adapter of equal shapes.

        Raises:
            UserError: The name is no file name; in the call: there is no such state, or it is of
                another model or optimizer, or of steps that a ledger has undone.
        """
        self._check_trained("load", [adapter])
        folder = self._state_folder(name)
        return self._begin([adapter], self._policy.load, folder, adapter)

    def export(self, folder: str | Path, *, adapter: str = "") -> Call[None]:
        """Write the model as a Hugging Face folder, with its adapter if there is one.

        Args:
            folder: The folder.
            adapter: The adapter to write alone, as peft does.
        """
        return self._begin([adapter], self._policy.export, Path(folder).absolute(), adapter)

    def _state_folder(self, name: str | Path) -> Path:
        if isinstance(name, Path):
            return name.absolute()
        check_name("name", name)
        return run_paths(self._config).checkpoints / name
