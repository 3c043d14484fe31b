"""Compares the trainer with each server and with plain transformers, before the first episode.

Each server generates about 200 tokens from random prompts. The trainer computes the
log-probabilities of the same tokens in the layout of training. Plain transformers computes them row
by row, in float32, with its reference attention. In 16 bits, the bounds are multiples of the noise:
how far plain transformers in that dtype is from float32 on the same tokens.
"""

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from http.client import HTTPException
from math import prod
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import msgspec
import numpy as np

from arealite.api.config import ExperimentConfig
from arealite.api.engine import Sequence, TrainEngine
from arealite.base import log
from arealite.base.errors import UserError
from arealite.base.model_folder import (
    exact_length,
    experts_of,
    read_json,
    read_shapes,
    text_part,
    vocab_size,
)
from arealite.impl.client import wire
from arealite.impl.launcher.processes import server_overrides
from arealite.impl.self_check.plain import PlainModel, first_difference, obstacle, watched
from arealite.impl.self_check.reasons import (
    ROUNDING,
    Bound,
    Comparison,
    bound_of,
    likely_reason,
    tail,
    tensor_reason,
)
from arealite.impl.trainer.world import World
from arealite.impl.weights.sums import Sums, sums
from arealite.system.health.waits import Wait
from arealite.system.names.registry import Entry, NameRegistry

logger = log.get(__name__)

OPTION = "trainer.ppo.publisher.self_check"
NAME = "answers to the self-check"
PLAIN = "plain transformers"
SKIPPED = "not compared"
LENGTHS = 1, 2, 3, 7, 12, 20, 33, 48
"""Tokens of each prompt. A model with a sliding window gets a further, longer prompt."""
NEW = 24
"""Tokens that a server generates for each prompt; at most half of its context."""
LONGEST = 8192
"""Tokens of the longest row. Longer sliding windows are not tested."""


def self_check(config: ExperimentConfig, engine: TrainEngine, world: World, version: int) -> None:
    """Compare the trainer's logprobs with those of each server and of plain transformers.

    All ranks call this function. It changes neither parameters nor metrics.

    Raises:
        UserError: On every rank: a difference is above its bound. The message has the likely
            reason.
    """
    if not config.trainer.ppo.publisher.self_check:
        logger.warning(f"self-check is off: {OPTION}=false")
        return
    begin = time.perf_counter()
    check = SelfCheck(config, engine, world, version)
    if faults := check.faults():
        raise UserError(faults[0])
    seconds = round(time.perf_counter() - begin, 2)
    is_whole = not check.skipped - {PLAIN}
    event = "self-check passed" if is_whole else "self-check incomplete"
    (logger.info if is_whole else logger.warning)(event, seconds=seconds, **check.found)


class SelfCheck:
    """The comparisons of one version of the weights. All ranks call the same methods."""

    def __init__(
        self, config: ExperimentConfig, engine: TrainEngine, world: World, version: int
    ) -> None:
        self.config = config
        self.engine = engine
        self.world = world
        self.version = version
        self.folder = Path(self.config.model.path).expanduser()
        trainer = self.config.trainer
        self.dtype = trainer.own.engine.fsdp.dtype
        self.model = read_json(self.folder)
        self.temperature = trainer.ppo.collector.sampling.temperature or 1.0
        self.names = NameRegistry.of(self.config)
        self.module: Any = getattr(self.engine, "module", None)
        """The trainer's model; None if the engine has no attribute `module`."""
        self.plain: PlainModel | None = None
        """The reference on rank 0; None on other ranks, or if a second copy does not fit."""
        self.is_initial = version == 0 and not config.model.adapter
        """Whether the trainer's weights are those of the model folder."""
        self.found: dict[str, str] = {}
        """The result of each comparison, for the log."""

    @property
    def skipped(self) -> set[str]:
        """The programs that were not compared."""
        return {other for other, text in self.found.items() if text.startswith(SKIPPED)}

    def faults(self) -> list[str]:
        """Return the error of each comparison that is above its bound."""
        return [self.refusal(each) for each in self.compare() if not each.is_equal]

    def compare(self) -> list[Comparison]:
        """Return the comparison with plain transformers, if it fits, and with each server."""
        made = self.ask()
        if not (made or self.found):
            self.found["servers"] = f"{SKIPPED}: none has version {self.version}"
        numel = sum(map(prod, read_shapes(self.folder).values()))
        if why := self.world.broadcast(obstacle(numel)):
            self.found[PLAIN] = f"{SKIPPED}: {why}"
        else:
            self.plain = PlainModel(self.folder) if self.world.is_rank0 else None
            weights = iter(()) if self.is_initial else self.engine.stream_weights()
            self.plain.update(weights) if self.plain else deque(weights, maxlen=0)
            prompts, new = self.prompts()
            rows = made[0].rows if made else [self.row(p, p[:1] * new) for p in prompts]
            ours = made[0].ours if made else self.score(rows)
            theirs = [self.plain.exact(row) for row in rows] if self.plain else []
            unmeasured = self.bound(self.dtype, None)
            made.insert(0, Comparison(PLAIN, rows, ours, theirs, unmeasured))
        made = self.world.broadcast(self.with_measured_bounds(made) if self.plain else made)
        self.found |= {each.other: each.text for each in made}
        return made

    def with_measured_bounds(self, made: list[Comparison]) -> list[Comparison]:
        """Return comparisons whose bounds in 16 bits come from the noise on their own tokens."""
        noise_of_rows = dict[tuple[int, str], list[np.ndarray]]()
        measured = list[Comparison]()
        for each in made:
            key = id(each.rows), each.bound.dtype
            if self.plain and each.bound.dtype != "float32":
                if key not in noise_of_rows:
                    noise_of_rows[key] = self.plain.noise(each.rows, each.bound.dtype)
                noise = [tail(*pair) for pair in zip(noise_of_rows[key], each.theirs, strict=True)]
                each = replace(each, bound=self.bound(each.bound.dtype, noise))
            measured.append(each)
        return measured

    def bound(self, dtype: str, noise: list[np.ndarray] | None) -> Bound:
        """Return the bound of a comparison in this run; see `bound_of`."""
        is_mixture = experts_of(self.model) is not None
        return bound_of(dtype, noise, temperature=self.temperature, is_mixture=is_mixture)

    def score(self, rows: list[Sequence]) -> list[np.ndarray]:
        """Return the trainer's logprobs of each row on rank 0, float32 [T]."""
        return self.engine.forward(rows if self.world.is_rank0 else [])["logprobs"]

    # ------------------------------------------------------------ servers

    def prompts(self, context: int | None = None) -> tuple[list[list[int]], int]:
        """Return random prompts, and how many tokens to generate for each.

        Both together fit into `context` and the model's own context.
        """
        rng = np.random.default_rng(0)
        text = text_part(self.model)
        size = vocab_size(self.model)
        own = exact_length(self.model) or text.get("max_position_embeddings")
        room = min(context or LONGEST, own or LONGEST)
        window = text.get("sliding_window") or 0
        new = max(1, min(NEW, room // 2))
        long = [window + LENGTHS[-1]] if 0 < window <= LONGEST else []
        low = (size or 1024) // 8
        high = (size or 1024) * 3 // 4  # special tokens are at the ends
        fit = [length for length in (*LENGTHS, *long) if length <= max(1, room - new)]
        return [rng.integers(low, high, length).tolist() for length in fit], new

    def row(self, prompt: list[int], output: list[int]) -> Sequence:
        """Return a row of prompt and output whose loss mask selects its last tokens."""
        tokens = np.array([*prompt, *output], np.int32)
        first = max(1, len(tokens) - LENGTHS[-1] - NEW)
        return Sequence(tokens, np.arange(len(tokens)) >= first, self.temperature)

    def ask(self) -> list[Comparison]:
        """Return the comparison with each server that holds the version; skip the others."""
        found: list[Comparison | None] = []
        if self.world.is_rank0:
            with Wait(NAME, owner="trainer-0", on="llm_server"), ThreadPoolExecutor(32) as pool:
                found = [*pool.map(self._ask, self.names.list("llm_server"))]
        found, self.found = self.world.broadcast((found, self.found))
        return [replace(each, ours=self.score(each.rows)) for each in found if each]

    def _request(self, server: dict[str, Any], path: str, body: object = None) -> bytes:
        """Return a server's answer to POST, or to GET if there is no body."""
        data = None if body is None else msgspec.json.encode(body)
        headers = self.names.headers(server.get("type") or "")
        headers["Content-Type"] = "application/json"
        request = Request(server["address"] + path, data, headers)
        limit = self.config.trainer.ppo.publisher.timeout_s
        with build_opener(ProxyHandler({})).open(request, timeout=limit) as answer:
            return answer.read()

    def _ask(self, entry: Entry) -> Comparison | None:
        """Return a server's tokens and logprobs; None if it holds another version, or fails."""
        server = entry.value
        name = f"server {entry.value['address']}"
        prompts, new = self.prompts(server.get("context_length"))

        def generate(prompt: list[int]) -> wire.Answer:
            sampling = {"temperature": self.temperature, "max_new_tokens": new, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
            return wire.decode_answer(self._request(server, "/generate", body))

        try:
            info = msgspec.json.decode(self._request(server, "/model_info"))
            if info.get("weight_version") != str(self.version):
                return None  # the publisher gives it no traffic
            info |= msgspec.json.decode(self._request(server, "/server_info"))
            with ThreadPoolExecutor(len(prompts)) as pool:
                answers = [*pool.map(generate, prompts)]
        except (OSError, HTTPException, ValueError) as error:
            self.found[name] = f"{SKIPPED}: {error!r}"
            return None
        rows = [self.row(p, answer.output_ids) for p, answer in zip(prompts, answers, strict=True)]
        facts = {name: info.get(name) for name in ("dtype", "quantization")} | {"entry": server}
        theirs = [np.array(wire.token_logprobs(answer)) for answer in answers]
        coarsest = max(self.dtype, self.dtype_of(facts), key=ROUNDING.__getitem__)
        return Comparison(name, rows, [], theirs, self.bound(coarsest, None), facts)

    def dtype_of(self, info: dict[str, Any]) -> str:
        """Return the dtype in which a server should compute.

        It is the option model.dtype for a server that this run starts. For another server it is the
        dtype that the server reports, or bfloat16 if the report has none.
        """
        dtype = info.get("dtype")
        if self.config.launcher.llm_servers:
            words = dict(word.split("=", 1) for word in server_overrides(self.config))
            dtype = words["model.dtype"].strip('"')
        return dtype if dtype in ROUNDING else "bfloat16"

    # ------------------------------------------------------------ the reason

    def refusal(self, wrong: Comparison) -> str:
        """Return on all ranks the error for a comparison, with its likely reason."""
        reason = self.reason(wrong)
        row = wrong.rows[int(np.argmax([errors.mean() for errors in wrong.errors]))]
        with watched(self.module) as ours:
            self.score([row])
        where = ""
        if not wrong.info and self.plain:
            with watched(self.plain.model) as theirs:
                self.plain.score(row)
            if place := first_difference(ours, theirs, self.dtype):
                where = f" The first module that differs: {place}."
        what = f"The trainer and {wrong.other} give the same tokens different log-probabilities"
        text = f"{what} ({wrong.text}).{where} Likely reason: {reason}. (Off: {OPTION}=false)"
        return self.world.broadcast(text)

    def reason(self, wrong: Comparison) -> str:
        """Collect facts about a difference on all ranks; return the likely reason on rank 0."""
        rows = wrong.rows
        run = self.temperature
        is_plain = not wrong.info
        alone = [scored for row in rows for scored in self.score([row])]
        degrees = {1.0, run**2, 1 / run} - {run}
        warmer = {t: self.score([replace(row, temperature=t) for row in rows]) for t in degrees}
        tensors = sums(self.engine.stream_weights(), self.module), Sums()
        if not self.world.is_rank0:
            return ""
        server = wrong.info.get("entry", {})
        if server.get("type") == "embedded":
            with suppress(OSError, HTTPException):
                found = self._request(server, "/weight_sums", {})
                tensors = tensors[0], msgspec.json.decode(found, type=Sums)
        elif is_plain and self.plain and self.is_initial:
            tensors = sums(self.plain.stored(), self.plain.model), tensors[0]
        alike = self.bound(self.dtype, None) if self.dtype == "float32" else wrong.bound
        low = wrong  # in 16 bits, no reason depends on it
        if wrong.bound.dtype == "float32":
            (low,) = self.with_measured_bounds([replace(wrong, bound=self.bound("bfloat16", None))])
        buffers = set[str](dict(self.module.named_buffers()) if self.module is not None else ())
        dtype = self.dtype if is_plain else self.dtype_of(wrong.info)
        return likely_reason(
            wrong,
            alone=replace(wrong, theirs=alone, bound=alike),
            by_temperature={t: replace(wrong, ours=warmer[t]) for t in degrees},
            low=low,
            dtype=dtype,
            tensors=tensor_reason(*tensors, dtype, buffers),
            window=text_part(self.model).get("sliding_window"),
        )
