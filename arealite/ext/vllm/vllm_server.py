"""vLLM servers of this host: command line, environment, and checks of version and model."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from arealite.api.experiment_config import ExperimentConfig, ServerConfig
from arealite.api.llm import MAX_TOP
from arealite.api.server_protocol import Json
from arealite.base.errors import UserError
from arealite.base.model_folder import text_part
from arealite.ext.server_processes.sent_adapters import options_of, sent_adapter
from arealite.ext.server_processes.server_group import ProbedPython, ServerGroup, model_folder
from arealite.ext.server_processes.server_process import ServerProgram
from arealite.ext.vllm.vllm_control import ONE_TOKEN
from arealite.ext.vllm.vllm_protocol import NEEDS_RESTART, OLDEST_VERSION, version_numbers
from arealite.system.names.name_registry import SECRET_FILE, NameRegistry

INSIDE = Path(__file__).parent / "inside"
"""Folder of the modules that vLLM's processes import."""
SECRET_VARIABLE = "AREALITE_SECRET_FILE"
"""Environment variable of the guard with the path of the trial's secret."""
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
REQUIRED_ARGUMENTS = [
    "--enable-scale-out",  # the route that generates
    "--logprobs-mode=processed_logprobs",  # those of the distribution that vLLM samples from
    "--generation-config=vllm",  # no sampling parameters of the model's folder
    "--api-server-count=1",  # an abort reaches only the requests of its own process
    "--worker-extension-cls=arealite_vllm_weights.Extension",
    '--weight-transfer-config={"backend": "arealite"}',
    "--api-key=",  # clients have the trial's token alone
    "--middleware=arealite_vllm_guard.Guard",
]
"""Arguments that a run needs. They follow the user's: vLLM uses the last of equal arguments, and
the last middleware runs first."""
CPU_HEAD_SIZES = frozenset((32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512))
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The numbers that vLLM takes as the largest rank of adapters."""
MAX_SOCKET_FOLDER = 60
"""Characters; the limit of a Unix socket's path is 107, and vLLM's names have 36."""

VLLM = ServerProgram(
    package="vllm",
    title="vLLM",
    setup_script="tools/setup_vllm_cpu.sh",
    first_requests={"/inference/v1/generate": ONE_TOKEN},
    restart_version=NEEDS_RESTART,
)


class VLLMServer(ServerGroup):
    """Starts `num_servers` vLLM servers."""

    program = VLLM

    def __init__(self, args: ServerConfig) -> None:
        super().__init__(args)
        self.temporary_folder = tempfile.gettempdir()

    async def serve(self) -> None:
        """Run all servers, and remove the sockets and files that vLLM leaves behind."""
        parent = tempfile.gettempdir()
        if len(parent) > MAX_SOCKET_FOLDER - len("/vllm-12345678"):
            parent = "/tmp"
        with tempfile.TemporaryDirectory(
            prefix="vllm-", dir=parent, ignore_cleanup_errors=True
        ) as self.temporary_folder:
            await super().serve()

    def check(self, python: ProbedPython, model: Json, *, is_cpu: bool) -> None:
        """Check the version of vLLM, and whether it is built for the model on this device."""
        version = python.program_version
        python_option = f"llm_server.vllm.python: {python.path}"
        if version_numbers(version) < OLDEST_VERSION:
            raise UserError(
                f"{python_option} has vLLM {version}, "
                "which does not report the version of each token. "
                "Install vLLM 0.32 or newer there."
            )
        if self.options.dp > 1:
            raise UserError(
                f"llm_server.vllm.dp={self.options.dp}: one server has one copy of the model. "
                "Set llm_server.vllm.num_servers instead."
            )
        if self.options.adapter_rank > ADAPTER_RANKS[-1]:
            raise UserError(
                f"llm_server.vllm.adapter_rank={self.options.adapter_rank} is above "
                f"{ADAPTER_RANKS[-1]}, the largest rank of vLLM. "
                "Set llm_server.vllm.adapter_rank=0 for servers that get merged weights."
            )
        if not is_cpu:
            return
        if "cpu" not in version and sys.platform == "linux":
            raise UserError(
                f"{python_option} has vLLM {version}, which is not built for a CPU. "
                f"Name a Python that {VLLM.setup_script} made, or set llm_server.vllm.device=cuda."
            )
        size = head_size(model)
        if size and size not in CPU_HEAD_SIZES:
            raise UserError(
                f"model.path={self.config.model.path} has attention heads of {size} numbers, "
                f"but vLLM has only {', '.join(map(str, sorted(CPU_HEAD_SIZES)))} on a CPU. "
                "Use another model, a GPU, or llm_server.type=embedded."
            )

    def environment(self, devices: str | None) -> dict[str, str]:
        """Return a server's environment variables; required ones replace those of this process."""
        registry = NameRegistry.of(self.config)
        required = {
            "VLLM_SERVER_DEV_MODE": "1",  # the routes for pauses and weights
            "VLLM_API_KEY": "",
            "VLLM_LOGGING_LEVEL": self.config.llm_server.log_level.upper(),
            "VLLM_RPC_BASE_PATH": self.temporary_folder,
            "TMPDIR": self.temporary_folder,
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(INSIDE), os.environ.get("PYTHONPATH")))
            ),
            SECRET_VARIABLE: str(registry.root / SECRET_FILE) if registry.secret else "",
        }
        if self.options.adapter_rank:
            required["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if devices is None:
            required["VLLM_CPU_KVCACHE_SPACE"] = str(self.options.kv_cache_gb)
            if self.options.enforce_eager is not False:
                # Else the sampler is compiled at the first token, by g++ for half of the start.
                required["TORCHDYNAMO_DISABLE"] = "1"
        else:
            required["CUDA_VISIBLE_DEVICES"] = devices
        return {**ENVIRONMENT, **os.environ, **required}

    def command(self, python: str, index: int, *, is_cpu: bool, port: int) -> list[str]:
        """Return the command line of a server."""
        config = self.config
        server = config.llm_server
        options = self.options
        configured: dict[str, Any] = {
            "--served-model-name": "policy",  # else each answer has the path of the folder
            "--dtype": config.model.dtype,
            "--max-model-len": server.context_length,
            "--seed": config.seed + index,
            "--tensor-parallel-size": options.tp,
            "--gpu-memory-utilization": options.gpu_memory_utilization,
            "--max-num-seqs": options.max_num_seqs,
            "--max-logprobs": MAX_TOP + 1,
            "--uvicorn-log-level": "warning",
        }
        words = [
            f"{flag}={argument}" for flag, argument in configured.items() if argument is not None
        ]
        if options.adapter_rank:
            ranks = [rank for rank in ADAPTER_RANKS if rank >= options.adapter_rank]
            words += ["--enable-lora", f"--max-lora-rank={ranks[0]}"]
            words.append(f"--max-loras={options.adapters_per_batch}")
        words.append("--disable-uvicorn-access-log")  # else each health request writes a line
        is_eager = options.enforce_eager
        if is_eager or (is_eager is None and is_cpu):
            words.append("--enforce-eager")
        return [
            python,
            *("-m", "vllm.entrypoints.cli.main", "serve"),
            str(model_folder(config)),
            *words,
            *options.extra_args,
            f"--host={server.host}",
            f"--port={port}",
            *REQUIRED_ARGUMENTS,
        ]


def adapter_options(config: ExperimentConfig) -> dict[str, object]:
    """Return the options with which servers load the run's adapter; {} if they cannot.

    Hook `server_options`.
    """
    lora = sent_adapter(config)
    if lora is None or lora.rank > ADAPTER_RANKS[-1]:
        return {}
    return options_of("vllm", lora)


def head_size(model: Json) -> int | None:
    """Return the numbers per attention head by a config.json; None if it does not say it."""
    text_model = text_part(model)
    if "kv_lora_rank" in text_model:  # its heads have several sizes
        return None
    if text_model.get("head_dim"):
        return text_model["head_dim"]
    hidden_size = text_model.get("hidden_size")
    num_heads = text_model.get("num_attention_heads")
    return hidden_size // num_heads if hidden_size and num_heads else None
