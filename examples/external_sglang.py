"""Servers that somebody else started: SGLang anywhere, named by address, used and never stopped.

    python3 -m sglang.launch_server --model-path /models/Qwen2.5-7B-Instruct --port 30000 \\
        --api-key $SERVER_KEY &
    curl --silent --retry 999 --retry-delay 1 --retry-connrefused http://127.0.0.1:30000/health
    python3 examples/external_sglang.py model.path=/models/Qwen2.5-7B-Instruct \\
        'llm_server.addresses=[127.0.0.1:30000,10.0.0.8:30000]' launcher.trainer_ranks=4

The servers are asked before anything starts, so wait until they answer: curl does. They get the
run's weights before they generate, and new ones after each step. On a laptop, with a server of ours
in place of SGLang:

    python3 tools/demo_task.py runs/examples/kits/sorting
    python3 arealite/launch_llm_server.py model.path=runs/examples/kits/sorting/model \\
        llm_server.port=30000 cluster.name_root=theirs 2> server.log &
    curl --silent --retry 999 --retry-delay 1 --retry-connrefused http://127.0.0.1:30000/health
    export SERVER_KEY=$(arealite secret cluster.name_root=theirs --token)
    python3 examples/external_sglang.py

The first makes the model, the last uses it. A server of ours belongs to a trial, and asks for that
trial's token; with a name_root of its own, the run here knows nothing of that trial. `kill %1` ends
the server. For servers without a key, say llm_server.api_key_env= (nothing behind the =).

Watch publish/servers, how many took the new weights, and publish/stall_s, for how long generation
stood still. How weights travel: docs/servers.md.
"""

from _run import sorting, train

OPTIONS = [
    "llm_server.addresses=[127.0.0.1:30000]",
    "llm_server.api_key_env=SERVER_KEY",
    "trainer.ppo.publisher.type=disk",  # a folder that they see; distributed: a process group
    "trainer.ppo.publisher.pause_mode=retract",
    "trainer.ppo.engine.fsdp.gradient_checkpointing=true",
    "dataset.train=generated",
    "dataset.eval=generated",
    "trainer.ppo.max_staleness=4",  # generation goes on for so many updates while one is trained
    "trainer.ppo.batch_size=512",
    "trainer.ppo.total_steps=200",
    "trainer.ppo.lr=1e-6",
    "trainer.ppo.collector.sampling.max_new_tokens=1024",
    "trainer.ppo.eval.sampling.max_new_tokens=1024",
]

if __name__ == "__main__":
    train(OPTIONS, laptop=sorting)
