"""Adapters beside the layers of a served model, compared with peft's own forward pass."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import ClientSession
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from arealite.ext.embedded import served_adapters, staged_versions
from arealite.ext.embedded.cache_decoder import CacheDecoder
from arealite.ext.embedded.decoder import BaseDecoder, Decoder
from arealite.ext.embedded.generation import Generation, SamplingParams
from arealite.ext.embedded.protocol import RequestRefused
from arealite.ext.embedded.served_adapters import read_low_rank, scaling_of
from arealite.ext.embedded.weight_loading import load_model
from arealite.impl.weights.float_file import map_floats, write_floats
from tests.ext.embedded.adapter_runs import AdapterRun, adapter_folder
from tests.fakes.embedded import Brake, running, server_config
from tests.models import tiny_model
from tests.waiting import eventually

pytestmark = [
    pytest.mark.usefixtures("group"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), init_std=0.1)


@pytest.fixture(scope="module")
def adapters(group: object, model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("adapters")
    return [adapter_folder(model, parent / str(seed), seed, rank=2 + seed) for seed in range(3)]


def request(prompt: Sequence[int], adapter: str, limit: int = 12, **sampling: Any) -> Generation:
    return Generation(
        rid=adapter,
        prompt=[*prompt],
        sampling=SamplingParams(**sampling),
        limit=limit,
        stops=frozenset(),
        adapter=adapter,
        num_top=3,
        scored_from=0,
    )


class OperationCount(TorchDispatchMode):
    """Counts the operations of torch."""

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.total += 1
        return func(*args, **(kwargs or {}))


def of_peft(model: Path, adapter: Path | None, tokens: list[int]) -> np.ndarray:
    """Return the log-probabilities of the tokens after the first, by transformers and peft."""
    import peft

    theirs: Any = AutoModelForCausalLM.from_pretrained(model).eval()
    if adapter is not None:
        theirs = peft.PeftModel.from_pretrained(theirs, adapter)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logprobs = theirs(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()


@pytest.mark.parametrize("kind", [Decoder, CacheDecoder])
def test_each_row_of_a_mixed_batch_has_the_policy_of_its_adapter(
    kind: type[BaseDecoder], model: Path, adapters: list[Path]
) -> None:
    served, _ = load_model(str(model), dtype="float32", device="cpu")
    decoder = kind(served, max_rows=16, seed=0)
    folders: dict[str, Path | None] = {"": None}
    for number, folder in enumerate(adapters):
        folders[f"a{number}"] = folder
        decoder.adapters.load(f"a{number}", read_low_rank(served, folder))
    prompt = [*range(1, 25)]  # long enough to be a shared prefix
    requests = [request(prompt, name) for name in folders for _ in range(2)]
    requests += [request(prompt[:9], name) for name in reversed(folders)]
    decoder.run(requests)
    for done in requests:
        expected = of_peft(model, folders[done.adapter], done.prompt + done.output)
        ours = np.array(done.prompt_logprobs + done.logprobs)
        assert np.abs(ours - expected).max() < 2e-5, done.adapter


def test_uneven_batches_of_unlike_adapters_have_their_policies(
    model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    """Adapters of some layers, of other ranks, with few or many rows, replaced and removed."""
    served, _ = load_model(str(model), dtype="float32", device="cpu")
    decoder = Decoder(served, max_rows=24, seed=0)
    some_layers = ["q_proj", "down_proj"]
    queries = adapter_folder(model, tmp_path / "q", 7, rank=1, targets=some_layers)
    large = adapter_folder(model, tmp_path / "large", 8, rank=9)
    folders: dict[str, Path | None] = {"": None, "none": None}

    def load(name: str, folder: Path) -> None:
        folders[name] = folder
        decoder.adapters.load(name, read_low_rank(served, folder))

    def check(counts: dict[str, int]) -> None:
        names = [name for name, count in counts.items() for _ in range(count)]
        requests = [request([*range(1, 4 + row % 5)], name, 5) for row, name in enumerate(names)]
        decoder.run(requests[::2] + requests[1::2])
        for done in requests:
            expected = of_peft(model, folders[done.adapter], done.prompt + done.output)
            ours = np.array(done.prompt_logprobs + done.logprobs)
            assert np.abs(ours - expected).max() < 2e-5, (done.adapter, counts)

    for name, folder in zip("abcd", [*adapters, queries], strict=True):
        load(name, folder)
    check({"a": 1, "d": 11, "c": 1, "none": 3, "": 1})
    check({"b": 2, "d": 2})
    load("", large)
    load("a", adapters[1])
    check({"": 3, "a": 2, "b": 1, "c": 4, "d": 9})
    load("c", queries)
    decoder.adapters.remove("b")
    folders["b"] = None
    check({"b": 2, "c": 2, "": 9, "a": 1})
    decoder.adapters.remove("")
    folders[""] = None
    check({"": 2, "d": 3})


def test_products_of_a_step_do_not_grow_with_the_adapters(
    model: Path, adapters: list[Path]
) -> None:
    served, _ = load_model(str(model), dtype="float32", device="cpu")
    decoder = Decoder(served, max_rows=129, seed=0)
    names = [str(number) for number in range(8)]
    for number, name in enumerate(names):
        decoder.adapters.load(name, read_low_rank(served, adapters[number % 3]))

    def operations(adapters_of_rows: list[str]) -> int:
        requests = [request([1, 2, 3], name, 3) for name in adapters_of_rows]
        with torch.inference_mode():
            decoder.prefill(deque(requests))
            decoder.decode()
            with OperationCount() as count:
                decoder.decode()
            decoder.clear()
        return count.total

    small = operations(names[:2] * 64)
    assert small == operations(names * 16)
    padded = operations(names * 16 + ["0"])
    uneven = operations(["0"] * 65 + ["5"] + ["2", "7"] * 31)
    assert small < padded < uneven, "more products"


def test_padded_rows_touch_no_row_of_the_batch(model: Path, adapters: list[Path]) -> None:
    """Huge numbers of an adapter may overflow; only its own rows may get them."""
    served, _ = load_model(str(model), dtype="float32", device="cpu")
    decoder = Decoder(served, max_rows=8, seed=0)
    huge = read_low_rank(served, adapters[0])
    for low_rank in huge.values():
        low_rank.down_RI.fill_(3e38)
    decoder.adapters.load("a", read_low_rank(served, adapters[1]))
    decoder.adapters.load("huge", huge)
    prompts_and_names = [([1, 2, 3], "a"), ([4, 5, 6], "a"), ([1, 2, 3], "huge")]
    requests = [request(prompt, name, 4) for prompt, name in prompts_and_names]
    decoder.run(requests)
    for done in requests[:2]:
        expected = of_peft(model, adapters[1], done.prompt + done.output)
        assert np.abs(np.array(done.logprobs) - expected[-4:]).max() < 2e-5


def test_seeded_request_gets_the_same_tokens_beside_others_and_alone(
    model: Path, adapters: list[Path]
) -> None:
    served, _ = load_model(str(model), dtype="float32", device="cpu")
    decoder = Decoder(served, max_rows=16, seed=0)
    names = ["", "0", "1", "2"]
    for name, folder in zip(names[1:], adapters, strict=True):
        decoder.adapters.load(name, read_low_rank(served, folder))

    def seeded() -> list[Generation]:
        prompts = [([*range(1, 4 + number)], names[number % 4]) for number in range(12)]
        return [
            request(prompt, adapter, sampling_seed=number)
            for number, (prompt, adapter) in enumerate(prompts)
        ]

    together = seeded()
    decoder.run(together)
    for beside, alone in zip(together, seeded(), strict=True):
        decoder.run([request([5, 6], "1"), alone])  # the first has no seed
        assert alone.output == beside.output
        assert np.abs(np.array(alone.logprobs) - beside.logprobs).max() < 2e-5
    assert len({tuple(each.output) for each in together}) == 12, "each seed has its own tokens"
    continued = replace(together[5], prompt=together[5].prompt + together[5].output[:4])
    continued.output, continued.logprobs, continued.finish = [], [], None
    continued.limit -= 4
    decoder.run([continued])
    assert continued.output == together[5].output[4:], "the position counts, not the request"


def test_prefix_of_another_adapter_is_not_reused(model: Path, adapters: list[Path]) -> None:
    served, _ = load_model(str(model), dtype="float32", device="cpu")
    decoder = Decoder(served, max_rows=4, seed=0)
    decoder.adapters.load("a", read_low_rank(served, adapters[0]))
    prompt = [*range(1, 40)]
    for adapter, folder in (("", None), ("a", adapters[0]), ("", None)):
        pair = [request(prompt, adapter), request([*prompt, 5], adapter)]
        decoder.run(pair)
        for done in pair:
            expected = of_peft(model, folder, done.prompt + done.output)
            sampled = expected[-len(done.output) :]
            assert np.abs(np.array(done.logprobs) - sampled).max() < 2e-5


def test_adapter_that_is_staged_in_memory_is_not_copied_and_survives_its_files(
    model: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_versions, "TMPFS", tmp_path)
    served, _ = load_model(str(model), dtype="float32", device="cpu")
    decoder = Decoder(served, max_rows=4, seed=0)
    for name, folder in (("arealite-0-1-x", adapters[0]), ("others", adapters[1])):
        staged = shutil.copytree(folder, tmp_path / name / "v1")
        decoder.adapters.load(name, read_low_rank(served, staged))
        maps = Path("/proc/self/maps").read_text()
        assert (str(staged) in maps) == (folder == adapters[0])
        shutil.rmtree(staged)
        done = request([*range(1, 20)], name)
        decoder.run([done])
        expected = of_peft(model, folder, done.prompt + done.output)
        assert np.abs(np.array(done.logprobs) - expected[-len(done.output) :]).max() < 2e-5


@pytest.mark.parametrize("name", [*map("a".__mul__, range(1, 9)), "ä"])  # every padding
def test_file_of_floats_is_that_of_safetensors(name: str, tmp_path: Path) -> None:
    tensors = {
        name: torch.arange(15.0).view(3, 5),
        "1": torch.arange(15.0, 30.0).view(5, 3).T,
        "2": torch.empty(0, 4),
        "3": torch.tensor([30.0], dtype=torch.bfloat16),
    }
    write_floats(tmp_path / "ours", tensors)
    save_file(
        {name: tensor.float().contiguous() for name, tensor in tensors.items()},
        tmp_path / "theirs",
        metadata={"format": "pt"},
    )
    for file in ("ours", "theirs"):
        numbers, mapped = map_floats(tmp_path / file)
        assert mapped.keys() == tensors.keys()
        assert sorted(numbers.tolist()) == [*range(31)]
        for key, tensor in load_file(tmp_path / file).items():
            assert torch.equal(tensor, tensors[key].float())
            assert torch.equal(mapped[key], tensor)


async def test_adapter_is_replaced_while_requests_of_others_go_on(
    model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    async with (
        running(server_config(model, tmp_path / "names")) as server,
        ClientSession(server.address) as session,
    ):

        async def post(path: str, **body: object) -> dict[str, Any]:
            async with session.post(path, json=body) as response:
                return await response.json()

        async def load(name: str, folder: Path, version: str) -> dict[str, Any]:
            return await post(
                "/load_lora_adapter",
                lora_name=name,
                lora_path=str(folder),
                weight_version=version,
            )

        def generate(name: str) -> asyncio.Future[dict[str, Any]]:
            sampling = {"max_new_tokens": 40, "ignore_eos": True}
            body = {"input_ids": [*range(1, 9)], "sampling_params": sampling}
            return asyncio.ensure_future(
                post("/generate", **body, lora_path=name, return_logprob=True)
            )

        assert (await load("a", adapters[0], "0"))["success"]
        assert (await load("b", adapters[1], "0"))["success"]
        brake = Brake(server.engine)
        brake.block(free=5)
        asking = [generate("a"), generate("b")]
        await eventually(
            lambda: [len(each.output) > 3 for each in server.engine.decoder.running] == [True] * 2,
            "two running requests",
        )
        replacing = asyncio.ensure_future(load("a", adapters[2], "1"))
        await eventually(lambda: server.engine.adapter_versions.get("a") == "1", "the new adapter")
        brake.release()
        assert (await replacing)["loaded_adapters"] == {"a": "1", "b": "0"}
        of_a, of_b = [answer["meta_info"] for answer in await asyncio.gather(*asking)]
        assert of_b["num_retractions"] == 0, "its keys and values stay"
        assert [span["version"] for span in of_b["weight_versions"]] == ["0"]
        assert of_a["num_retractions"] == 1
        assert [span["version"] for span in of_a["weight_versions"]] == ["0", "1"]
        tokens = [token for _, token, _ in of_a["output_token_logprobs"]]
        logprobs = np.array([logprob for logprob, _, _ in of_a["output_token_logprobs"]])
        for span, folder in zip(of_a["weight_versions"], (adapters[0], adapters[2]), strict=True):
            expected = of_peft(model, folder, [*range(1, 9), *tokens])[-40:]
            part = slice(span["start"], span["end"])
            assert np.abs(logprobs[part] - expected[part]).max() < 2e-5

        whole = {"model_path": str(model), "weight_version": "9"}
        refused = await post("/update_weights_from_disk", **whole)
        assert "adapters are loaded by name" in refused["message"]
        assert (await post("/unload_lora_adapter", lora_name="a"))["loaded_adapters"] == {"b": "0"}
        assert "no adapter 'a' is loaded" in (await generate("a"))["error"]["message"]
        unknown = await post("/unload_lora_adapter", lora_name="a")
        assert unknown["message"] == "No adapter 'a' is loaded."
        await post("/unload_lora_adapter", lora_name="b")
        assert (await post("/update_weights_from_disk", **whole))["success"]
        assert "not those of an adapter's base" in (await load("a", adapters[0], "1"))["message"]


@pytest.mark.parametrize("is_staged_in_memory", [False, True])
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"config": {"peft_type": "IA3"}}, "is no LoRA adapter that peft wrote"),
        ({"config": {"use_dora": True}}, "has use_dora=True"),
        ({"config": {"lora_alpha": float("inf")}}, "scaling' is not finite"),
        (
            {"config": {"alpha_pattern": {"q_proj": float("nan")}}},
            "scaling' is not finite",
        ),
        ({"rename": "model.layers.0.self_attn.r_proj"}, "no linear layer is named"),
        ({"rename": "model.layers.0.mlp.down_proj"}, "has shapes"),
        ({"number": float("inf")}, "is not finite"),
        ({"number": float("nan")}, "'model.layers.0.self_attn.q_proj.lora_A.weight' is not finite"),
        ({"drop": ".lora_B."}, "lacks B of"),
        ({"drop": ".lora_A."}, "has other tensors than A and B"),
    ],
)
def test_adapter_of_another_kind_or_model_is_refused(
    fault: dict[str, Any],
    says: str,
    is_staged_in_memory: bool,
    model: Path,
    adapters: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staged_versions, "TMPFS", tmp_path)
    folder = tmp_path / ("arealite-0-1-x/v1" if is_staged_in_memory else "v1")
    folder.mkdir(parents=True)
    config = json.loads((adapters[0] / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | fault.get("config", {})))
    tensors = load_file(adapters[0] / "adapter_model.safetensors")
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    if "rename" in fault:
        tensors = {
            name.replace(layer, f"base_model.model.{fault['rename']}"): tensor
            for name, tensor in tensors.items()
        }
    if "number" in fault:
        name = f"{layer}.lora_A.weight"
        tensors[name][0, 0] = fault["number"]
    if "drop" in fault:
        tensors.pop(f"{layer}{fault['drop']}weight")
    save_file(tensors, folder / "adapter_model.safetensors")
    served, _ = load_model(str(model), dtype="float32", device="cpu")
    mapped = list[Path]()
    monkeypatch.setattr(
        served_adapters, "map_floats", lambda file: mapped.append(file) or map_floats(file)
    )
    with pytest.raises(RequestRefused, match=says):
        read_low_rank(served, folder)
    if "finite" in says:
        assert bool(mapped) == is_staged_in_memory


def test_scaling_follows_the_patterns_of_peft() -> None:
    config = {"lora_alpha": 16, "alpha_pattern": {r"layers\.1\..*q_proj": 4}}
    assert scaling_of(config, "model.layers.0.self_attn.q_proj", 8) == 2.0
    assert scaling_of(config, "model.layers.1.self_attn.q_proj", 8) == 0.5
    assert scaling_of(config | {"use_rslora": True}, "model.layers.0.mlp.up_proj", 16) == 4.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model", init_std=0.1)


async def test_run_publishes_its_adapter_alone_and_the_canary_proves_it(folder: Path) -> None:
    async with AdapterRun(folder, num_servers=2).running() as run:
        for version in range(3):
            report = await run.publish(version)
            await run.until_proven(version, 2)
            assert run.staged() == {"adapter_config.json", "adapter_model.safetensors"}
            assert report.num_bytes < 20_000 and not report.quarantined
            run.train(0.3, seed=version)
        whole = dict(run.engine.stream_weights())
        await run.publish(3)
        for server in run.servers:
            served = server.engine.decoder
            merged = dict(served.adapters.merged(iter(served.model.state_dict().items())))
            for name, tensor in whole.items():
                assert torch.allclose(merged[name].float(), tensor.float(), atol=1e-6), name


async def test_server_that_takes_no_adapters_gets_whole_weights(folder: Path) -> None:
    """Afterwards the other servers must load their base weights again."""
    async with AdapterRun(folder, num_servers=1).running() as run:
        run.train(0.3)
        await run.publish(0)
        assert not run.publisher.needs_republish
        (server,) = run.publisher._servers.values()
        server.serves_adapters = False
        assert run.publisher.needs_republish and not run.publisher.takes_adapter
        await run.publish(0)
        run.train(0.3, seed=1)
        await run.publish(1)
        assert "model.safetensors" in run.staged()
        await run.until_proven(1, 1)
        assert not run.publisher.needs_republish
        served = run.servers[0].engine.decoder.adapters
        assert not served.names, "whole weights contain the adapter"
        server.serves_adapters = True
        run.train(0.3, seed=2)
        await run.publish(2)
        await run.until_proven(2, 1)
        assert served.names == {""}


async def test_adapter_of_another_model_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", init_std=0.1, seed=5)
    async with (
        running(server_config(other, tmp_path / "names2")) as server,
        ClientSession(server.address) as session,
    ):
        adapter = adapter_folder(folder, tmp_path / "exported", 0)
        body = {"model_path": str(adapter), "weight_version": "1"}
        async with session.post("/update_weights_from_disk", json=body) as response:
            assert response.status == 400
            assert f"but the server serves {other}" in (await response.json())["message"]
