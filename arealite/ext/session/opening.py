"""`arealite.session`: its arguments as options of a session."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields
from pathlib import Path

from arealite.api.trainer import PPOConfig
from arealite.ext.notebook.command_line import Overrides, words
from arealite.ext.session.start_checks import check_no_ledger
from arealite.ext.session.training_session import Session

PPO = "trainer.ppo"
SHORT_KEYS = frozenset(item.name for item in fields(PPOConfig))
"""Sections and options that overrides may name without `trainer.ppo.`."""


def session(
    model: str | Path,
    *,
    servers: int | None = None,
    addresses: Seq[str] = (),
    ranks: int = 1,
    lora: int = 0,
    adapters: Seq[str] | None = None,
    max_staleness: int | None = None,
    trial: str = "session",
    ledger: bool = False,
    overrides: Overrides = None,
) -> Session:
    """Return a session, which `async with` (or `await`) starts: servers, and the model to train.

    This process trains the model, alone or as the first of several ranks. Servers sample it. When
    this process ends, for any reason, the servers and ranks that the session has started end, too.

    Args:
        model: A Hugging Face folder, or the id of a model of the Hugging Face Hub.
        servers: Number of servers to start; None: one, or none with `addresses`; 0: the session
            updates and uses the servers that run for its trial.
        addresses: Running servers, as in ["http://10.0.0.1:30000"]; the session updates them.
        ranks: Number of processes that train, each on a GPU of its own if there are GPUs; the
            model is sharded over them. A loss of your own must be in a module, which they import.
        lora: Rank of the adapter that is trained in place of all parameters; 0: none.
        adapters: Names of further adapters; see `Session.add_adapter`. With lora=0, the model is
            frozen, and only these train; [] means that all are added later. None: no adapters.
        max_staleness: Largest age of a trained token, in versions; None: 4.
        trial: Name of the folder `runs/arealite/TRIAL`, which has logs and saved states.
        ledger: Keep each sample and each trained step in `runs/arealite/TRIAL/ledger.sqlite`, and
            continue at the trial's newest saved state.
        overrides: Other options, as in {"engine.fsdp.dtype": "bfloat16"}. The prefix `trainer.ppo.`
            may be left out.

    Raises:
        UserError: There are adapters and a ledger. When the session is started: the input is wrong;
            no process was started.
    """
    if servers is None:
        servers = 0 if addresses else 1
    user_words = words(
        _with_full_keys(overrides),
        **{
            "trial_name": trial,
            "launcher.llm_servers": servers,
            "llm_server.addresses": [*addresses] or None,
            "launcher.trainer_ranks": ranks if ranks != 1 else None,
            f"{PPO}.engine.fsdp.lora.rank": lora or None,
            f"{PPO}.engine.fsdp.lora.only_named": adapters is not None or None,
            f"{PPO}.max_staleness": max_staleness,
        },
    )
    check_no_ledger("session", has_ledger=ledger and adapters is not None)
    return Session(model, user_words, adapters or (), has_ledger=ledger)


def _with_full_keys(overrides: Overrides) -> Overrides:
    """Return overrides whose keys have the prefix of their section."""
    if not isinstance(overrides, Mapping):
        return overrides
    full = dict[str, object]()
    for key, value in overrides.items():
        section, _, _ = str(key).partition(".")
        full[f"{PPO}.{key}" if section in SHORT_KEYS else key] = value
    return full
