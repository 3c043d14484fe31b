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
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import msgspec
import numpy as np

from arealite.api.engine import Sequence, TrainEngine
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.llm import SamplingConfig
from arealite.api.server_protocol import (
    GenerateRequest,
    Json,
    ServerAnswer,
    ServerDescription,
    ServerProtocol,
    adapter_of,
    part_of_entry,
    version_text,
)
from arealite.base import log
from arealite.base.errors import UserError
from arealite.base.model_folder import experts_of, read_json, read_shapes, text_part
from arealite.ext.self_check.difference_reasons import (
    ROUNDING,
    Bound,
    Comparison,
    bound_of,
    likely_reason,
    tail,
    tensor_reason,
)
from arealite.ext.self_check.plain_copy import PlainModel, first_difference, obstacle, watched
from arealite.ext.self_check.probe_rows import LONGEST, random_rows, room_of
from arealite.ext.weights.checksums import Sums, sums
from arealite.impl.launcher.processes import server_overrides
from arealite.impl.trainer.rank_group import World
from arealite.system.health.waits import Wait
from arealite.system.names.name_registry import Entry, NameRegistry

logger = log.get(__name__)

OPTION = "trainer.ppo.publisher.self_check"
NAME = "answers to the self-check"
PLAIN = "plain transformers"
SKIPPED = "not compared"
LENGTHS = (1, 2, 3, 7, 12, 20, 33, 48)
"""Tokens of each prompt. A model with a sliding window gets a further, longer prompt."""
NEW = 24
"""Tokens that a server generates for each prompt; at most half of its context."""


def self_check(
    config: ExperimentConfig,
    engine: TrainEngine,
    world: World,
    version: int,
) -> None:
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
    faults = check.faults()
    if faults:
        raise UserError(faults[0])
    seconds = round(time.perf_counter() - begin, 2)
    if check.skipped - {PLAIN}:
        logger.warning("self-check incomplete", seconds=seconds, **check.outcomes)
    else:
        logger.info("self-check passed", seconds=seconds, **check.outcomes)


def served_dtype(config: ExperimentConfig, reported: str | None) -> str:
    """Return the dtype in which a server should compute.

    It is the option model.dtype for a server that this run starts. For another server it is the
    dtype that the server reports, or bfloat16 if the report has none.
    """
    dtype = reported
    if config.launcher.llm_servers:
        words = server_overrides(config)
        overrides = dict(word.split("=", 1) for word in words)
        dtype = overrides["model.dtype"].strip('"')
    return dtype if dtype in ROUNDING else "bfloat16"


class SelfCheck:
    """The comparisons of one version of the weights. All ranks call the same methods."""

    def __init__(
        self,
        config: ExperimentConfig,
        engine: TrainEngine,
        world: World,
        version: int,
    ) -> None:
        self.config = config
        self.engine = engine
        self.world = world
        self.version = version
        self.folder = Path(config.model.path).expanduser()
        self.dtype = config.trainer.selected_options.engine.fsdp.dtype
        self.model = read_json(self.folder)
        self.temperature = config.trainer.ppo.collector.sampling.temperature or 1.0
        self.names = NameRegistry.of(config)
        self.module: Any = getattr(engine, "module", None)
        """The trainer's model; None if the engine has no attribute `module`."""
        self.plain: PlainModel | None = None
        """The reference on rank 0; None on other ranks, or if a second copy does not fit."""
        self.is_initial = version == 0 and not config.model.adapter
        """Whether the trainer's weights are those of the model folder."""
        self.outcomes: dict[str, str] = {}
        """The result of each comparison, for the log."""

    @property
    def skipped(self) -> set[str]:
        """The programs that were not compared."""
        return {other for other, outcome in self.outcomes.items() if outcome.startswith(SKIPPED)}

    def faults(self) -> list[str]:
        """Return the error of each comparison that is above its bound."""
        wrong = [comparison for comparison in self.compare() if not comparison.is_equal]
        return [self.refusal(comparison) for comparison in wrong]

    def compare(self) -> list[Comparison]:
        """Return the comparison with plain transformers, if it fits, and with each server."""
        comparisons = self.ask()
        if not (comparisons or self.outcomes):
            self.outcomes["servers"] = f"{SKIPPED}: none has version {self.version}"
        shapes = read_shapes(self.folder)
        numel = sum(map(prod, shapes.values()))
        reason = self.world.broadcast(obstacle(numel))
        if reason:
            self.outcomes[PLAIN] = f"{SKIPPED}: {reason}"
        else:
            self._load_plain()
            comparisons.insert(0, self._compare_plain(comparisons))
        if self.plain:
            comparisons = self.with_measured_bounds(comparisons)
        comparisons = self.world.broadcast(comparisons)
        self.outcomes |= {comparison.other: comparison.text for comparison in comparisons}
        return comparisons

    def _load_plain(self) -> None:
        """Load plain transformers on rank 0, with the trainer's weights."""
        self.plain = PlainModel(self.folder) if self.world.is_rank0 else None
        weights = iter(()) if self.is_initial else self.engine.stream_weights()
        if self.plain:
            self.plain.update(weights)
        else:
            deque(weights, maxlen=0)  # other ranks only take part in gathering

    def _compare_plain(self, comparisons: list[Comparison]) -> Comparison:
        """Return the comparison with plain transformers, on the rows of the first server if any."""
        if comparisons:
            rows = comparisons[0].rows
            ours = comparisons[0].ours
        else:
            prompts, num_new = self.prompts()
            rows = [self.row(prompt, prompt[:1] * num_new) for prompt in prompts]
            ours = self.score(rows)
        theirs = list[np.ndarray]()
        if self.plain:
            theirs = [self.plain.exact(row) for row in rows]
        return Comparison(
            other=PLAIN,
            rows=rows,
            ours=ours,
            theirs=theirs,
            bound=self.bound(self.dtype, None),
        )

    def with_measured_bounds(self, comparisons: list[Comparison]) -> list[Comparison]:
        """Return comparisons whose bounds in 16 bits come from the noise on their own tokens."""
        noise_by_key = dict[tuple[int, str], list[np.ndarray]]()
        measured = list[Comparison]()
        for comparison in comparisons:
            dtype = comparison.bound.dtype
            if not self.plain or dtype == "float32":
                measured.append(comparison)
                continue
            key = (id(comparison.rows), dtype)
            if key not in noise_by_key:
                noise_by_key[key] = self.plain.noise(comparison.rows, dtype)
            pairs = zip(noise_by_key[key], comparison.theirs, strict=True)
            noise = [tail(noise_of_row, theirs) for noise_of_row, theirs in pairs]
            bound = self.bound(dtype, noise)
            measured.append(replace(comparison, bound=bound))
        return measured

    def bound(self, dtype: str, noise: list[np.ndarray] | None) -> Bound:
        """Return the bound of a comparison in this run; see `bound_of`."""
        return bound_of(
            dtype,
            noise,
            temperature=self.temperature,
            is_mixture=experts_of(self.model) is not None,
        )

    def score(self, rows: list[Sequence]) -> list[np.ndarray]:
        """Return the trainer's logprobs of each row on rank 0, float32 [T]."""
        local_rows = rows if self.world.is_rank0 else []
        return self.engine.forward(local_rows)["logprobs"]

    # ------------------------------------------------------------ servers

    def prompts(self, context: int | None = None) -> tuple[list[list[int]], int]:
        """Return random prompts, and how many tokens to generate for each.

        Both together fit into `context` and the model's own context.
        """
        room = room_of(self.model, context)
        num_new = max(1, min(NEW, room // 2))
        lengths = [*LENGTHS]
        window = text_part(self.model).get("sliding_window") or 0
        if 0 < window <= LONGEST:
            lengths.append(window + LENGTHS[-1])
        longest = max(1, room - num_new)
        fitting = [length for length in lengths if length <= longest]
        prompts = random_rows(self.model, fitting, seed=0)
        return prompts, num_new

    def row(self, prompt: list[int], output: list[int]) -> Sequence:
        """Return a row of prompt and output whose loss mask selects its last tokens."""
        tokens_T = np.array([*prompt, *output], np.int32)
        begin = max(1, len(tokens_T) - LENGTHS[-1] - NEW)
        mask_T = np.arange(len(tokens_T)) >= begin
        return Sequence(tokens=tokens_T, loss_mask=mask_T, temperature=self.temperature)

    def ask(self) -> list[Comparison]:
        """Return the comparison with each server that holds the version; skip the others."""
        answers: list[Comparison | None] = []
        if self.world.is_rank0:
            servers = self.names.list("llm_server")
            with (
                Wait(event=NAME, owner="trainer-0", on="llm_server"),
                ThreadPoolExecutor(32) as pool,
            ):
                answers = [*pool.map(self._ask, servers)]
        answers, self.outcomes = self.world.broadcast((answers, self.outcomes))
        return [replace(answer, ours=self.score(answer.rows)) for answer in answers if answer]

    def _request(
        self,
        server: dict[str, Any],
        path: str,
        data: bytes | None = None,
    ) -> bytes:
        """Return a server's answer to a POST of JSON, or to GET without it."""
        headers = self.names.headers(server.get("type") or "")
        headers["Content-Type"] = "application/json"
        request = Request(server["address"] + path, data, headers)
        timeout_s = self.config.trainer.ppo.publisher.timeout_s
        opener = build_opener(ProxyHandler({}))
        with opener.open(request, timeout=timeout_s) as answer:
            return answer.read()

    def _describe(
        self, server: dict[str, Any], protocol: ServerProtocol
    ) -> ServerDescription | None:
        """Return what a server says of itself; a route that it lacks says nothing."""
        answers: dict[str, Json] = {}
        for path in protocol.describe_paths:
            answers[path] = {}
            with suppress(HTTPError):
                answers[path] = msgspec.json.decode(self._request(server, path), type=Json)
        return protocol.describe(answers)

    def _ask(self, entry: Entry) -> Comparison | None:
        """Return a server's tokens and logprobs; None if it holds another version, or fails."""
        server = entry.value
        name = f"server {server['address']}"
        prompts, num_new = self.prompts(server.get("context_length"))
        protocol: ServerProtocol = part_of_entry("server_protocol", server)()
        sampling = SamplingConfig(temperature=self.temperature, max_new_tokens=num_new)

        def generate(index: int, adapter: str) -> ServerAnswer:
            request = GenerateRequest(
                rid=f"self-check-{self.version}-{index}~",
                input_ids=prompts[index],
                sampling=sampling,
                ignore_eos=True,
                adapter=adapter,
            )
            raw = self._request(server, protocol.generate_path, protocol.encode_request(request))
            return protocol.decode_answer(raw)

        try:
            version = protocol.read_version(self._request(server, protocol.version_path))
            if version_text(version) != str(self.version):
                return None  # the publisher gives it no traffic
            description = self._describe(server, protocol)
            with ThreadPoolExecutor(len(prompts)) as pool:
                adapters = [adapter_of(version)] * len(prompts)
                answers = [*pool.map(generate, range(len(prompts)), adapters)]
        except (OSError, HTTPException, ValueError) as error:
            self.outcomes[name] = f"{SKIPPED}: {error!r}"
            return None
        facts = {
            "dtype": description and description.dtype,
            "quantization": description and description.quantization,
            "entry": server,
        }
        dtype = served_dtype(self.config, facts.get("dtype"))
        coarsest = max(self.dtype, dtype, key=ROUNDING.__getitem__)
        rows = list[Sequence]()
        theirs = list[np.ndarray]()
        for prompt, answer in zip(prompts, answers, strict=True):
            rows.append(self.row(prompt, answer.output_ids))
            theirs.append(np.array(answer.logprobs))
        return Comparison(
            other=name,
            rows=rows,
            ours=[],
            theirs=theirs,
            bound=self.bound(coarsest, None),
            info=facts,
        )

    # ------------------------------------------------------------ the reason

    def refusal(self, wrong: Comparison) -> str:
        """Return on all ranks the error for a comparison, with its likely reason."""
        reason = self.reason(wrong)
        row_means = [errors.mean() for errors in wrong.errors]
        row = wrong.rows[int(np.argmax(row_means))]
        with watched(self.module) as ours:
            self.score([row])
        module_note = ""
        if not wrong.info and self.plain:
            with watched(self.plain.model) as theirs:
                self.plain.score(row)
            module_name = first_difference(ours, theirs, self.dtype)
            if module_name:
                module_note = f" The first module that differs: {module_name}."
        error = (
            f"The trainer and {wrong.other} give the same tokens different log-probabilities "
            f"({wrong.text}).{module_note} Likely reason: {reason}. (Off: {OPTION}=false)"
        )
        return self.world.broadcast(error)

    def reason(self, wrong: Comparison) -> str:
        """Collect facts about a difference on all ranks; return the likely reason on rank 0."""
        rows = wrong.rows
        is_plain = not wrong.info
        scored_alone = [scores_T for row in rows for scores_T in self.score([row])]
        by_temperature = self._at_other_temperatures(wrong)
        trainer_sums = sums(self.engine.stream_weights(), self.module)
        if not self.world.is_rank0:
            return ""
        right_sums, wrong_sums = self._compared_sums(wrong, trainer_sums)
        dtype = self.dtype if is_plain else served_dtype(self.config, wrong.info.get("dtype"))
        buffers = set[str]()
        if self.module is not None:
            buffers = {name for name, _ in self.module.named_buffers()}
        alone_bound = wrong.bound
        if self.dtype == "float32":
            alone_bound = self.bound(self.dtype, None)
        low = wrong  # in 16 bits, no reason depends on it
        if wrong.bound.dtype == "float32":
            unmeasured = replace(wrong, bound=self.bound("bfloat16", None))
            (low,) = self.with_measured_bounds([unmeasured])
        return likely_reason(
            wrong,
            alone=replace(wrong, theirs=scored_alone, bound=alone_bound),
            by_temperature=by_temperature,
            low=low,
            dtype=dtype,
            tensors=tensor_reason(right_sums, wrong_sums, dtype, buffers),
            window=text_part(self.model).get("sliding_window"),
        )

    def _at_other_temperatures(self, wrong: Comparison) -> dict[float, Comparison]:
        """Return a comparison with the trainer at each temperature that a mistake can cause.

        These are 1, and the square and the inverse of the run's temperature.
        """
        run = self.temperature
        by_temperature = dict[float, Comparison]()
        for temperature in {1.0, run**2, 1 / run} - {run}:
            rows = [replace(row, temperature=temperature) for row in wrong.rows]
            by_temperature[temperature] = replace(wrong, ours=self.score(rows))
        return by_temperature

    def _compared_sums(self, wrong: Comparison, trainer_sums: Sums) -> tuple[Sums, Sums]:
        """Return the checksums of tensors that are right, and of those compared with them.

        A server's are compared with the trainer's. The trainer's are compared with those of the
        model folder.
        """
        server = wrong.info.get("entry", {})
        if server.get("type") == "embedded":
            with suppress(OSError, HTTPException):
                reply = self._request(server, "/weight_sums", b"{}")
                return trainer_sums, msgspec.json.decode(reply, type=Sums)
        elif not wrong.info and self.plain and self.is_initial:
            return sums(self.plain.stored(), self.plain.model), trainer_sums
        return trainer_sums, Sums()
