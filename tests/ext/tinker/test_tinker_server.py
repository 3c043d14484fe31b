"""The HTTP routes on a session that computes nothing: order, isolation, limits, refusals."""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arealite.ext.session.training_session import Session
from arealite.ext.tinker import bodies, messages
from arealite.ext.tinker.config import TinkerConfig
from arealite.ext.tinker.service import Service, Tenant
from arealite.ext.tinker.tinker_server import TinkerServer
from tests.ext.tinker.fake_session import FakeSession
from tests.ext.tinker.test_datums import message

MODEL = "org/model"
ANN = "tml-" + "a" * 20
BOB = "tml-" + "b" * 20
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}


@dataclass
class Client:
    """Sends requests as one tenant."""

    http: aiohttp.ClientSession
    address: str
    key: str = ANN

    async def send(
        self, method: str, route: str, *, status: int = 200, **options: Any
    ) -> dict[str, Any]:
        """Send a request; return the JSON of the answer."""
        headers = {"X-API-Key": self.key, **options.pop("headers", {})}
        async with self.http.request(
            method, f"{self.address}/api/v1/{route}", headers=headers, **options
        ) as response:
            answer = await response.json() if "json" in response.content_type else {}
            assert response.status == status, answer
            return answer

    async def post(self, route: str, *, status: int = 200, **fields: Any) -> dict[str, Any]:
        return await self.send("POST", route, status=status, json=fields)

    async def result(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Wait for a result in JSON."""
        return await self.post("retrieve_future", request_id=answer["request_id"])

    async def message(self, name: str, answer: dict[str, Any]) -> Any:
        """Wait for a result in protobuf."""
        headers = {"X-API-Key": self.key}
        async with self.http.post(
            f"{self.address}/api/v1/retrieve_future", json=answer, headers=headers
        ) as response:
            body = await response.read()
            assert response.content_type == "application/x-protobuf", body
            return messages.parse(name, body)

    async def new_session(self) -> str:
        return (await self.post("create_session"))["session_id"]

    async def new_model(self, session_id: str, number: int = 0, **options: Any) -> str:
        answer = await self.post(
            "create_model",
            session_id=session_id,
            model_seq_id=number,
            base_model=MODEL,
            lora_config={"rank": 8, **options},
        )
        return (await self.result(answer))["model_id"]

    async def forward_backward(
        self, model_id: str, seq_id: int, *, loss: str = "cross_entropy", **fields: Any
    ) -> dict[str, Any]:
        request = messages.make(
            "ForwardBackwardRequest", model_id=model_id, seq_id=seq_id, loss_fn=loss, **fields
        )
        request.data.append(message([1, 2], [2, 3], weights=[0, 1]))
        return await self.send("POST", "forward_backward", data=messages.serialized(request))


@dataclass
class Running:
    """A service with two tenants."""

    session: FakeSession
    service: Service
    ann: Client
    bob: Client


@asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[Running]:
    config = TinkerConfig(port=0, **options)
    session = FakeSession()
    tenants = {key: Tenant(key[-3:], folder / key[-3:], config) for key in (ANN, BOB)}
    service = Service(cast(Session, session), config, base_model=MODEL, tenants=tenants)
    async with TinkerServer(service, config).serving() as address, aiohttp.ClientSession() as http:
        ann = Client(http, address)
        yield Running(session, service, ann, Client(http, address, BOB))


async def test_model_is_trained_saved_and_sampled(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        ann = run.ann
        session_id = await ann.new_session()
        model = await ann.new_model(session_id, train_mlp=False)

        trained = await ann.message("ForwardBackwardOutput", await ann.forward_backward(model, 1))
        stepped = await ann.post("optim_step", model_id=model, seq_id=2, adam_params={})
        evaluated = await ann.forward_backward(model, 3, forward_only=True)
        saved = await ann.post("save_weights", model_id=model, seq_id=4, path="one")
        sampler = await ann.post(
            "save_weights_for_sampler", model_id=model, seq_id=5, sampling_session_seq_id=0
        )
        assert (await ann.result(stepped))["metrics"] == {"grad_norm": 1.0}
        path = (await ann.result(saved))["path"]
        assert path == f"tinker://{model}/weights/one"
        sampler_id = (await ann.result(sampler))["sampling_session_id"]
        asked = await ann.post(
            "asample",
            sampling_session_id=sampler_id,
            seq_id=0,
            num_samples=2,
            prompt=PROMPT,
            sampling_params={"stop": [7]},
            prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=1,
            target_prompt_logprobs={
                "data": [7, 9],
                "dtype": "int64",
                "shape": [2, 3],
                "sparse_crow_indices": [0, 0, 2],
                "sparse_col_indices": [0, 2],
            },
        )
        samples = await ann.message("SampleResponse", {"request_id": asked["request_id"]})
        again = await ann.post(
            "load_weights", session_id=session_id, model_seq_id=1, path=path, optimizer=True
        )
        assert (await ann.result(again))["model_id"] == f"{session_id}:train:1"
        await ann.post(f"sessions/{session_id}/finish")

    assert trained.metrics["loss:sum"] == 3.0
    assert evaluated["model_id"] == model
    assert len(samples.sequences) == len(set(asked["sample_sequence_ids"])) == 2
    assert samples.sequences[0].topk_sampled_logprobs.k == 1
    assert len(samples.prompt_logprobs) == 12
    assert samples.topk_prompt_logprobs.length == 3
    targets = samples.target_prompt_logprobs
    assert messages.array_of(targets) == pytest.approx(np.array([[0, 0, 0], [-0.7, 0, -0.9]]))
    snapshot = f"aaa.{model.replace(':', '-')}.snapshots.000005"
    calls = [re.sub(r"\.\d+\.\d+$", "", call) for call in run.session.calls]  # times
    assert calls == [
        "add model0 rank=8 targets=['q_proj', 'k_proj', 'v_proj', 'o_proj']",
        "forward_backward model0",
        "optim_step model0 lr=0.0001",
        "evaluate model0",
        "export model0",
        "save model0",
        "export model0",
        f"serve {snapshot}",
        f"sample {snapshot}",
        f"score {snapshot}",
        "add model1 rank=8 targets=['q_proj', 'k_proj', 'v_proj', 'o_proj']",
        "load model1",
        "remove model0",
        "remove model1",
    ]


async def test_request_without_a_key_or_with_a_wrong_one_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        for key in ("", ANN[:-1], "tml-é"):
            run.ann.key = key
            for route in ("create_session", "asample", "retrieve_future", "no_such_route"):
                await run.ann.post(route, status=401)
        await run.ann.send("GET", "healthz")


async def test_tenant_finds_nothing_of_another_one(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        ann, bob = run.ann, run.bob
        session_id = await ann.new_session()
        model = await ann.new_model(session_id)
        saved = await ann.post("save_weights", model_id=model, seq_id=1, path="one")
        path = (await ann.result(saved))["path"]
        sampler = await ann.post(
            "create_sampling_session",
            session_id=session_id,
            sampling_session_seq_id=0,
            model_path=path,
        )
        sampler_id = sampler["sampling_session_id"]
        calls = len(run.session.calls)

        request = messages.make("ForwardBackwardRequest", model_id=model, seq_id=2, loss_fn="ppo")
        body = messages.serialized(request)
        await bob.send("POST", "forward_backward", status=404, data=body)
        await bob.post("session_heartbeat", status=404, session_id=session_id)
        await bob.post(f"sessions/{session_id}/finish", status=404)
        await bob.post("get_info", status=404, model_id=model)
        await bob.post("unload_model", status=404, model_id=model)
        await bob.post("optim_step", status=404, model_id=model, seq_id=2)
        await bob.post("save_weights", status=404, model_id=model, seq_id=2)
        await bob.post("weights_info", status=422, tinker_path=path)
        await bob.send("GET", f"samplers/{sampler_id}", status=404)
        await bob.post("join_sampling_session", status=404, sampling_session_id=sampler_id)
        await bob.post(
            "asample",
            status=404,
            sampling_session_id=sampler_id,
            seq_id=0,
            prompt=PROMPT,
            sampling_params={},
        )
        await bob.post("retrieve_future", status=410, request_id=saved["request_id"])
        await bob.send("DELETE", f"training_runs/{model}/checkpoints/weights/one", status=422)
        assert (await bob.send("GET", "checkpoints"))["checkpoints"] == []
        own_session = await bob.new_session()
        await bob.post(
            "create_sampling_session",
            status=422,
            session_id=own_session,
            sampling_session_seq_id=0,
            model_path=path,
        )
        await bob.post(
            "load_weights",
            status=422,
            session_id=own_session,
            model_seq_id=0,
            path=path,
            optimizer=False,
        )

        assert len(run.session.calls) == calls
        assert [
            item["tinker_path"] for item in (await ann.send("GET", "checkpoints"))["checkpoints"]
        ] == [path]
        await ann.send("DELETE", f"training_runs/{model}/checkpoints/weights/one")
        assert (await ann.send("GET", "checkpoints"))["checkpoints"] == []


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"base_model": "other"}, "base_model='other': this service has 'org/model'"),
        ({"lora_config": {"rank": 0}}, "rank=0: use 1 to 128"),
        (
            {"lora_config": {"rank": 8, "train_mlp": False, "train_attn": False}},
            "train_attn or train_mlp must be true",
        ),
    ],
)
async def test_model_that_cannot_be_made_fails_with_the_reason(
    fields: dict[str, Any], error: str, tmp_path: Path
) -> None:
    async with running(tmp_path) as run:
        session_id = await run.ann.new_session()
        answer = await run.ann.post(
            "create_model",
            **{"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, **fields},
        )
        result = await run.ann.result(answer)

        assert error in result["error"]
        assert result["category"] == "user"
        await run.ann.new_model(session_id, number=1)


async def test_models_of_a_tenant_are_limited_and_room_is_made_again(tmp_path: Path) -> None:
    async with running(tmp_path, max_models=1) as run:
        session_id = await run.ann.new_session()
        first = await run.ann.new_model(session_id)
        refused = await run.ann.post(
            "create_model", session_id=session_id, model_seq_id=1, base_model=MODEL
        )
        assert "you train 1 models, the limit" in (await run.ann.result(refused))["error"]
        await run.bob.new_model(await run.bob.new_session())

        await run.ann.result(await run.ann.post("unload_model", model_id=first))
        await run.ann.new_model(session_id, number=2)


async def test_snapshots_beyond_the_limit_are_removed_and_their_clients_say_so(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, max_samplers=2) as run:
        ann = run.ann
        session_id = await ann.new_session()
        model = await ann.new_model(session_id)
        samplers = list[str]()
        for number in range(3):
            answer = await ann.post(
                "save_weights_for_sampler",
                model_id=model,
                seq_id=number + 1,
                sampling_session_seq_id=number,
            )
            samplers.append((await ann.result(answer))["sampling_session_id"])

        async def sample(sampler_id: str, seq_id: int = 0) -> dict[str, Any]:
            return await ann.post(
                "asample",
                sampling_session_id=sampler_id,
                seq_id=seq_id,
                prompt=PROMPT,
                sampling_params={},
            )

        assert "were removed" in (await ann.result(await sample(samplers[0])))["error"]
        for sampler_id in samplers[1:]:
            answer = await sample(sampler_id)
            await ann.message("SampleResponse", {"request_id": answer["request_id"]})
        folder = tmp_path / "aaa" / model.replace(":", "-") / "snapshots"
        assert sorted(item.name for item in folder.iterdir()) == ["000002", "000003"]
        await ann.post(f"sessions/{session_id}/finish")
        assert not any(folder.iterdir())


async def test_session_without_heartbeat_ends_and_its_models_are_saved(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        session_id = await run.ann.new_session()
        model = await run.ann.new_model(session_id)
        living = await run.bob.new_session()
        tenant = run.service.tenant_of(ANN)

        await run.service.end_silent_sessions(tenant.sessions[session_id].last_heartbeat)
        await run.ann.post("session_heartbeat", session_id=session_id)
        now = time.monotonic()
        await run.bob.post("session_heartbeat", session_id=living)
        await run.service.end_silent_sessions(now)

        await run.ann.post("session_heartbeat", status=410, session_id=session_id)
        await run.bob.post("session_heartbeat", session_id=living)
        path = f"tinker://{model}/weights/when-ended"
        assert tenant.checkpoints.read(path).spec.rank == 8
        await run.ann.post("get_info", status=404, model_id=model)


async def test_repeated_batch_may_have_its_fields_in_another_order(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        model = await run.ann.new_model(await run.ann.new_session())
        head = messages.make(
            "ForwardBackwardRequest", model_id=model, seq_id=1, loss_fn="cross_entropy"
        )
        data = messages.make("ForwardBackwardRequest")
        data.data.append(message([1, 2], [2, 3], weights=[0, 1]))
        parts = [messages.serialized(head), messages.serialized(data)]

        for body in (b"".join(parts), b"".join(reversed(parts))):
            answer = await run.ann.send("POST", "forward_backward", data=body)
            await run.ann.message("ForwardBackwardOutput", {"request_id": answer["request_id"]})

        assert run.session.calls[1:] == ["forward_backward model0"]


async def test_half_a_gradient_is_never_applied(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        ann = run.ann
        model = await ann.new_model(await ann.new_session())
        good = await ann.forward_backward(model, 1)
        bad = await ann.forward_backward(model, 2, loss="ppo")
        step = await ann.post("optim_step", model_id=model, seq_id=3, adam_params={})
        again = await ann.forward_backward(model, 4)
        last = await ann.post("optim_step", model_id=model, seq_id=5, adam_params={})

        await ann.message("ForwardBackwardOutput", {"request_id": good["request_id"]})
        assert "lack logprobs, advantages" in (await ann.result(bad))["error"]
        assert "its gradient was dropped" in (await ann.result(step))["error"]
        await ann.message("ForwardBackwardOutput", {"request_id": again["request_id"]})
        assert (await ann.result(last))["metrics"] == {"grad_norm": 1.0}
        assert run.session.calls[1:] == [
            "forward_backward model0",
            "drop_gradient model0",
            "forward_backward model0",
            "optim_step model0 lr=0.0001",
        ]


async def test_session_ends_once_and_takes_no_model_with_it_that_is_made_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as run:
        session_id = await run.ann.new_session()
        is_adding = asyncio.Event()
        may_go_on = asyncio.Event()
        add = run.session.add_adapter

        async def add_slowly(name: str, **options: Any) -> None:
            is_adding.set()
            await may_go_on.wait()
            await add(name, **options)

        monkeypatch.setattr(run.session, "add_adapter", add_slowly)
        answer = await run.ann.post(
            "create_model", session_id=session_id, model_seq_id=0, base_model=MODEL
        )
        await is_adding.wait()
        for _ in range(2):
            await run.ann.post(f"sessions/{session_id}/finish")
        may_go_on.set()

        assert "the session of this model has ended" in (await run.ann.result(answer))["error"]
        assert run.service.tenant_of(ANN).models == {}
        assert run.session.calls[-1] == "remove model0"
        await run.ann.new_model(await run.ann.new_session())


async def test_weights_of_a_name_that_is_written_again_are_loaded_again(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        ann = run.ann
        session_id = await ann.new_session()
        model = await ann.new_model(session_id)
        for number in range(2):
            saved = await ann.post(
                "save_weights", model_id=model, seq_id=number + 1, path="one", overwrite=True
            )
            path = (await ann.result(saved))["path"]
            sampler = await ann.post(
                "create_sampling_session",
                session_id=session_id,
                sampling_session_seq_id=number,
                model_path=path,
            )
            asked = await ann.post(
                "asample",
                sampling_session_id=sampler["sampling_session_id"],
                seq_id=0,
                prompt=PROMPT,
                sampling_params={},
            )
            await ann.message("SampleResponse", {"request_id": asked["request_id"]})

        served = [call for call in run.session.calls if call.startswith("serve")]
        assert len({*served}) == 2


async def test_bodies_are_bounded_and_wrong_ones_get_one_line(tmp_path: Path) -> None:
    async with running(tmp_path, max_body_mb=1) as run:
        ann = run.ann
        await ann.send("POST", "create_session", status=413, data=b"x" * 2**17)
        await ann.send("POST", "forward_backward", status=413, data=BytesIO(bytes(2**20 + 1)))
        wrong = await ann.send("POST", "create_session", status=422, data=b"{")
        assert wrong["detail"].startswith("the body: ")
        wrong = await ann.post("create_model", status=422, session_id=3)
        assert "Expected `str`, got `int`" in wrong["detail"]
        wrong = await ann.send("POST", "forward_backward", status=422, data=b"\xff\xff")
        assert "the body is no ForwardBackwardRequest" in wrong["detail"]
        compressed = {"Content-Encoding": "zstd"}
        await ann.send("POST", "forward_backward", status=415, data=b"x", headers=compressed)
        missing = await ann.send("GET", "audit", status=404)
        assert missing["detail"] == "this service has no GET /api/v1/audit."
        await ann.send("POST", "create_session", status=403, headers={"Origin": "http://x"})


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"num_samples": 0}, "num_samples=0: use 1 to 1024"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k: this service does not have it"),
        (
            {"target_prompt_logprobs": {"data": [1], "shape": [1]}},
            "target_prompt_logprobs: shape [1]; send [tokens - 1, K]",
        ),
        ({"target_prompt_logprobs": {"data": [1], "shape": [2, 3]}}, "a tensor of shape [2, 3]"),
        (
            {"target_prompt_logprobs": {"data": [], "shape": [2**30, 0]}},
            "target_prompt_logprobs: shape [1073741824, 0]; send [tokens - 1, K]",
        ),
        ({"record_stability_info": True}, "record_stability_info: this service"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, "text tokens only, no 'image'"),
        ({"prompt": {"chunks": []}}, "use at least one token"),
        ({"prompt": {"chunks": [{"tokens": [100]}]}}, r"ids must be in [0, 100)"),
        ({"prompt": {"chunks": [{"tokens": [1] * 64}]}}, "fills the model's context"),
        ({"sampling_params": {"stop": []}}, "always ends an answer at EOS"),
    ],
)
async def test_sample_that_the_service_does_not_have_is_refused(
    fields: dict[str, Any], error: str, tmp_path: Path
) -> None:
    async with running(tmp_path) as run:
        session_id = await run.ann.new_session()
        sampler = await run.ann.post(
            "create_sampling_session",
            session_id=session_id,
            sampling_session_seq_id=0,
            base_model=MODEL,
        )
        body = {
            "sampling_session_id": sampler["sampling_session_id"],
            "seq_id": 0,
            "prompt": PROMPT,
            "sampling_params": {},
            **fields,
        }
        if "num_samples" in fields:
            assert error in (await run.ann.post("asample", status=422, **body))["detail"]
        else:
            answer = await run.ann.post("asample", **body)
            assert error in (await run.ann.result(answer))["error"]
        assert run.session.calls == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
ROUTES = {
    "create_model": bodies.CreateModel,
    "get_info": bodies.ModelOnly,
    "optim_step": bodies.OptimStep,
    "save_weights": bodies.SaveWeights,
    "save_weights_for_sampler": bodies.SaveForSampler,
    "load_weights": bodies.LoadWeights,
    "create_sampling_session": bodies.CreateSamplingSession,
    "asample": bodies.SampleBody,
    "retrieve_future": bodies.RequestOnly,
    "cancel_future": bodies.RequestOnly,
    "weights_info": bodies.CheckpointOnly,
}


@given(data=st.data())
@settings(max_examples=15)
def test_any_body_is_answered_without_a_server_error(data: st.DataObject) -> None:
    """Each field has a value of another request, or any JSON."""

    async def fuzz(folder: Path) -> None:
        async with running(folder) as run:
            session_id = await run.ann.new_session()
            known = st.sampled_from(
                [session_id, f"{session_id}:train:0", MODEL, PROMPT, 1, "a/../b"]
            )
            for route, body in ROUTES.items():
                names = [field.name for field in msgspec.structs.fields(body)]
                keys = st.lists(st.sampled_from(names), unique=True)
                fields = {name: data.draw(known | JSON) for name in data.draw(keys)}
                headers = {"X-API-Key": ANN}
                url = f"{run.ann.address}/api/v1/{route}"
                async with run.ann.http.post(url, json=fields, headers=headers) as response:
                    assert response.status in (200, 404, 410, 422, 429), await response.text()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(fuzz(Path(folder)))
