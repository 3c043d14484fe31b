"""External vLLM servers: a run uses servers that `vllm serve` started, and never stops them.

    VLLM_SERVER_DEV_MODE=1 vllm serve /models/Qwen2.5-7B-Instruct --host 127.0.0.1 --port 8000 \\
        --enable-scale-out --logprobs-mode processed_logprobs &
    curl --silent --retry 999 --retry-delay 1 --retry-connrefused http://127.0.0.1:8000/health
    python3 examples/external_vllm.py model.path=/models/Qwen2.5-7B-Instruct \\
        'llm_server.addresses=[127.0.0.1:8000]' launcher.trainer_ranks=4

In its development mode, vLLM answers the routes for pauses and weights without a key, and without
--host it listens on every interface. For a server on another host, take its address in a private
network (--host 10.0.0.8, and the same address in llm_server.addresses), and set
trainer.ppo.publisher.disk.dir to a folder that the server can read under the same path. A server
that `launch_llm_server llm_server.type=vllm` starts asks for the trial's token on every path, and
checks weights before it loads them.

On a laptop, vLLM's build for the CPU serves a tiny model with two heads:

    make vllm
    arealite quickstart --kit runs/examples/kits/sorting-heads2 --heads 2
    VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 .venv-vllm/bin/vllm serve \\
        runs/examples/kits/sorting-heads2/model --host 127.0.0.1 --port 8000 --enforce-eager \\
        --dtype float32 --enable-scale-out --logprobs-mode processed_logprobs 2> server.log &
    curl --silent --retry 999 --retry-delay 1 --retry-connrefused http://127.0.0.1:8000/health
    python3 examples/external_vllm.py

This model's head is not tied to its embedding. On a CPU, a model with a tied head needs
`launch_llm_server llm_server.type=vllm`, or AReaLite's modules in vLLM (docs/servers.md).

`kill %1` ends the server. Watch publish/servers (servers that loaded the new weights) and
publish/stall_s (pause of generation).
"""

from functools import partial

from _run import sorting, train

OPTIONS = [
    "llm_server.addresses=[127.0.0.1:8000]",
    "trainer.ppo.publisher.type=disk",  # in a folder that the servers can read
    "trainer.ppo.publisher.pause_mode=retract",
    "trainer.ppo.engine.fsdp.gradient_checkpointing=true",
    "dataset.train=generated",
    "dataset.eval=generated",
    "trainer.ppo.max_staleness=4",  # bound of a token's age, in versions
    "trainer.ppo.batch_size=512",
    "trainer.ppo.total_steps=200",
    "trainer.ppo.lr=1e-6",
    "trainer.ppo.collector.sampling.max_new_tokens=1024",
    "trainer.ppo.eval.sampling.max_new_tokens=1024",
]

if __name__ == "__main__":
    train(OPTIONS, laptop=partial(sorting, heads=2))
