"""SGLang servers of this host: command line, environment, and the script that starts SGLang."""

import os
from pathlib import Path

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.server_protocol import Json
from arealite.base.errors import UserError
from arealite.base.model_folder import read_shapes
from arealite.ext.models.adapter_folder import adapted
from arealite.ext.server_processes.sent_adapters import options_of, sent_adapter
from arealite.ext.server_processes.server_group import ProbedPython, ServerGroup, model_folder
from arealite.ext.server_processes.server_process import ServerProgram
from arealite.system.names.name_registry import SECRET_FILE, NameRegistry

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

ADAPTED = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj")
)
"""Linear layers for which SGLang has adapters. It has more, which were not tried."""

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

SGLANG = ServerProgram(
    package="sglang",
    title="SGLang",
    setup_script="tools/setup_sglang_cpu.sh",
    first_requests={
        # Old versions report load and limits only after it.
        "/generate": {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}},
    },
    # The server computes this document at the first request and does not reply for a second. The
    # publisher requests it as soon as the name exists.
    warm_up_paths=("/openapi.json",),
)


class SGLangServer(ServerGroup):
    """Starts `num_servers` SGLang servers."""

    program = SGLANG

    def check(self, python: ProbedPython, model: Json, *, is_cpu: bool) -> None:
        """Check that SGLang has adapters for the configured layers."""
        options = self.options
        unknown_targets = {*options.adapter_targets} - ADAPTED
        if options.adapter_rank and (unknown_targets or options.dp > 1):
            raise UserError(
                f"llm_server.sglang.adapter_rank={options.adapter_rank}: "
                f"SGLang loads adapters only with dp=1, and on {', '.join(sorted(ADAPTED))}. "
                "Set llm_server.sglang.adapter_rank=0 for servers that get merged weights."
            )

    def environment(self, devices: str | None) -> dict[str, str]:
        """Return a server's environment variables; those of this process have precedence."""
        if devices is None:
            return {**ENVIRONMENT, **CPU_ENVIRONMENT, **os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
        return {**ENVIRONMENT, **os.environ, "CUDA_VISIBLE_DEVICES": devices}

    def command(self, python: str, index: int, *, is_cpu: bool, port: int) -> list[str]:
        """Return the command line of a server. SGLang uses the last of equal arguments."""
        config = self.config
        server = config.llm_server
        configured: dict[str, object] = {
            "--model-path": model_folder(config),
            "--dtype": config.model.dtype,
            "--device": "cpu" if is_cpu else "cuda",
            "--tp-size": self.options.tp,
            "--dp-size": self.options.dp,
            "--mem-fraction-static": self.options.mem_fraction,
            "--attention-backend": self.options.attention_backend,
            "--context-length": server.context_length,
            "--host": server.host,
            "--port": port,
            "--log-level": server.log_level,
            "--log-level-http": "warning",  # else each health request writes a line
            "--random-seed": config.seed + index,
        }
        if self.options.adapter_rank:
            configured |= {
                "--max-lora-rank": self.options.adapter_rank,
                "--max-loras-per-batch": self.options.adapters_per_batch + 1,  # and the base model
                "--lora-backend": "torch_native" if is_cpu else None,
            }
        flags: dict[str, object] = dict(CPU_ARGUMENTS) if is_cpu else {}
        for flag, argument in configured.items():
            if argument is not None:
                flags[flag] = argument
        words: list[str] = []
        for flag, argument in flags.items():
            words += [flag, str(argument)]
        switches = CPU_SWITCHES if is_cpu else []
        if self.options.adapter_rank:
            targets = self.options.adapter_targets
            switches = [*switches, "--enable-lora", "--lora-target-modules", *targets]
        start = ["-m", "sglang.launch_server"]
        registry = NameRegistry.of(config)
        if registry.secret is not None:
            start = ["-c", BOOT, str(registry.root / SECRET_FILE)]
        return [python, *start, *words, *switches, *self.options.extra_args]


def adapter_options(config: ExperimentConfig) -> dict[str, object]:
    """Return the options with which servers load the run's adapter; {} if they cannot.

    Hook `server_options`.
    """
    lora = sent_adapter(config)
    if lora is None:
        return {}
    layers = adapted(read_shapes(Path(config.model.path).expanduser()), lora.targets)
    targets = {name.rpartition(".")[2] for name, is_adapted in layers.items() if is_adapted}
    if not targets <= ADAPTED:
        return {}
    return {
        **options_of("sglang", lora),
        "llm_server.sglang.adapter_targets": sorted(targets),
    }
