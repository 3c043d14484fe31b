"""The types of the hooks: functions of extensions that the core calls at fixed moments.

The name of a hook is a group of entries; `entries.hooks` returns its functions in their order.
"""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from arealite.api.engine_config import Head
from arealite.api.engine_extension import EngineExtension, EngineSetup
from arealite.api.fields import Package
from arealite.api.logger import MetricLogger
from arealite.api.observation import ChatMessage
from arealite.api.publisher import PolicyProof
from arealite.api.task import Task, TaskSampler
from arealite.api.tokenizer import Tokenizer
from arealite.base.model_folder import Shapes

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from arealite.api.engine import LossFn, Stats, TrainEngine
    from arealite.api.experiment_config import ExperimentConfig, ServerConfig
    from arealite.api.trainer import PPOConfig
    from arealite.api.trajectory_tree import TrajectoryTree

TokenizerReader = Callable[[str], Tokenizer | None]
"""Hook `tokenizer_reader`: read the tokenizer of a Hugging Face folder without transformers.

Each process calls it when it needs a tokenizer, with the folder's path. The first result that is
not None is used; after None from all, transformers reads the folder. An error ends the call."""


class TextAfterAnswer(Protocol):
    """Renders the messages after an answer, without the answer itself."""

    def __call__(self, new: Sequence[ChatMessage], *, has_tools: bool, last_id: int) -> str:
        """Return the text from the end of the answer to the header of the next one.

        Args:
            new: The messages after the answer.
            has_tools: Whether the conversation has tools.
            last_id: The last sampled token of the answer.

        Raises:
            UserError: The chat template refuses the messages.
        """
        ...


TextAfterAnswerMaker = Callable[[Tokenizer], TextAfterAnswer | None]
"""Hook `text_after_answer`: return what continues conversations with a tokenizer, or None.

An agent calls it before the second prompt of a conversation. None means that the chat template can
render the sampled answers; GPT-OSS' template refuses them. The first result that is not None is
used. An error fails the episode."""

StageParser = Callable[[Any, Sequence[str]], Sequence["ExperimentConfig"] | None]
"""Hook `stages`: parse a command line of `train` that has several runs, or None.

`train` and `check` call it with their `CommandLine` and the words after the command. The first
result that is not None is used: the config of each run. A UserError ends the command."""

ModelFormat = Callable[[str], Path | None]
"""Hook `model_format`: convert a model of another format into a Hugging Face folder.

Each command calls it with `model.path` when it reads its config. It returns None if the path is not
of its format; the first other result becomes `model.path`. A UserError ends the command."""

ModelCheck = Callable[["ExperimentConfig", dict[str, Any], Shapes], None]
"""Hook `model_check`: check options that depend on the model's folder, without torch.

Each start calls it before it reads data, with the config, the model's config.json and the shape of
each tensor. A UserError refuses the run."""

ModuleCheck = Callable[["ExperimentConfig", Any, Head], None]
"""Hook `module_check`: check options that depend on the model's modules, or change these.

`arealite check` and `train --dry-run` call it with the config, the model without weights (a module
of torch on the meta device) and its head. A UserError ends the command."""


RunPackages = Callable[["ExperimentConfig"], Iterable[Package]]
"""Hook `packages`: return the optional packages that options of a run need.

Each start calls it with the config, before it reads a file. `option` of a package is the whole
option with its value. A run is refused if a module is not installed."""


ServerOverrides = Callable[["ExperimentConfig"], Mapping[str, object]]
"""Hook `server_options`: return options of the servers that a run starts, by key.

Each start calls it. Options of `launcher.server_args` have precedence. A UserError refuses the
run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The data that the checks of a start have read."""

    model: dict[str, Any]
    """config.json of the model."""
    shapes: Shapes
    """The shape of each tensor of the model, by name."""
    free_bytes: int
    """Free space of the run folder's disk."""
    num_rows: int = 0
    """Number of training rows of an offline trainer."""
    train_tasks: Sequence[Task] = ()
    """[] for offline trainers."""
    eval_tasks: Sequence[Task] = ()
    """Held-out tasks; [] for offline trainers."""
    contexts: Sequence[int] = ()
    """Context length of each known server, in tokens."""
    addresses: Sequence[str] = ()
    """Addresses of the servers that were started before the run."""


RunCheck = Callable[["ExperimentConfig", RunFacts], Iterable[tuple[str, str]]]
"""Hook `check`: check a run before it starts.

Each start calls it last of all checks, with the config and what they have read. It returns pairs of
a part of the run in a word and a warning about it. A UserError refuses the run."""

PlacedRow = tuple[str, dict[str, Any]]
"""The place of a row, such as "data.jsonl, line 3", and its columns."""

RowReader = Callable[[Path, Sequence[str]], Iterator[PlacedRow]]
"""Group `row_reader`: read the rows of a file whose suffix, without its dot, is the entry's name.

Each process that needs rows calls it with an existing file and the columns that are needed; it may
yield others, too. A UserError refuses the file."""

RowSource = Callable[[str, str], Iterator[PlacedRow] | None]
"""Hook `row_source`: read the rows of a dataset that is no file of a known suffix.

Each process that needs such rows calls it with the path and "train" or "eval". The first result
that is not None is used. A UserError refuses the dataset."""

PlainRow = Callable[[Mapping[Any, Any], str], dict[str, Any]]
"""Hook `plain_row`: convert a row to values that JSON and msgpack keep.

It is called with a row that has other values, and its place for errors. Each hook gets the result
of the one before. A UserError refuses the row."""

TaskForm = Callable[[dict[str, Any]], tuple[str, dict[str, Any]] | None]
"""Hook `task_form`: recognise a task's row in the form of another library.

It is called with each row of a file. It returns the name of the form and the row with AReaLite's
columns, or None. The first result that is not None is used."""

ServerFinder = Callable[["ExperimentConfig", dict[str, Any]], Sequence[Any]]
"""Hook `server_finder`: return the running servers that register no name, as entries (`Entry`).

Each start that needs such servers calls it with the config and the model's config.json. A run does
not wait for servers if one is found. A UserError refuses the run."""

TaskSamplerMaker = Callable[["ExperimentConfig", Sequence[Task]], TaskSampler | None]
"""Hook `task_sampler`: return what chooses the next task of a run, or None.

The preflight and the datapipe call it with the config and the training tasks. The first result that
is not None is used; after None from all, the tasks are a permutation in each epoch. A UserError
refuses the run."""

EngineExtensionMaker = Callable[[EngineSetup], EngineExtension | None]
"""Hook `engine_extension`: return what extends a train engine `fsdp`, or None.

Each engine calls it after it has built its empty model, whose modules the hook may change. It
calls the extensions in the order of their entries. A UserError refuses the run."""

Fingerprint = Callable[[Mapping[str, "Tensor"], Any], str | None]
"""Hook `fingerprint`: return a hash of tensors by name, equal on all ranks, or None.

All ranks of an engine `fsdp` call it together after each step, with the shards of the parameters
and the device. The ledger keeps the first result that is not None. An error ends the rank."""

MatrixProductsMaker = Callable[[], Any]
"""Hook `matrix_products`: return what computes products of matrices (`MatrixProducts`), or None.

A process that computes log-probabilities calls it once. The first result that is not None is used;
after None from all, torch computes them. An error ends the process."""

LogitChangeMaker = Callable[[Any], Any]
"""Hook `logit_change`: return how a model's head changes its logits (`LogitChange`), or None.

An engine calls it with the model, whose parameters are on the meta device. The first result that is
not None is used; after None from all, the logits are the product alone. A UserError refuses the
model."""

AfterFirstPublish = Callable[["ExperimentConfig", "TrainEngine", Any, int], None]
"""Hook `after_first_publish`: check a run once the servers have the trainer's weights.

All ranks of a trainer with servers call it before the first episode of each start, with the config,
the policy's engine, the ranks (`World`) and the published version. It changes neither parameters
nor metrics. A UserError, raised on all ranks, refuses the run."""

PolicyProofMaker = Callable[["ExperimentConfig", "TrainEngine", Any], PolicyProof | None]
"""Hook `policy_proof`: return what proves the weights of servers, or None.

All ranks of a trainer with servers call it when they start, with the config, the policy's engine
and the ranks (`World`). The first result that is not None is used. An error ends the rank."""

OnRow = Callable[[int, int], None]
"""Takes the numbers of the current and the last row. An error from it ends the reader."""


class LedgerReport(Protocol):
    """The result of a hook `ledger_audit`."""

    @property
    def ok(self) -> bool:
        """Whether the ledger has no problem."""
        ...

    @property
    def problems(self) -> Sequence[str]:
        """A line for each problem."""
        ...

    @property
    def steps(self) -> int:
        """Number of trained steps."""
        ...

    def summary(self) -> str:
        """Return the text that a run prints at its end."""
        ...

    @property
    def mark(self) -> str:
        """A text that the ledger stores if this audit passed, for the next audit; "": none."""
        ...


class LedgerAudit(Protocol):
    """Hook `ledger_audit`: check the ledger of a run.

    The datapipe calls it in a thread after each checkpoint. It drops payloads, and stores the mark,
    only after all audits passed. A launcher calls it in a thread at the end of a run, which fails
    unless the audit passed. A UserError says that the ledger is damaged.
    """

    def __call__(
        self,
        path: Path,
        *,
        new_only: bool = False,
        on_row: Callable[[int, int], None] | None = None,
    ) -> LedgerReport:
        """Read a ledger, which is in use, and check it.

        Args:
            path: The ledger's file.
            new_only: Skip the records that passed an earlier audit, which the mark tells.
            on_row: To call regularly.
        """
        ...


class OpenGroups(Protocol):
    """The groups of a datapipe, as its controls see them."""

    next_step: int
    """Number of the next batch to compose, from 0."""
    counts: Counter[str]
    """Number of groups by state."""


class WorkerLoad(Protocol):
    """A rollout worker, as the controls of a datapipe see it."""

    worker_id: str
    route: bytes | None
    """None until its first message."""

    @property
    def in_flight(self) -> int:
        """Number of episodes that the worker runs."""
        ...


class WorkerLimits(Protocol):
    """The rollout workers of a datapipe, as its controls see them."""

    extra_metrics: Callable[[], dict[str, float]]
    """Further metrics of the workers."""

    @property
    def by_id(self) -> Mapping[str, WorkerLoad]:
        """The workers that are alive."""
        ...

    def set_limit(self, limit: int, *, leaving: str = "") -> None:
        """Limit the number of episodes of each worker; the worker `leaving` gets no more."""
        ...


class DatapipeControl(Protocol):
    """Adapts a running datapipe. Its methods run in the datapipe's event loop."""

    def entry(self) -> Mapping[str, object]:
        """Return further values of the datapipe's entry in the name registry."""
        ...

    def take_batch(self) -> None:
        """Note batches that were composed since the last call; called after each message."""
        ...

    async def run(self, stopped: asyncio.Event) -> None:
        """Run beside the datapipe until `stopped` is set."""
        ...


DatapipeControlMaker = Callable[
    ["ExperimentConfig", Any, OpenGroups, WorkerLimits], DatapipeControl | None
]
"""Hook `datapipe_control`: return what adapts a datapipe, or None.

A datapipe calls it while it is created, before it has a worker, with the config, the name registry
(`NameRegistry`), its groups and its workers. An error ends the datapipe."""


RoleMain = Callable[["ExperimentConfig", int], None]
"""Group `role`: run one process of a run.

`arealite role NAME INDEX RUN` calls the entry with this name, with the run's config and the index.
An error ends the process; its parent restarts it."""

TreeChange = Callable[["Task", "TrajectoryTree"], Awaitable["TrajectoryTree"]]
"""Returns the tree of a finished trajectory, with further values of its tokens
(`TurnNode.extras`)."""
TreeChangeMaker = Callable[["ExperimentConfig"], AbstractAsyncContextManager[TreeChange] | None]
"""Hook `tree_change`: return a context of what changes trees, or None.

A worker enters the context before its first episode, and leaves it after its last one. The changes
run one after the other, for each trajectory that may be trained. An EpisodeError fails the
episode; another error ends the worker."""

RewardChange = Callable[[Any, "np.ndarray"], "np.ndarray"]
"""Returns the new reward of each sampled token, float64 [N], of a trajectory (`Trajectory`)."""
RewardChangeMaker = Callable[["PPOConfig"], RewardChange | None]
"""Hook `reward_change`: return what changes rewards before advantages, or None.

Each rank of a PPO trainer calls it for each batch, with the options. The results run one after the
other. An error ends the rank."""

AdvantageChange = Callable[[Any, "np.ndarray | float"], "np.ndarray | float"]
"""Returns the new advantages of the sampled tokens, float64 [N], of a trajectory (`Trajectory`)
that had these advantages, or this one for all tokens."""
AdvantageChangeMaker = Callable[["PPOConfig"], AdvantageChange | None]
"""Hook `advantage_change`: return what changes advantages after they are normalised, or None.

Each rank of a PPO trainer calls it for each batch, with the options. The results run one after the
other. An error ends the rank."""

LossChange = Callable[["LossFn"], "LossFn"]
"""Returns a loss function that adds terms to another one."""
LossChangeMaker = Callable[["PPOConfig"], LossChange | None]
"""Hook `loss_change`: return what adds terms to the policy loss, or None.

Each rank of a PPO trainer calls it when it starts, and for each batch, with the options. With a
change, trajectories whose advantages are 0 are trained, too. An error ends the rank."""

TokenMask = Callable[[Any, Any], None]
"""Sets the field `keep` of the rows of a batch (`TrainBatch`), with the ranks (`World`). The loss
leaves out tokens whose `keep` is 0."""
TokenMaskMaker = Callable[["PPOConfig"], TokenMask | None]
"""Hook `token_mask`: return what masks tokens, or None.

All ranks of a PPO trainer call it for each batch, with the options, and then call the result
together. An error ends the rank."""

StepMetrics = Callable[[Any, Sequence["Stats"]], Mapping[str, float]]
"""Returns metrics by name, `group/name`, from a batch (`TrainBatch`) and its updates' stats."""
StepMetricsMaker = Callable[["ExperimentConfig", Any], StepMetrics | None]
"""Hook `step_metrics`: return what measures each trained batch, or None.

Each rank of a PPO trainer calls it with the config and the ranks (`World`). All ranks call the
results together after each batch; the metrics of rank 0 count. An error ends the rank."""

RankStore = Callable[[int, int], Any]
"""Hook `rank_store`: return the store in which the ranks of a trainer meet, or None.

Each rank calls it when it starts, with its rank and the number of ranks. The first result that is
not None is used. After None from all, rank 0 serves a store at MASTER_ADDR and MASTER_PORT. An
error ends the rank."""

TrainerRank = Callable[["ExperimentConfig"], int]
"""Hook `trainer_rank`: run the trainer rank that the environment names; return the exit code.

`train` calls it with the config, instead of a launcher, if the variable RANK is set. The last entry
is used. A UserError refuses the run."""

LoggerOpener = Callable[[Path, type[MetricLogger]], MetricLogger | None]
"""Hook `logger_opener`: open a metric logger of a run, or None.

Rank 0 calls it with the run folder and the class of each logger besides `jsonl`. The first result
that is not None is used; after None from all, the class itself is called. An error ends training.
"""


class ServerRegistrar(Protocol):
    """Hook `server_registrar`: register the running servers that register no name.

    The datapipe and `arealite eval` call it before their work.
    """

    def __call__(
        self, config: "ExperimentConfig", *, updates: bool
    ) -> Coroutine[Any, Any, None] | None:
        """Return what keeps the names up to date until it is cancelled, or None.

        Args:
            config: The experiment.
            updates: Whether the run publishes weights to the servers.
        """
        ...


LedgerFormat = Callable[[sqlite3.Connection], None]
"""Group `ledger_format`: make a ledger of an older format readable; the name is the format.

The reader of such a ledger calls it with its read-only connection. It creates the temporary view
`payloads`, with the columns of schema.sql. An error ends the reader."""

DefaultModel = Callable[["ServerConfig"], str | None]
"""Hook `default_model`: return the folder of a model to serve without `model.path`, or None.

`arealite serve-llm` calls it with its config. The first result that is not None is used."""
