"""External servers: a run uses SGLang servers by their addresses, and never stops them.

    python3 -m sglang.launch_server --model-path /models/Qwen2.5-7B-Instruct --port 30000 \\
        --api-key $SERVER_KEY &
    curl --silent --retry 999 --retry-delay 1 --retry-connrefused http://127.0.0.1:30000/health
    python3 examples/external_sglang.py model.path=/models/Qwen2.5-7B-Instruct \\
        'llm_server.addresses=[127.0.0.1:30000,10.0.0.8:30000]' launcher.trainer_ranks=4

The run checks the servers before it starts any process, so curl waits until they answer. They get
the run's weights before they generate, and new weights after each step. On a laptop, an embedded
server of AReaLite replaces SGLang:

    python3 tools/demo_task.py runs/examples/kits/sorting
    python3 arealite/launch_llm_server.py model.path=runs/examples/kits/sorting/model \\
        llm_server.port=30000 cluster.name_root=theirs 2> server.log &
    curl --silent --retry 999 --retry-delay 1 --retry-connrefused http://127.0.0.1:30000/health
    export SERVER_KEY=$(arealite secret cluster.name_root=theirs --token)
    python3 examples/external_sglang.py

The first command makes the model, the last command trains it. An embedded server belongs to a trial
and requires the trial's token. Its separate name_root hides that trial from this run. `kill %1`
ends the server. For servers without a key, set llm_server.api_key_env= (nothing after the =).

Watch publish/servers (servers that loaded the new weights) and publish/stall_s (pause of
generation). docs/servers.md describes how weights reach servers.
"""

from _run import sorting, train

OPTIONS = [
    "llm_server.addresses=[127.0.0.1:30000]",
    "llm_server.api_key_env=SERVER_KEY",
    "trainer.ppo.publisher.type=disk",  # in a folder that servers can read; or distributed
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
    train(OPTIONS, laptop=sorting)
