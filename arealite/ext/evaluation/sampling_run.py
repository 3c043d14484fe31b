"""The common part of `arealite eval` and `arealite collect`: check, find servers, sample, store."""

import asyncio
import contextlib
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from arealite.api.agent import load_tokenizer
from arealite.api.experiment_config import name_dir
from arealite.api.llm import SamplingConfig, clients
from arealite.api.task import Task
from arealite.base import config_tree, log, outputs
from arealite.base.errors import UserError
from arealite.base.files import lock_file
from arealite.base.folder_checks import check_name
from arealite.base.model_folder import read_model
from arealite.base.signals import on_stop
from arealite.cli import configs, preflight, resolved
from arealite.cli.preflight import check_sampling_packages
from arealite.ext.evaluation.config import SamplingRunConfig
from arealite.ext.evaluation.own_servers import own_servers
from arealite.ext.evaluation.sampler import ObservingCollector, Sampler, jobs
from arealite.ext.evaluation.samples import Samples
from arealite.ext.prompts.prompt_checks import check_prompts, check_rendering, uses_template
from arealite.ext.self_check.template import check_template
from arealite.ext.short_flags.short_flags import Word, translate
from arealite.impl.rollout.collector import Collector
from arealite.system.data.dataset import identity
from arealite.system.data.tasks import FIRST_ROWS, GENERATED, check_first_rows, load_split
from arealite.system.names.name_registry import Entry, NameRegistry, with_externals

SHOW_S = 5.0
Config = TypeVar("Config", bound=SamplingRunConfig)


def words(split: str) -> tuple[Word, ...]:
    """Return the flags of the command that samples a split."""
    command = "eval" if split == "eval" else "collect"
    rows_option = "eval_rows" if split == "eval" else "rows"
    environment = "trainer.ppo.collector.env.type={} name=" + command + "-{}"
    return (
        Word("--model", "M", "model.path={}"),
        Word("--environment", "E", environment),
        Word("-n --num-episodes", "N", f"tasks={{}} dataset.{rows_option}={{}}"),
        Word("-o --output", "FILE", "out={}"),
    )


def parse(
    schema: type[Config],
    argv: Sequence[str],
    *,
    words: Sequence[Word],
    command: str,
    description: str,
) -> Config:
    """Parse the command line of a command that samples."""
    argv, used_flags = translate(argv, words)
    config = configs.parse(
        schema,
        argv,
        command=command,
        description=description,
    )
    outputs.protect()
    config = resolved.resolve_host(config)
    return with_defaults(config, used_flags)


def with_defaults(config: Config, used_flags: set[str]) -> Config:
    """Set the options that a command with `--environment` or `--model` may omit.

    The environment generates the tasks if there is no dataset. The command starts an LLM server if
    there is none.

    Args:
        config: The config of the command.
        used_flags: The flags on the command line.
    """
    dataset = config.dataset
    launcher = config.launcher
    if "--environment" in used_flags and not getattr(dataset, config.split):
        dataset = replace(dataset, **{config.split: GENERATED})
        config = replace(config, dataset=dataset)
    if "--model" in used_flags and not _is_served(config):
        print("no LLM server is running: this command starts one", file=sys.stderr)
        launcher = replace(launcher, llm_servers=1)
        config = replace(config, launcher=launcher)
    return config


def _is_served(config: SamplingRunConfig) -> bool:
    """Return whether the config names LLM servers, or servers of its trial are running."""
    if config.launcher.llm_servers or config.llm_server.addresses:
        return True
    return bool(NameRegistry.of(config).list("llm_server"))


@contextmanager
def sampled(
    config: SamplingRunConfig,
) -> Generator[tuple[list[Task], Samples, Counter[str]]]:
    """Sample all tasks, without existing samples; yield (tasks, samples, failures by source).

    Raises:
        UserError: The input is wrong, or the folder has samples of another model or other options.
        RoleError: See Sampler.run; or a server that this command started has exited.
    """
    outputs.log_to(config.folder / f"{config.name}.log")
    log.setup(config.name, "warning")
    all_tasks = load_split(config, config.split)
    tasks = all_tasks[: config.tasks or None]
    check_run(config, tasks)
    config.folder.mkdir(parents=True, exist_ok=True)
    lock = lock_file(config.folder / ".lock", fix="Wait for it, or choose another name=…")
    with lock, contextlib.ExitStack() as stack:
        samples = Samples(config.folder / "samples.sqlite")
        stack.callback(samples.close)
        samples.begin(facts(config, tasks))
        if config.launcher.llm_servers:  # a run with the same names would use these servers
            names = name_dir(config)
            names.mkdir(parents=True, exist_ok=True)
            names_lock = lock_file(names / ".lock", fix="Choose another trial_name.")
            stack.enter_context(names_lock)
        failed = sample(config, tasks, samples)
        yield tasks, samples, failed


def sample(
    config: SamplingRunConfig,
    tasks: Sequence[Task],
    samples: Samples,
) -> Counter[str]:
    """Run the missing episodes; return the number of failed samples by source."""
    wanted = {(job.number, job.member) for job in jobs(tasks, config.n, config.split)}
    if wanted <= samples.done():
        return Counter()
    import uvloop

    try:
        return uvloop.run(_sample(config, tasks, samples))
    except asyncio.CancelledError:
        print(
            f"{len(samples.done())} of {len(wanted)} samples are stored in {config.folder}: "
            "the same command resumes from there",
            file=sys.stderr,
        )
        raise KeyboardInterrupt from None


async def _sample(
    config: SamplingRunConfig,
    tasks: Sequence[Task],
    samples: Samples,
) -> Counter[str]:
    """Run the missing episodes; a stop signal cancels this task."""
    task = asyncio.current_task()
    assert task is not None
    on_stop(asyncio.get_running_loop(), lambda _: task.cancel())
    is_train = config.split == "train"
    collector_config = config.trainer.ppo.collector
    client_config = collector_config.client
    client_class = clients.get(client_config.type)
    client = client_class(config, client_config)
    collector_class = ObservingCollector if is_train else Collector
    tokenizer = load_tokenizer(config.model.path)
    collector = collector_class(config, client, tokenizer)
    sampler = Sampler(
        config=config,
        collector=collector,
        samples=samples,
        split="train" if is_train else "eval-0",
        progress=SampleProgress(config),
    )

    async def work() -> None:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(client.close)
            await client.start()
            await collector.setup()
            stack.push_async_callback(collector.close)
            await sampler.run(tasks, config.n)

    num_servers = config.launcher.llm_servers
    server_file = configs.write_server(config, config.folder) if num_servers else config.folder
    async with own_servers(num_servers, server_file):
        await with_externals(config, work(), updates=False)
    return sampler.failed


def report_failed(failed: Counter[str]) -> int:
    """Print the number of failed samples; return the exit code: 1 if there are any."""
    for source, count in failed.items():
        of_source = f" of {source}" if source else ""
        print(f"{count} samples{of_source} failed; the same command retries them")
    return int(bool(failed))


class SampleProgress:
    """Prints the number of finished samples on stderr, every SHOW_S seconds."""

    def __init__(self, config: SamplingRunConfig) -> None:
        self._name = config.name
        self._next = time.monotonic() + SHOW_S

    def __call__(self, done: int, all_: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + SHOW_S
            print(
                f"{self._name}: {done} of {all_} samples",
                file=sys.stderr,
                flush=True,
            )


def check_run(config: SamplingRunConfig, tasks: Sequence[Task]) -> None:
    """Check names, model, folder, servers and prompts, in the order of their cost."""
    if not tasks:
        raise UserError(
            f"no environment of collector.envs has tasks: set envs.NAME.{config.split}."
        )
    NameRegistry.of(config).check()
    if config.model.adapter:
        raise UserError(
            f"model.adapter={config.model.adapter}: servers do not load it. "
            "Sample from an export: model.path=EXPORT model.adapter=null."
        )
    configs.check_names(config)
    check_sampling_packages(config)
    check_name("name", config.name)
    preflight.check_envs(config)
    check_first_rows(config, [config.split])
    model_path = preflight.required(config.model.path, "model.path")
    model, _ = read_model(model_path)
    preflight.check_run_folder(config)
    entries = list[Entry]()
    if not config.launcher.llm_servers:
        entries = preflight.find_servers(config, model)
    config = _with_sampling(config, options_of(config))
    contexts = preflight.contexts(config, model, entries)
    check_prompts(config, tasks, contexts)
    for warning in _template_warnings(config, tasks):
        print(f"{config.name}: warning: {warning}", file=sys.stderr, flush=True)


def _template_warnings(config: SamplingRunConfig, tasks: Sequence[Task]) -> list[str]:
    """Check the chat template, and the first prompts that go through it; return warnings."""
    if not uses_template(config, tasks):
        return []
    tokenizer = load_tokenizer(config.model.path)
    template_warnings = check_template(config, tokenizer)
    prompt_warnings = check_rendering(config, tasks[:FIRST_ROWS], tokenizer)
    return [*prompt_warnings, *template_warnings]


def _with_sampling(
    config: SamplingRunConfig,
    sampling: SamplingConfig,
) -> SamplingRunConfig:
    """Return a config whose collector has other sampling options."""
    ppo = config.trainer.ppo
    collector = replace(ppo.collector, sampling=sampling)
    ppo = replace(ppo, collector=collector)
    trainer = replace(config.trainer, ppo=ppo)
    return replace(config, trainer=trainer)


def options_of(config: SamplingRunConfig) -> SamplingConfig:
    """Return the sampling options of the split."""
    ppo = config.trainer.ppo
    if config.split == "train":
        return ppo.collector.sampling
    return ppo.eval.sampling


def facts(
    config: SamplingRunConfig,
    tasks: Sequence[Task],
) -> dict[str, str]:
    """Return the values that must be equal for all samples of a folder; `n` may grow."""
    collector = config.trainer.ppo.collector
    folder = Path(config.model.path).expanduser().absolute()
    rows = identity(config, tasks)
    options = {
        "sampling": asdict(options_of(config)),
        "agent": asdict(collector.agent),
    }
    for name, part in collector.parts.items():
        options[f"environment {name}".strip()] = asdict(part)
    return {
        "model.path": str(folder),
        "weights": _weights_digest(folder),
        "dataset_rows": rows["dataset_rows"],
        "dataset_digest": rows["dataset_digest"],
        **dict(config_tree.values("", options)),
    }


def _weights_digest(folder: Path) -> str:
    """Return a digest of the names, sizes and times of the weight files in a folder."""
    stats = {file.name: file.stat() for file in sorted(folder.glob("*.safetensors"))}
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
    digest = hashlib.blake2b(str(files).encode(), digest_size=8)
    return digest.hexdigest()
