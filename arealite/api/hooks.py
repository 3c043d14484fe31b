"""The types of the hooks: functions of extensions that the core calls at fixed moments.

The name of a hook is a group of entries; `entries.hooks` returns its functions in their order.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from arealite.api.engine_config import Head
from arealite.api.engine_extension import EngineExtension, EngineSetup
from arealite.api.observation import ChatMessage
from arealite.api.task import Task
from arealite.api.task_sampler import TaskSampler
from arealite.api.tokenizer import Tokenizer
from arealite.base.model_folder import Shapes
from arealite.base.trial_files import RunPaths

if TYPE_CHECKING:
    from torch import Tensor

    from arealite.api.engine import TrainEngine
    from arealite.api.experiment_config import ExperimentConfig, ServerConfig

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
    tokenizer: Tokenizer | None = None
    """The model's, if the run's prompts go through its chat template."""
    longest_request: int | None = None
    """Tokens of the longest request; None if unknown."""
    addresses: Sequence[str] = ()
    """Addresses of the servers that were started before the run."""


RunCheck = Callable[["ExperimentConfig", RunFacts], Iterable[tuple[str, str]]]
"""Hook `check`: check a run before it starts.

Each start calls it last of all checks, with the config and what they have read. It returns pairs of
a part of the run in a word and a warning about it. A UserError refuses the run."""

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

PackedKernel = Callable[["Tensor", "Tensor", "Tensor", float], "Tensor"]
"""Attends causally within prefix trees: (query, key, value, scale) to the output, with gradients.

Each tensor is [N, heads, D]; keys and values may have fewer heads than queries."""

PackedKernelMaker = Callable[[Any], PackedKernel | None]
"""Hook `packed_kernel`: return a kernel for the prefix trees (`PrefixTree`) of a micro-batch.

The first layer calls it where flash attention does not run and scores are only scaled. The first
result that is not None is used in all layers; after None from all, each node of a tree is a call of
torch's attention. An error ends the update."""

AfterFirstPublish = Callable[["ExperimentConfig", "TrainEngine", Any, int], None]
"""Hook `after_first_publish`: check a run once the servers have the trainer's weights.

All ranks of a trainer with servers call it before the first episode of each start, with the config,
the policy's engine, the ranks (`World`) and the published version. It changes neither parameters
nor metrics. A UserError, raised on all ranks, refuses the run."""

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


DatapipeControlMaker = Callable[[Any], DatapipeControl | None]
"""Hook `datapipe_control`: return what adapts a datapipe, or None.

A datapipe with a name registry calls it with itself (`Datapipe`) while it is created, before it has
a worker. An error ends the datapipe."""


RoleMain = Callable[["ExperimentConfig", int], None]
"""Group `role`: run one process of a run.

`arealite role NAME INDEX RUN` calls the entry with this name, with the run's config and the index.
An error ends the process; its parent restarts it."""

TrainerRank = Callable[["ExperimentConfig"], int]
"""Hook `trainer_rank`: run the trainer rank that the environment names; return the exit code.

`train` calls it with the config, instead of a launcher, if the variable RANK is set. The last entry
is used. A UserError refuses the run."""

RunCompanion = Callable[
    ["ExperimentConfig", Callable[[str], object]], Coroutine[Any, Any, None] | None
]
"""Hook `run_started`: return a coroutine to run beside a launcher until the run ends, or None.

A launcher calls it before it starts a role, with the config and a function that prints a line. An
error of the coroutine is one warning and does not end the run."""

PanelMaker = Callable[[RunPaths], Callable[[int, int], Any]]
"""Hook `panel`: return what renders the present state of a run, with rich.

A launcher calls it in a thread if its output is a terminal. The result is called every second, with
the largest width and height. The last entry is used. An error is shown instead of the panel."""


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


DefaultModel = Callable[["ServerConfig"], str | None]
"""Hook `default_model`: return the folder of a model to serve without `model.path`, or None.

`arealite serve-llm` calls it with its config. The first result that is not None is used."""
