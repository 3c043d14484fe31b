"""Turn the arguments of the Python API into the words of a command line, and check them."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from arealite.api.agent import agents
from arealite.api.config import ExperimentConfig, run_paths
from arealite.api.env import envs
from arealite.api.env_config import EnvConfig
from arealite.api.sampling import SamplingRunConfig
from arealite.base.errors import UserError
from arealite.cli import configs
from arealite.cli.preflight import is_self_served
from arealite.python.objects import data_path, registered, reward_words, word
from arealite.python.process import NESTED, Process
from arealite.system.names.registry import NameRegistry

T = TypeVar("T")
C = TypeVar("C", bound=ExperimentConfig)
S = TypeVar("S", bound=SamplingRunConfig)
Overrides = Mapping[str, object] | Sequence[str] | None
Config = str | Path | Sequence[str | Path]
Values = Mapping[str, Any]
CHECKER = "arealite-check"
"""Name of the thread that checks a run: in a notebook, an event loop runs in the main thread."""
COLLECTOR = "trainer.ppo.collector"
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]


def checked(check: Callable[[], T]) -> T:
    """Return the result of a check, made in a thread that has no event loop.

    Raises:
        UserError: A process of a run, or the check itself, imports the calling script.
    """
    if NESTED in os.environ or threading.current_thread().name.startswith(CHECKER):
        raise UserError(
            "a process of a run imports this script, which would start another run. Move the calls "
            'of arealite.train and others below `if __name__ == "__main__":`.'
        )
    with ThreadPoolExecutor(1, CHECKER) as thread:
        return thread.submit(check).result()


def words(overrides: Overrides) -> list[str]:
    """Return overrides as words of the command line.

    Raises:
        UserError: They are neither a dict nor a list.
    """
    if isinstance(overrides, str):
        raise UserError(f"overrides={overrides!r}: use a dict, as in {{'trainer.ppo.lr': 1e-6}}.")
    if isinstance(overrides, Mapping):
        return [word(key, value) for key, value in overrides.items()]
    return list(overrides or ())


def command(
    schema: type[C],
    config: Config,
    model: str | Path | None,
    data: Values,
    parts: Values,
    own: Sequence[str],
) -> tuple[C, list[str]]:
    """Return the config of a command, and its words.

    Args:
        schema: The command's root config class.
        config: Preset or file, or several.
        model: Folder or id of the model.
        data: Datasets by option.
        parts: `reward`, `env` and `agent`.
        own: Words of the user.

    Raises:
        UserError: An argument is wrong.
    """
    files = [preset(each) for each in ([config] if isinstance(config, str | Path) else config)]
    base = configs.load(schema, files, own)
    found = [*own, *([word("model.path", model_folder(model))] if model else [])]
    folder = run_paths(base).root.parent
    given = {key: value for key, value in data.items() if value is not None}
    found += [word(key, data_path(value, folder, key)) for key, value in given.items()]
    found += part_words(base, {name: part for name, part in parts.items() if part is not None})
    made = configs.load(schema, files, found)
    is_served = is_self_served(made) or made.llm_server.addresses or made.trainer.is_offline
    if not (is_served or NameRegistry.of(made).list("llm_server")):
        found.append("launcher.llm_servers=1")
        made = configs.load(schema, files, found)
    return made, [*(f"--config={file}" for file in files), *found]


def part_words(base: ExperimentConfig, parts: Values) -> list[str]:
    """Return the words of `env`, `agent` and `reward`, and of `imports`.

    Raises:
        UserError: The run has no such part, or no other process can import it.
    """
    collector, imports, found = base.trainer.ppo.collector, [*base.imports], list[str]()
    if parts and (base.trainer.is_offline or collector.envs):
        what = "several environments" if collector.envs else "no environment"
        name = min(parts)
        fix = f"Set {COLLECTOR}.envs.NAME.… in overrides" if collector.envs else f"Remove {name}"
        raise UserError(
            f"{name}={parts[name]}: trainer.type={base.trainer.type} has {what}. {fix}."
        )
    names = {"env": collector.env.type, "agent": collector.agent.type}
    for option, table in (("env", envs), ("agent", agents)):
        if option in parts:
            names[option], modules = registered(parts[option], table)
            table.check(names[option])
            found.append(word(f"{COLLECTOR}.{option}.type", names[option]))
            imports += [module for module in modules if module not in imports]
    if "reward" in parts:
        name = names["env"]
        options = envs.configs.get(name) or getattr(EnvConfig(), name := envs.base_of(name), None)
        if not hasattr(options, "reward") and "reward" not in getattr(
            options, "__annotations__", ()
        ):
            raise UserError(f"reward: environment {names['env']} computes its own. Remove reward.")
        found += reward_words(parts["reward"], f"{COLLECTOR}.env.{name}.reward")
    return [*found, word("imports", imports)] if imports != base.imports else found


def preset(name: str | Path) -> Path:
    """Return the file of a preset, or the file itself."""
    file = Path(name)
    return file if file.suffix in (".yaml", ".yml") else configs.CONFIG_DIR / f"{name}.yaml"


def model_folder(model: str | Path) -> str:
    """Return the folder of a model; download a model of the Hugging Face Hub if it is not cached.

    Raises:
        UserError: The Hub cannot be reached, or has no such model.
    """
    if Path(model).expanduser().exists() or str(model).count("/") != 1:
        return str(model)
    from huggingface_hub import snapshot_download  # slow to import

    try:
        return snapshot_download(str(model), allow_patterns=HUB_FILES)
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"model={model} is no folder, and no model of the Hugging Face Hub was found: "
            f"{type(error).__name__}: {why}. Download it elsewhere, and pass its folder."
        ) from error


def sample(
    kind: str,
    schema: type[SamplingRunConfig],
    config: Config,
    model: str | Path,
    data: Values,
    parts: Values,
    own: Sequence[str],
) -> Path:
    """Run `eval` or `collect` to its end; return the file of its result.

    The trial has a new name, so that no sample of an earlier call is used again.

    Raises:
        UserError: The input is wrong.
        ArealiteError: The command failed.
    """
    own = [f"trial_name={kind}-{uuid.uuid4().hex[:8]}", *own]
    made, argv = checked(lambda: command(schema, config, model, data, parts, own))
    root = run_paths(made).root
    out = Path(made.out).expanduser() if made.out else root.with_name(f"{root.name}.jsonl")
    if kind == "eval" and not made.out:
        out = made.folder / "eval.json"
    elif not made.out:
        argv.append(word("out", out))
    before = out.stat().st_mtime_ns if out.exists() else 0
    process = Process([kind, *argv], root.with_name(f"{root.name}.log"))
    code = process.wait()  # 1: some samples failed
    if code not in (0, 1) or not out.exists() or out.stat().st_mtime_ns == before:
        raise process.error(f"arealite {kind}")
    return out
