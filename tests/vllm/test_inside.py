"""The guard and the weight backend in a real vLLM server."""

from __future__ import annotations

import json
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from arealite.ext.weights.buckets import Bucket, pack
from arealite.ext.weights.process_group import join
from tests.vllm.inside_server import Generation, InsideServer, inside_server
from tests.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1000)]
PROMPT = [5, 6, 7]
TOLERANCE = 1e-4
"""Largest difference of a log-probability from that of transformers in float32."""
NORM = "model.norm.weight"
Tensors = dict[str, torch.Tensor]


@cache
def reference(folder: Path) -> Any:
    """Return the model of a folder in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def largest_difference(generation: Generation, prompt: Sequence[int], folder: Path) -> float:
    """Return the largest difference of a log-probability from that of a folder's model."""
    ids = torch.tensor([[*prompt, *generation.tokens]])
    logits = reference(folder)(ids).logits[0, len(prompt) - 1 : -1]
    tokens = torch.tensor(generation.tokens)[:, None]
    expected = logits.log_softmax(-1).gather(1, tokens)[:, 0]
    return (expected - torch.tensor(generation.logprobs)).abs().max().item()


def assert_samples_from(server: InsideServer, folder: Path, version: str) -> None:
    """Check log-probabilities and version of new tokens."""
    generation = server.generate(PROMPT)
    assert largest_difference(generation, PROMPT, folder) <= TOLERANCE
    assert generation.spans == [(version, 0, 16)]
    (other_folder,) = {*server.folders} - {folder}
    assert largest_difference(generation, PROMPT, other_folder) > 0.01


# -------------------------------------------------------------------- the guard


@pytest.mark.vllm_short
@pytest.mark.parametrize("token", ["", "wrong"])
def test_request_without_token_is_refused_on_every_path(server: InsideServer, token: str) -> None:
    paths: list[str] = []
    for path, methods in server.get("/openapi.json")[1]["paths"].items():
        paths += [path] if "get" in methods else []
        if "post" in methods:
            assert server.post(path, token=token)[0] == 401, path
    assert {"/is_paused", "/server_info", "/v1/models"} <= {*paths}
    for path in ["/openapi.json", "/metrics", "/docs", "/ping", "/nothing", *paths]:
        if path != "/health":
            assert server.get(path, token=token)[0] == 401, path
    assert server.get("/health", token=token)[0] == 200
    assert server.get("/is_paused")[1] == {"is_paused": False}


@pytest.mark.vllm_short
def test_secret_is_neither_in_command_line_nor_in_log(server: InsideServer) -> None:
    command = Path(f"/proc/{server.real.process.pid}/cmdline").read_text()
    assert server.token not in command
    assert server.token not in server.real.log.read_text(errors="replace")


def test_state_has_facts_about_the_server(server: InsideServer) -> None:
    state = server.on_worker("arealite_state")
    assert state["dtype"] == "float32"
    assert state["logprobs_mode"] == "processed_logprobs"
    assert state["version"] == server.get("/version")[1]["version"]
    assert state["start_id"] == server.on_worker("arealite_state")["start_id"]
    config = server.get("/server_info?config_format=json")[1]["vllm_config"]
    assert config["model_config"]["dtype"] == f"torch.{state['dtype']}"
    assert config["model_config"]["logprobs_mode"] == state["logprobs_mode"]
    assert config["instance_id"]


# -------------------------------------------------------------------- a folder


@pytest.mark.vllm_short
def test_update_from_folder_changes_weights_and_version(server: InsideServer) -> None:
    assert_samples_from(server, server.folders[0], "default")
    server.update(server.folders[1], "7")
    assert_samples_from(server, server.folders[1], "7")
    assert server.get("/weight_info")[1] == {"weight_version": "7"}


def test_bfloat16_folder_is_cast(server: InsideServer, tmp_path: Path) -> None:
    folder = copy_of(server.folders[1], tmp_path / "half")
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(folder).items()}
    write(folder, tensors)
    server.update(folder, "8")
    assert largest_difference(server.generate(PROMPT), PROMPT, folder) <= TOLERANCE


def copy_of(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))


def tensors_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def write(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def without_tensor(folder: Path) -> None:
    tensors = tensors_of(folder)
    del tensors[NORM]
    write(folder, tensors)


def with_unknown_tensor(folder: Path) -> None:
    write(folder, tensors_of(folder) | {"extra.weight": torch.zeros(3)})


def with_another_shape(folder: Path) -> None:
    write(folder, tensors_of(folder) | {NORM: torch.zeros(3)})


def with_integers(folder: Path) -> None:
    tensors = tensors_of(folder)
    write(folder, tensors | {NORM: tensors[NORM].long()})


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def with_broken_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def empty(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


REFUSALS: list[tuple[Callable[[Path], None], str]] = [
    (without_tensor, f"tensor '{NORM}' [128] of the served model is missing"),
    (with_unknown_tensor, "tensor 'extra.weight' [3] is not in the served model"),
    (with_another_shape, f"tensor '{NORM}' has shape [3], but [128] in the served model"),
    (with_integers, f"tensor '{NORM}' has type I64, but F32 in the served model"),
    (truncated, "is not a complete safetensors file: "),
    (with_broken_header, "is not a complete safetensors file: "),
    (empty, "has no safetensors files"),
]


@pytest.mark.vllm_short
@pytest.mark.parametrize(("spoil", "message"), REFUSALS)
def test_bad_folder_is_refused_and_server_keeps_its_weights(
    server: InsideServer,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    before = server.generate(PROMPT)
    folder = copy_of(server.folders[1], tmp_path / "bad")
    spoil(folder)
    server.post_ok("/pause?mode=keep")
    refusal = server.check(path=str(folder))
    assert message in refusal
    assert "\n" not in refusal
    assert server.post("/start_weight_update")[0] == 500
    assert server.obstacle == ""
    server.post_ok("/resume")
    after = server.generate(PROMPT)
    assert after.tokens == before.tokens
    assert after.spans == before.spans
    assert largest_difference(after, PROMPT, server.folders[0]) <= TOLERANCE
    server.update(server.folders[1], "9")
    assert_samples_from(server, server.folders[1], "9")


def test_update_without_pause_or_check_is_refused(server: InsideServer) -> None:
    status, answer = server.post("/start_weight_update")
    assert (status, answer["error"]["message"]) == (409, "pause the server before a weight update")
    server.post_ok("/pause?mode=keep")
    status, answer = server.post("/start_weight_update")
    assert status == 500
    assert "call arealite_check_weights before" in answer["error"]["message"]
    server.post_ok("/resume")
    assert_samples_from(server, server.folders[0], "default")


def test_unfinished_update_keeps_server_paused(server: InsideServer) -> None:
    folder = str(server.folders[1])
    server.post_ok("/pause?mode=keep")
    assert server.check(path=folder) == ""
    server.post_ok("/start_weight_update")
    server.post_ok("/update_weights", update_info={"path": folder})
    for path in ("/resume", "/wake_up"):
        status, answer = server.post(path)
        expected = "a weight update is not finished"
        assert (status, answer["error"]["message"]) == (409, expected)
    server.load(server.folders[1], "3")  # of a sender that has been restarted
    server.post_ok("/resume")
    assert_samples_from(server, server.folders[1], "3")


def test_file_that_vanishes_after_the_check_keeps_server_paused(
    server: InsideServer, tmp_path: Path
) -> None:
    folder = copy_of(server.folders[1], tmp_path / "parts")
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    first, second = folder / "a.safetensors", folder / "b.safetensors"
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:6]}, first)
    save_file({name: tensors[name] for name in names[6:]}, second)
    server.post_ok("/pause?mode=keep")
    assert server.check(path=str(folder)) == ""
    server.post_ok("/start_weight_update")
    second.unlink()
    assert server.post("/update_weights", update_info={"path": str(folder)})[0] == 500
    assert server.obstacle.startswith("a weight update failed (No such file")
    assert server.post("/resume")[0] == 409
    assert "of the served model is missing" in server.check(path=str(folder))
    assert server.post("/resume")[0] == 409
    server.load(server.folders[0], "2")
    server.post_ok("/resume")
    assert_samples_from(server, server.folders[0], "2")


# -------------------------------------------------------------------- versions and cache


@pytest.mark.vllm_short
def test_request_that_runs_during_update_has_two_spans(server: InsideServer) -> None:
    def is_running() -> bool:
        lines = server.get("/metrics")[1].splitlines()
        (line,) = [line for line in lines if line.startswith("vllm:num_requests_running{")]
        return float(line.split()[-1]) == 1

    with ThreadPoolExecutor(1) as pool:
        has_ended = True
        while has_ended:  # a request may end before a busy machine sees that it runs
            generating = pool.submit(server.generate, PROMPT, max_tokens=400)
            until(lambda: is_running() or generating.done(), what="a running request")  # noqa: B023
            has_ended = generating.done()
        server.post_ok("/pause?mode=keep")
        server.load(server.folders[1], "5")
        server.post_ok("/resume")
        generation = generating.result()
    (first_version, begin, middle), (second_version, second_begin, end) = generation.spans
    assert (first_version, second_version) == ("default", "5")
    assert (begin, middle, end) == (0, second_begin, 400)
    tokens = generation.tokens
    first = Generation(tokens=tokens[:middle], logprobs=generation.logprobs[:middle], spans=[])
    second = Generation(tokens=tokens[middle:], logprobs=generation.logprobs[middle:], spans=[])
    assert largest_difference(first, PROMPT, server.folders[0]) <= TOLERANCE
    new_prompt = PROMPT + tokens[:middle]
    assert largest_difference(second, new_prompt, server.folders[1]) <= TOLERANCE


def test_reset_of_prefix_cache_drops_prompts_of_earlier_weights(server: InsideServer) -> None:
    prompt = [3 + index % 60 for index in range(300)]  # longer than a block of the cache
    server.generate(prompt)
    server.post_ok("/pause?mode=keep&clear_cache=false")
    server.load(server.folders[1], "6")
    server.post_ok("/resume")
    assert largest_difference(server.generate(prompt), prompt, server.folders[1]) > 0.01
    assert server.post_ok("/reset_prefix_cache") == {"success": True}
    assert largest_difference(server.generate(prompt), prompt, server.folders[1]) <= TOLERANCE


# -------------------------------------------------------------------- a process group


@contextmanager
def group_with(server: InsideServer) -> Iterator[dist.ProcessGroup]:
    """Join a new group with the server's worker, as rank 0."""
    listener = socket.create_server(("127.0.0.1", 0))
    name = f"test-{secrets.token_hex(4)}"
    info = {
        "master_address": "127.0.0.1",
        "master_port": listener.getsockname()[1],
        "group_name": name,
        "rank_offset": 1,
        "world_size": 2,
        "backend": "gloo",
        "timeout_s": 60.0,
    }
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(
            join, listener, name, rank=0, world_size=2, backend="gloo", seconds=60.0
        )
        server.post_ok("/init_weight_transfer_engine", init_info=info)
        group = joining.result()
    try:
        yield group
    finally:
        server.post_ok("/shutdown_weight_transfer_engine")
        dist.destroy_process_group(group)


def send(
    server: InsideServer, group: dist.ProcessGroup, bucket: Bucket, *, is_flat: bool = False
) -> None:
    """Send a bucket in one request."""
    info: dict[str, Any] = dict(vars(bucket.layout))
    if is_flat:
        info["load_format"] = "flattened_bucket"
    with ThreadPoolExecutor(1) as pool:
        posting = pool.submit(server.post_ok, "/update_weights", update_info=info)
        for tensor in [bucket.flat] if is_flat else bucket.tensors:
            dist.broadcast(tensor, src=0, group=group)
        posting.result()


def shapes_of(tensors: Tensors) -> dict[str, list[int]]:
    return {name: [*tensor.shape] for name, tensor in tensors.items()}


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("max_bytes", [2**30, 40_000])
def test_update_from_group_changes_weights_and_version(
    server: InsideServer, is_flat: bool, max_bytes: int
) -> None:
    tensors = tensors_of(server.folders[1])
    buckets = [*pack(tensors.items(), max_bytes)]
    assert (len(buckets) > 3) == (max_bytes < 2**30)
    with group_with(server) as group:
        server.post_ok("/pause?mode=keep")
        assert server.check(shapes=shapes_of(tensors)) == ""
        server.post_ok("/start_weight_update")
        for bucket in buckets:
            send(server, group, bucket, is_flat=is_flat)
        server.post_ok("/finish_weight_update", weight_version="4")
        server.post_ok("/resume")
    assert_samples_from(server, server.folders[1], "4")


def test_group_update_with_wrong_shapes_is_refused(server: InsideServer) -> None:
    shapes = shapes_of(tensors_of(server.folders[1]))
    server.post_ok("/pause?mode=keep")
    assert "is missing" in server.check(shapes={NORM: [128]})
    assert "has shape [1]" in server.check(shapes=shapes | {NORM: [1]})
    assert "is not in the served model" in server.check(shapes=shapes | {"extra": [1]})
    assert server.check() != ""
    server.post_ok("/resume")
    assert_samples_from(server, server.folders[0], "default")


def test_tensors_that_differ_from_the_check_leave_the_model_unchanged(server: InsideServer) -> None:
    tensors = tensors_of(server.folders[1])
    bad_layouts = [
        {"names": [NORM], "dtypes": ["float32"], "shapes": [[3]]},
        {"names": [NORM], "dtypes": ["int64"], "shapes": [[128]]},
        {"names": [NORM], "dtypes": ["no_dtype"], "shapes": [[128]]},
        {"names": ["extra"], "dtypes": ["float32"], "shapes": [[3]]},
        {"names": [NORM], "dtypes": [], "shapes": []},
        {"path": str(server.folders[1])},
        {"unknown_field": 1},
    ]
    with group_with(server):
        for layout in bad_layouts:
            server.post_ok("/pause?mode=keep")
            assert server.check(shapes=shapes_of(tensors)) == ""
            server.post_ok("/start_weight_update")
            assert server.post("/update_weights", update_info=layout)[0] == 500, layout
            assert server.post("/finish_weight_update")[0] == 500
            assert server.obstacle == ""
            server.post_ok("/resume")
    assert_samples_from(server, server.folders[0], "default")


@pytest.mark.vllm_short
def test_failed_update_keeps_server_paused_until_a_whole_update(server: InsideServer) -> None:
    tensors = tensors_of(server.folders[1])
    first_bucket, *_ = pack(tensors.items(), 40_000)
    with group_with(server) as group:
        server.post_ok("/pause?mode=keep")
        assert server.check(shapes=shapes_of(tensors)) == ""
        server.post_ok("/start_weight_update")
        send(server, group, first_bucket)
        status, answer = server.post("/finish_weight_update", weight_version="2")
        assert status == 500
        assert "tensors did not arrive: " in answer["error"]["message"]
        assert server.obstacle.startswith("a weight update failed (tensors did not arrive: ")
        assert server.obstacle.endswith("; update all weights again")
        status, answer = server.post("/resume")
        assert (status, answer["error"]["message"]) == (409, server.obstacle)
        assert server.get("/is_paused")[1] == {"is_paused": True}
        assert server.get("/weight_info")[1] == {"weight_version": "default"}
        server.load(server.folders[1], "3")
        assert server.obstacle == ""
    server.post_ok("/resume")
    assert_samples_from(server, server.folders[1], "3")


# -------------------------------------------------------------------- other servers


def test_untied_llama_is_updated_from_folder_and_group(tmp_path: Path) -> None:
    with inside_server(tmp_path, family="llama", tie_word_embeddings=False) as server:
        first, second = server.folders
        server.update(second, "1")
        assert_samples_from(server, second, "1")
        tensors = tensors_of(first)
        shapes = shapes_of(tensors)
        head = "lm_head.weight"
        without_head = {name: shape for name, shape in shapes.items() if name != head}
        assert server.check(shapes=without_head) == (
            f"tensor '{head}' [64, 128] of the served model is missing"
        )
        with group_with(server) as group:
            server.post_ok("/pause?mode=keep")
            assert server.check(shapes=shapes) == ""
            server.post_ok("/start_weight_update")
            for bucket in pack(tensors.items(), 40_000):
                send(server, group, bucket)
            server.post_ok("/finish_weight_update", weight_version="2")
            server.post_ok("/resume")
        assert_samples_from(server, first, "2")
        assert json.loads((first / "config.json").read_text())["model_type"] == "llama"
