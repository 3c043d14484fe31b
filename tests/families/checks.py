"""What a family must pass: each check compares a part of the system with plain transformers.

The reference is `AutoModelForCausalLM.from_pretrained` in float32 with eager attention, one row at
a time without padding. A check ends as one of

* exact: equal to rounding,
* refused: a UserError of one line,
* silent: another result, without an error,
* crashed: any other error.
"""

from __future__ import annotations

import asyncio
import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from safetensors import safe_open
from structlog.testing import capture_logs
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from arealite.api.engine import LossInput, Sequence, Training
from arealite.api.engine_config import FSDPConfig, LoRAConfig, OptimizerConfig
from arealite.api.publisher import DiskPublisherConfig
from arealite.base.errors import UserError
from arealite.base.model_folder import weight_files
from arealite.impl.engine.fsdp import FSDPEngine
from arealite.impl.publisher.disk import DiskPublisher
from tests.fakes.embedded import running, server_config
from tests.families.configs import CONFIGS
from tests.families.folders import build, write
from tests.impl.engine.helpers import LOSS, make_rows
from tests.impl.publisher.sites import publishing

ROUNDING = 2.0**-24
"""Relative rounding error of float32."""
MARGIN = 8.0
"""Roundings of a forward pass, in units of one rounding of every weight."""
FLOOR = 1e-5
"""Nats below which logprobs of float32 are equal."""
ATTENTION = {"falcon, alibi": "sdpa"}
"""Attention of the reference where it is not eager: Falcon's eager code adds alibi twice."""
LR, DECAY, CLIP = 5.0, 0.01, 1.0
UPDATE = OptimizerConfig(warmup_steps=0, weight_decay=DECAY, eps=1.0, clip_grad_norm=CLIP)
"""With this eps, an update is nearly linear in the gradient, so that small errors show."""
UPDATE_ERROR = 2e-3
"""Largest difference of an update from the plain one, relative to its largest entry."""


@dataclass
class Row:
    """The outcome of one check."""

    family: str
    folder: str
    check: str
    outcome: str = "exact"
    difference: float = 0.0
    bound: float = 0.0
    why: str = ""


class Difference(Exception):
    """A result differs from the reference."""


class Case:
    """One model folder, its reference, and the rows that both score."""

    def __init__(self, name: str, folder: Path, *, original: bool) -> None:
        self.name, self.folder, self.original = name, folder, original
        self.path = write(self.model, folder / "model", original=original)
        self.rows = make_rows(8, seed=1)
        self.attention = ATTENTION.get(name, "eager")
        self.difference = self.bound = 0.0

    @cached_property
    def model(self) -> Any:
        """The model from which the folder is written."""
        return build(self.name, CONFIGS[self.name])

    @cached_property
    def reference(self) -> Any:
        """The folder in plain transformers."""
        return load(self.path, self.attention)

    @cached_property
    def expected(self) -> list[np.ndarray]:
        return score(self.reference, self.rows)

    @cached_property
    def rounding(self) -> float:
        """The bound: how far roundings of the weights move the logprobs."""
        moved, generator = copy.deepcopy(self.reference), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in moved.parameters():
                noise = torch.randn(param.shape, generator=generator)
                param.mul_(1.0 + ROUNDING * noise)
        return FLOOR + MARGIN * farthest(score(moved, self.rows), self.expected)

    def compare(self, difference: float, bound: float, what: str) -> None:
        """Record a difference; raise Difference if it exceeds the bound."""
        if not difference <= bound:
            self.difference, self.bound = difference, bound
            raise Difference(f"{what} differs by {difference:.2g} (bound {bound:.1g})")
        if self.bound == 0.0 or difference / bound > self.difference / self.bound:
            self.difference, self.bound = difference, bound

    def engine(self, **config: Any) -> FSDPEngine:
        training = Training(optimizer=UPDATE, lr=LR, total_updates=10)
        return FSDPEngine(
            FSDPConfig(**config), model_path=str(self.path), seed=0, training=training
        )

    def check_forward(self, engine: FSDPEngine, expected: list[np.ndarray], what: str) -> None:
        got = engine.forward(self.rows)["logprobs"]
        masked = [values[row.loss_mask] for values, row in zip(got, self.rows, strict=True)]
        self.compare(farthest(masked, expected), self.rounding, what)


def load(path: Path, attention: str = "eager") -> Any:
    """Load a folder in plain transformers.

    Raises:
        Difference: the folder lacks tensors, or has others.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
    )
    if wrong := {key: names for key, names in info.items() if names}:
        raise Difference(f"transformers does not find the tensors of the folder: {wrong}"[:300])
    return model.eval()


def logprobs_of(model: Any, row: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logprobs, entropies) of a row's loss tokens by definition."""
    tokens = torch.from_numpy(row.tokens.astype(np.int64))
    logits = model(input_ids=tokens[None], use_cache=False).logits[0].float() / row.temperature
    logp_TV = torch.log_softmax(logits, -1)[:-1]
    where = torch.from_numpy(row.loss_mask[1:])
    chosen = logp_TV.gather(1, tokens[1:, None])[:, 0][where]
    return chosen, -(logp_TV.exp() * logp_TV).sum(-1)[where]


def score(model: Any, rows: list[Sequence]) -> list[np.ndarray]:
    """Return the logprobs of the loss tokens of each row."""
    with torch.no_grad():
        return [logprobs_of(model, row)[0].numpy() for row in rows]


def farthest(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Return the largest difference; NaN where a value is NaN."""
    pairs = zip(ours, theirs, strict=True)
    return float(np.max([np.abs(a - b).max() for a, b in pairs if len(a)]))


def names_of(path: Path) -> dict[str, tuple[list[int], str]]:
    """Return shape and dtype of each tensor in a folder."""
    found: dict[str, tuple[list[int], str]] = {}
    for file in weight_files(path):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                found[name] = (part.get_shape(), part.get_dtype())
    return found


# ------------------------------------------------------------ the checks


def check_padded(case: Case) -> None:
    """Logprobs of rows of different lengths in one padded batch."""
    case.check_forward(case.engine(layout="padded"), case.expected, "padded rows")


def check_packed(case: Case) -> None:
    """Logprobs of rows packed end to end."""
    case.check_forward(case.engine(layout="packed"), case.expected, "packed rows")


def check_sharded(case: Case) -> None:
    """Logprobs of a model that FSDP2 shards, with recomputed activations."""
    engine = case.engine(cpu_offload=True, gradient_checkpointing=True)
    case.check_forward(engine, case.expected, "a sharded model")


def check_update(case: Case) -> None:
    """One update of AdamW equals the update of plain torch; export and reload."""
    updated(case, case.engine())


def check_sharded_update(case: Case) -> None:
    """The same on a model that FSDP2 shards, with recomputed activations, in micro-batches."""
    config = {"cpu_offload": True, "gradient_checkpointing": True}
    updated(case, case.engine(max_tokens_per_microbatch=100, **config))


def updated(case: Case, engine: FSDPEngine) -> FSDPEngine:
    plain = copy.deepcopy(case.reference)
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    engine.train_batch(case.rows, LOSS)
    update(plain, case.rows)
    ours = {name: engine.full(t.detach()) for name, t in engine.module.state_dict().items()}
    for name, after in plain.state_dict().items():
        if not after.is_floating_point():
            continue
        step = after - before[name]
        wrong = float((ours[name] - after).abs().max())
        bound = UPDATE_ERROR * float(step.abs().max()) + 1e-6
        case.compare(wrong, bound, f"the update of {name}")
    return engine


def update(model: Any, rows: list[Sequence]) -> None:
    """Apply one update of AdamW in plain torch."""
    params = [param for param in model.parameters() if param.requires_grad]
    matrices, others = ([p for p in params if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, LR, (UPDATE.beta1, UPDATE.beta2), UPDATE.eps, weight_decay=0.0
    )
    total = torch.zeros(())
    for row in rows:
        logprobs, entropy = logprobs_of(model, row)
        mask = row.loss_mask
        fields = {key: torch.from_numpy(value[mask]) for key, value in row.fields.items()}
        zeros = torch.zeros(int(mask.sum()), dtype=torch.int64)
        outputs = {"logprobs": logprobs, "entropy": entropy}
        total = total + LOSS(LossInput(outputs=outputs, rows_N=zeros, fields=fields))[0]
    total.backward()
    clip_grad_norm_(params, CLIP)
    optimizer.step()


def check_export(case: Case) -> None:
    """An export after an update has the names of the folder, and loads in transformers."""
    engine, out = case.engine(), case.folder / "export"
    engine.train_batch(case.rows, LOSS)
    engine.export(out)
    check_names(case.path, out)
    again = load(out, case.attention)
    ours = engine.module.state_dict()
    for name, tensor in again.state_dict().items():
        if not torch.equal(tensor, ours[name]):
            raise Difference(f"{name} changes between the engine and its export")
    case.check_forward(engine, score(again, case.rows), "the export")


def check_names(given: Path, made: Path) -> None:
    """Raise Difference unless two folders hold tensors of equal names, shapes and dtypes."""
    old, new = names_of(given), names_of(made)
    for left, what in ((old.keys() - new.keys(), "lacks"), (new.keys() - old.keys(), "adds")):
        if left:
            names = ", ".join(sorted(left)[:2])
            raise Difference(f"the export {what} {names} ({len(left)} in all)")
    if other := next((name for name in old if old[name] != new[name]), ""):
        raise Difference(f"{other} is {old[other]} in the folder, {new[other]} in the export")


def check_served(case: Case) -> None:
    """The embedded server generates with the logprobs of the folder, then of a new version."""
    engine = case.engine()
    engine.train_batch(case.rows, LOSS)
    out = case.folder / "published"
    asyncio.run(serve(case, engine, out))


def check_shared(case: Case) -> None:
    """A server on the trainer's own module generates with the logprobs of the folder."""
    asyncio.run(serve(case, case.engine(), None))


async def serve(case: Case, engine: FSDPEngine, out: Path | None) -> None:
    """Serve a folder; with `out`, publish the weights of `engine` to the server, too."""
    from arealite.ext.embedded.embedded_server import EmbeddedServer

    config = server_config(case.path, case.folder / "names", max_running_requests=4)
    settings = {"timeout_s": 5.0, "disk": DiskPublisherConfig(dir=str(case.folder / "staged"))}
    if out is None:
        assert engine.whole_module is not None
        server = EmbeddedServer(config, shared=engine.whole_module)
        task = asyncio.ensure_future(server.serve())
        ready = asyncio.ensure_future(server.ready.wait())
        await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        try:
            if task.done():
                task.result()
            await asyncio.wrap_future(server.resume("1"))
            await compare_answers(case, server.address, case.reference, "the shared model")
        finally:
            task.cancel()
            await asyncio.wait((task,))
        return
    async with running(config) as server:
        await compare_answers(case, server.address, case.reference, "the server")
        publisher = DiskPublisher(publishing(case.folder, case.path, **settings), engine)
        try:
            await asyncio.to_thread(publisher.stage, 1, engine.stream_weights())
            await asyncio.to_thread(publisher.push, 1)
            engine.export(out)
            updated = load(out, case.attention)
            moved = farthest(score(updated, case.rows), case.expected)
            assert moved > 100 * case.rounding, "the update is too small to be seen"
            await compare_answers(case, server.address, updated, "the server after a publish")
        finally:
            await asyncio.to_thread(publisher.close)


async def compare_answers(case: Case, address: str, reference: Any, what: str) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 64, n).tolist() for n in (1, 3, 7, 12, 20, 33)]

    async def answer(session: aiohttp.ClientSession, prompt: list[int]) -> Sequence:
        sampling = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.8}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        async with session.post(f"{address}/generate", json=body) as response:
            said = await response.json()
            if response.status != 200:
                raise RuntimeError(f"/generate answers {response.status}: {said}")
        logprobs = [each[0] for each in said["meta_info"]["output_token_logprobs"]]
        tokens = np.array(prompt + said["output_ids"], np.int32)
        mask = np.arange(len(tokens)) >= len(prompt)
        fields = {"logprobs": np.array(logprobs, np.float32)}
        return Sequence(tokens=tokens, loss_mask=mask, temperature=0.8, fields=fields)

    async with aiohttp.ClientSession() as session:
        rows = await asyncio.gather(*(answer(session, prompt) for prompt in prompts))
    got = [row.fields["logprobs"] for row in rows]
    case.compare(farthest(got, score(reference, list(rows))), case.rounding, what)


def check_lora(case: Case) -> None:
    """Adapters on the default targets; a warning names the linear layers without adapter."""
    with capture_logs() as events:
        engine = adapt(case, LoRAConfig(rank=4))
    parts = engine.module.named_modules()
    adapted = {
        id(part) for _, layer in parts if hasattr(layer, "lora_A") for part in layer.modules()
    }
    head, warned = engine.module.get_output_embeddings(), str(events)
    for name, part in engine.module.named_modules():
        is_linear = isinstance(part, torch.nn.Linear | Conv1D) and part is not head
        if is_linear and id(part) not in adapted and name.rpartition(".")[2] not in warned:
            raise Difference(f"{name} has no adapter, and no warning names it")


def check_lora_all(case: Case) -> None:
    """Adapters on all linear layers."""
    adapt(case, LoRAConfig(rank=4, targets=["all-linear"]))


def check_lora_attention(case: Case) -> None:
    """Adapters on the attention's projections."""
    attention, names = ["q_proj", "k_proj", "v_proj", "o_proj"], "\n".join(names_of(case.path))
    present = [name for name in attention if f".{name}." in names]
    adapt(case, LoRAConfig(rank=4, targets=present or attention))


def adapt(case: Case, config: LoRAConfig) -> FSDPEngine:
    """Begin as the base model; then the merged export equals plain + B·A of peft."""
    import peft

    engine = case.engine(lora=config)
    case.check_forward(engine, case.expected, "a model with fresh adapters")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, param in engine.module.named_parameters():
            if "lora_B" in name:
                param.copy_(0.3 * torch.randn(param.shape, generator=generator))
    out = case.folder / "adapted"
    engine.export(out)
    check_names(case.path, out)
    adapted = peft.PeftModel.from_pretrained(copy.deepcopy(case.reference), out / "adapter")
    theirs = score(adapted, case.rows)
    if farthest(theirs, case.expected) < 0.01:
        raise Difference("the adapters change nothing")
    case.check_forward(engine, theirs, "a model with adapters")
    merged = score(load(out, case.attention), case.rows)
    case.compare(farthest(merged, theirs), 4 * case.rounding, "the merged export")
    return engine


CHECKS: dict[str, Callable[[Case], None]] = {
    "padded": check_padded,
    "packed": check_packed,
    "sharded": check_sharded,
    "update": check_update,
    "sharded update": check_sharded_update,
    "export": check_export,
    "served": check_served,
    "shared": check_shared,
    "lora": check_lora,
    "lora, attention": check_lora_attention,
    "lora, all": check_lora_all,
}


# ------------------------------------------------------------ running them


def prove(name: str, checks: list[str] | None = None) -> list[dict[str, Any]]:
    """Run checks of a family on its folder as on the hub, and on a fused one if it differs."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as root, quiet():
        hub = Case(name, Path(root, "hub"), original=True)
        cases = {"hub": hub}
        fused = Case(name, Path(root, "fused"), original=False)
        if names_of(fused.path).keys() != names_of(hub.path).keys():
            cases["fused"] = fused
        for kind, case in cases.items():
            for check in checks or CHECKS:
                rows.append(run(case, kind, check))
    return [asdict(row) for row in rows]


def run(case: Case, kind: str, check: str) -> Row:
    """Run one check."""
    case.difference = case.bound = 0.0
    row = Row(case.name, kind, check)
    try:
        CHECKS[check](case)
    except UserError as error:
        row.outcome, row.why = "refused", str(error).replace(str(case.path), "PATH")
    except Difference as error:
        row.outcome, row.why = "silent", str(error)
    except Exception as error:  # noqa: BLE001
        row.outcome = "crashed"
        row.why = f"{type(error).__name__}: {error}".replace(str(case.path), "PATH")[:300]
    row.difference, row.bound = case.difference, case.bound
    return row


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings of the libraries under comparison."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
