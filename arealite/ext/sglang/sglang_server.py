"""SGLang servers of this host: checks of the options, start and end of all servers.

The servers may run in another Python, because SGLang pins versions of packages that AReaLite uses.
"""

import asyncio
import os
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

from arealite.api.experiment_config import ServerConfig, run_paths
from arealite.api.llm_server import LLMServer
from arealite.base import log
from arealite.base.errors import RoleError, UserError
from arealite.base.folder_checks import check_address, check_folder
from arealite.base.model_folder import read_json, vocab_size
from arealite.base.signals import on_stop
from arealite.ext.sglang.sglang_process import Launch, SGLangProcess
from arealite.impl.http_client import Pool
from arealite.impl.launcher.processes import take_ports
from arealite.system.names.name_registry import SECRET_FILE, NameRegistry

logger = log.get(__name__)

ENVIRONMENT = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
"""Without this setting, /health generates a token, and a paused server is not healthy."""
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**40),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}
"""Environment of servers on a CPU. More threads compete for the cores. Compilation would delay the
first request by half a minute. With the usual malloc thresholds, memory would be returned to the
kernel after each bucket of weights, and zeroed for the next bucket."""
CPU_ARGUMENTS = {
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--grammar-backend": "none",
    "--max-total-tokens": 65536,
    "--max-running-requests": 128,
}
CPU_SWITCHES = ["--disable-cuda-graph", "--disable-overlap-schedule", "--skip-server-warmup"]
"""No warm-up: its prompt is an English sentence, which a small tokenizer may not encode."""

BOOT = """
import hmac, runpy, sys
from sglang.srt import server_args
class Key(str):
    def __repr__(self):
        return "'***'"
    def __deepcopy__(self, memo):
        return self
    def __reduce__(self):
        return str, ()
key = bytes.fromhex(open(sys.argv.pop(1)).read())
prepare = server_args.prepare_server_args
def prepare_with_key(argv):
    args = prepare(argv)
    args.api_key = Key(hmac.digest(key, b"http", "sha256").hex())
    return args
server_args.prepare_server_args = prepare_with_key
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""
"""Script that starts SGLang with the trial's token as its API key. `ps` would show a key on the
command line. SGLang logs its arguments, so the repr of the key hides it. Only the HTTP process has
the key; the other processes of the server have an empty key."""

PROBE = """
import importlib.util, sys
if importlib.util.find_spec("sglang") is None:
    sys.exit("it has no sglang")
if sys.argv[1] == "cpu":
    print(0)
else:
    import torch
    print(torch.cuda.device_count())
"""
PROBE_S = 120.0


class SGLangServer(LLMServer):
    """Starts `num_servers` SGLang servers, each with its port, devices and log."""

    def __init__(self, args: ServerConfig) -> None:
        self.config = args

    async def serve(self) -> None:
        """Run all servers until a stop signal. A second signal skips the wait for requests.

        Raises:
            UserError: the config is invalid, or a server was never healthy.
            RoleError: all servers were given up.
        """
        launches = await asyncio.to_thread(plan, self.config)
        loop = asyncio.get_running_loop()
        tasks = list[asyncio.Task[None]]()

        def stop(number: int) -> None:
            for task in tasks:
                task.cancel()

        on_stop(loop, stop)  # until the end of the loop
        with closing(Pool(PROBE_S)) as pool:
            async with asyncio.TaskGroup() as group:
                for launch in launches:
                    server = SGLangProcess(launch, self.config, pool)
                    tasks.append(group.create_task(server.run(), name=f"llm_server:{launch.port}"))
        given_up = [task.get_name() for task in tasks if not task.cancelled()]
        if len(given_up) == len(tasks):
            raise RoleError("every SGLang server died repeatedly; the first errors are above.")
        if given_up:
            logger.error("servers had been given up before the stop", servers=given_up)


def plan(config: ServerConfig) -> list[Launch]:
    """Check the config, and return how to start each server.

    Raises:
        UserError: the config contradicts itself, or does not fit the Python, the model or this
            machine.
    """
    options = config.llm_server.sglang
    ports = find_ports(config)
    metadata = describe(config)
    python = os.path.expanduser(options.python or sys.executable)
    devices = assign_devices(config, probe(python, options.device))
    logs = run_paths(config).logs
    check_folder(logs, "the servers' folder of logs", "cluster.run_root")
    logs.mkdir(parents=True, exist_ok=True)
    launches: list[Launch] = []
    for index, port in enumerate(ports):
        launch = Launch(
            command=partial(command, config, python, index, devices is None),
            environment=environment(devices[index] if devices else None),
            port=port,
            logs=logs,
            metadata=metadata,
        )
        launches.append(launch)
    return launches


def describe(config: ServerConfig) -> dict[str, object]:
    """Return the description of the model in the servers' names, from its config.json.

    Raises:
        UserError: there is no model.
    """
    path = config.model.path
    if not path:
        raise UserError("model.path is empty. Give a Hugging Face folder: model.path=/my/model")
    folder = Path(path).expanduser().absolute()
    model = read_json(folder)
    if not model:
        raise UserError(
            f"model.path={path}: no model there (no config.json that can be read). "
            "Give a Hugging Face folder."
        )
    return {
        "type": "sglang",
        "model_path": str(folder),
        "model_type": model.get("model_type"),
        "architectures": model.get("architectures") or [],
        "vocab_size": vocab_size(model),
        "host": config.cluster.host,
    }


def probe(python: str, device: str) -> int:
    """Return the number of GPUs that torch of `python` finds; 0 with device=cpu.

    Raises:
        UserError: `python` cannot be run, or does not have sglang.
    """
    try:
        process = subprocess.run(
            [python, "-c", PROBE, device],
            capture_output=True,
            text=True,
            timeout=PROBE_S,
        )
        if process.returncode == 0:
            return int(process.stdout)
        error_lines = process.stderr.strip().splitlines()
        failure_reason = error_lines[-1] if error_lines else f"exit code {process.returncode}"
    except OSError as error:
        failure_reason = error.strerror
    except (ValueError, subprocess.TimeoutExpired) as error:
        failure_reason = str(error)
    raise UserError(
        f"llm_server.sglang.python: {python} cannot run SGLang: {failure_reason}. "
        "Name a Python that has it (for a CPU, tools/setup_sglang_cpu.sh makes one), "
        "or pip install sglang there."
    )


def assign_devices(config: ServerConfig, count: int) -> list[str] | None:
    """Return CUDA_VISIBLE_DEVICES of each server; None: the servers run on the CPU.

    Args:
        config: Config of the servers.
        count: Number of GPUs of this machine.

    Raises:
        UserError: there are too few GPUs.
    """
    options = config.llm_server.sglang
    if options.device == "cpu" or (options.device == "auto" and not count):
        return None
    gpus_per_server = options.tp * options.dp
    num_needed = options.num_servers * gpus_per_server
    if num_needed > count:
        raise UserError(
            f"llm_server.sglang: {options.num_servers} servers "
            f"of tp {options.tp} x dp {options.dp} "
            f"need {num_needed} GPUs, but {count} are visible. "
            "Lower one of them, widen CUDA_VISIBLE_DEVICES, or take device=cpu."
        )
    gpu_ids = [str(i) for i in range(count)]
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices:
        gpu_ids = visible_devices.split(",")
    devices_of_servers: list[str] = []
    for index in range(options.num_servers):
        first_gpu = index * gpus_per_server
        gpu_ids_of_server = gpu_ids[first_gpu : first_gpu + gpus_per_server]
        devices_of_servers.append(",".join(gpu_ids_of_server))
    return devices_of_servers


def find_ports(config: ServerConfig) -> list[int]:
    """Return one free port for each server.

    Raises:
        UserError: a port is in use, or is not between 0 and 65535.
    """
    server = config.llm_server
    count = config.llm_server.sglang.num_servers
    for index in range(count):
        port = server.port + index if server.port else 0
        check_address(server.host, port, at="llm_server")
    return take_ports(server.host, server.port, count)


def environment(devices: str | None) -> dict[str, str]:
    """Return a server's environment variables; those of this process have precedence.

    Args:
        devices: Value of CUDA_VISIBLE_DEVICES; None: the server runs on the CPU.
    """
    if devices is None:
        return {**ENVIRONMENT, **CPU_ENVIRONMENT, **os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    return {**ENVIRONMENT, **os.environ, "CUDA_VISIBLE_DEVICES": devices}


def command(
    config: ServerConfig,
    python: str,
    index: int,
    cpu: bool,
    port: int,
) -> list[str]:
    """Return the command line of a server. If an argument is given twice, SGLang uses the last."""
    server = config.llm_server
    options = config.llm_server.sglang
    configured: dict[str, object] = {
        "--model-path": Path(config.model.path).expanduser().absolute(),
        "--dtype": config.model.dtype,
        "--device": "cpu" if cpu else "cuda",
        "--tp-size": options.tp,
        "--dp-size": options.dp,
        "--mem-fraction-static": options.mem_fraction,
        "--attention-backend": options.attention_backend,
        "--context-length": server.context_length,
        "--host": server.host,
        "--port": port,
        "--log-level": server.log_level,
        "--log-level-http": "warning",  # else each health request writes a line
        "--random-seed": config.seed + index,
    }
    flags: dict[str, object] = dict(CPU_ARGUMENTS) if cpu else {}
    for flag, argument in configured.items():
        if argument is not None:
            flags[flag] = argument
    words: list[str] = []
    for flag, argument in flags.items():
        words += [flag, str(argument)]
    switches = CPU_SWITCHES if cpu else []
    start = ["-m", "sglang.launch_server"]
    registry = NameRegistry.of(config)
    if registry.secret is not None:
        start = ["-c", BOOT, str(registry.root / SECRET_FILE)]
    return [python, *start, *words, *switches, *options.extra_args]
