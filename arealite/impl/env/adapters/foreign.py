"""What the adapters of other people's environments share: finding these, and rows of seeds."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from random import Random
from typing import Any

from arealite.base.errors import UserError
from arealite.base.extras import extra, ours


def maker(module: str, config: Any) -> Callable[[], Any]:
    """Return what makes an environment: `config.factory`, else the package's own `make`.

    Raises:
        UserError: neither is there.
    """
    if not config.factory:
        if not config.env_id:
            raise UserError(f"env.{module} needs env_id, or factory=module:callable.")
        fix = "gyllm" if module == "gyllm" else ours("envs")
        return partial(extra(module, fix).make, config.env_id, **config.kwargs)
    path, _, name = config.factory.partition(":")
    try:
        return partial(getattr(importlib.import_module(path), name), **config.kwargs)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        what = f"env.{module}.factory={config.factory}: {error}"
        raise UserError(f"{what}. Write module:callable.") from error


def seeded_rows(name: str, prompt: str, split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a row a seed, without end.

    Raises:
        UserError: there is no `name`.
    """
    if not name:
        raise UserError("which environment? Its env_id is not set.")
    for number in count():
        own = Random(f"{name}/{split}/{seed}/{number}").getrandbits(31)
        yield {"prompt": prompt, "extra_info": {"data_source": name, "seed": own}}


def seed_of(task: Any) -> int:
    """Return the task's seed.

    Raises:
        UserError: its row has none.
    """
    if isinstance(seed := task.extra_info.get("seed"), int):
        return seed
    raise UserError(f"{task.task_id}: extra_info.seed must be a whole number, or use `generated`.")
