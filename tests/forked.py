"""Imported by the warm processes of tests, after everything else: see forks.py.

A fork gets the module paths of its environment. If its command starts commands of AReaLite itself,
the fork has a warm parent for them, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from arealite.api.experiment_config import ExperimentConfig, ServerConfig
from arealite.base import config
from arealite.ext.warm_start import parent, starts
from tests import forks

STARTERS = "eval", "collect", "replay"
"""Commands that start others, without a warm parent."""
NEXT_STAGE = "--then"
"""The option of a run whose later stages start their roles without the warm parent of the first."""
PYTHONPATH = "PYTHONPATH"
_run_command = parent._run_command
_imports_pythonpath = os.environ.get(PYTHONPATH, "")


def run_command(words: Sequence[str]) -> None:
    """Run the command of a fork; see warm_parent."""
    replace_module_paths(_imports_pythonpath, os.environ.get(PYTHONPATH, ""))
    if NEXT_STAGE in words:
        starts.WarmParent.start = start_nothing  # it would import what is here already
    is_session = words[1] == str(forks.SESSION_SCRIPT)
    if is_session or NEXT_STAGE in words or any(word in STARTERS for word in words[2:4]):
        forks.fork_here()
    _run_command(words)


def start_nothing(_: starts.WarmParent) -> None:
    """Start no warm parent, so that commands ask the one of `forks.fork_here`."""


def replace_module_paths(old_pythonpath: str, new_pythonpath: str) -> None:
    """Replace the module paths of one value of PYTHONPATH by those of another."""
    old_paths, new_paths = split_paths(old_pythonpath), split_paths(new_pythonpath)
    first = 0 if sys.flags.safe_path else 1
    kept_paths = [path for path in sys.path[first:] if path not in old_paths + new_paths]
    sys.path[first:] = [*dict.fromkeys(new_paths), *kept_paths]


def split_paths(pythonpath: str) -> list[str]:
    """Return the absolute paths of a value of PYTHONPATH."""
    return [os.path.abspath(path) for path in pythonpath.split(os.pathsep)] if pythonpath else []


parent._run_command = run_command
for schema in (ExperimentConfig, ServerConfig):  # the first load of a process takes the longest
    config.load(schema, config.read_layers([], []), {})
