"""The canary: after each update of a server, its log-probabilities of a fixed row are compared.

When a version is staged, the trainer scores the row by a small forward pass, in the layout and
dtype of training. A server whose scores differ has other weights than it reports.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from arealite.api.engine import Named, Sequence, TrainEngine
from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.publisher import Generate
from arealite.base import log
from arealite.base.errors import InvariantError, RoleError
from arealite.base.model_folder import (
    experts_of,
    read_json,
    vocab_size,
)
from arealite.ext.self_check.check import served_dtype
from arealite.ext.self_check.difference_reasons import ROUNDING
from arealite.ext.self_check.probe_rows import random_rows, room_of
from arealite.ext.served_policy.proof_file import (
    ProofFile,
    SentVersion,
    ServerProof,
    VersionScores,
)
from arealite.ext.served_policy.scores import (
    Evidence,
    NotComparable,
    Tolerance,
    read_scores,
)
from arealite.ext.served_policy.sent_weights import SentWeights
from arealite.impl.trainer.rank_group import World
from arealite.system.health.waits import Wait
from arealite.system.names.name_registry import NameRegistry

logger = log.get(__name__)

OPTION = "trainer.ppo.publisher.canary"
ROW_TOKENS = 64
"""Tokens of the row; fewer if a server's context is shorter."""
LARGEST = 1e9
"""Stands for an infinite difference in the file; JSON has no infinity."""
KEPT = 2
"""Earlier versions whose scores are kept in memory, besides the first one."""


def canary_of(config: ExperimentConfig, engine: TrainEngine, world: World) -> "Canary | None":
    """Return the canary of a run; None if it is off. Hook `policy_proof`."""
    if not config.trainer.ppo.publisher.canary:
        logger.warning(f"served weights are not proven: {OPTION}=false")
        return None
    return Canary(config, engine, world)


def row_of(folder: Path, context: int | None) -> list[int]:
    """Return the row: equal in all processes that serve or train the model of a folder."""
    model = read_json(folder)
    length = min(ROW_TOKENS, room_of(model, context) - 1)
    (row,) = random_rows(model, [length], seed=vocab_size(model) or 0)
    return row


def sequence_of(row: list[int]) -> Sequence:
    """Return the row for an engine: all tokens but the first one are scored."""
    return Sequence(
        tokens=np.array(row, np.int32),
        loss_mask=np.arange(len(row)) > 0,
        temperature=1.0,
    )


def tolerance_of(config: ExperimentConfig, folder: Path, reported_dtype: str | None) -> Tolerance:
    """Return the differences between the trainer of a run and a server that are no fault."""
    trained = config.trainer.selected_options.engine.fsdp.dtype
    served = served_dtype(config, reported_dtype)
    coarser = max(trained, served, key=ROUNDING.__getitem__)
    is_mixture = experts_of(read_json(folder)) is not None
    return Tolerance(coarser, is_mixture=is_mixture)


class Canary:
    """Compares servers with the trainer; implements `PolicyProof`. Only rank 0 keeps scores."""

    def __init__(
        self,
        config: ExperimentConfig,
        engine: TrainEngine,
        world: World,
    ) -> None:
        self.config = config
        self.engine = engine
        self.world = world
        self.folder = Path(config.model.path).expanduser()
        self.file = ProofFile(run_paths(config).root)
        self.names = NameRegistry.of(config)
        self._row: list[int] = []
        self._staged: int | None = None
        """The newest version that was scored here."""
        self._expected = dict[int, np.ndarray]()
        """The trainer's scores by version [T]: of the first version, and of the newest ones."""
        self._fingerprint = ""
        """The fingerprint of the weights that were sent last."""
        self._tolerances = dict[str, Tolerance]()
        """The tolerance of each server; a restarted server keeps its own."""
        self._own_scores = dict[str, tuple[int, np.ndarray]]()
        """The proven scores of each server [T], and the version since which it has them."""
        self._warnings = set[tuple[str, str]]()
        """Server and obstacle of each warning, which is given once."""

    # ------------------------------------------------------------ the trainer's scores

    def expect(self, version: int) -> None:
        """Score the row with the present parameters; see PolicyProof."""
        if version == self._staged:
            return  # sent again
        begin = time.perf_counter()
        if self.world.is_rank0 and not self._row:
            self._begin()
        rows = [sequence_of(self._row)] if self._row else []
        outputs = self.engine.forward(rows)
        for scores_T in outputs["logprobs"]:
            seconds = time.perf_counter() - begin
            self._note(version, scores_T[1:].astype(np.float64), seconds)
        self._staged = version

    def _begin(self) -> None:
        """Choose the row, which every server must have room for; read scores before a restart."""
        room = ROW_TOKENS + 1
        for entry in self.names.list("llm_server"):
            context = entry.value.get("context_length") or room
            room = min(room, context)
        self._row = row_of(self.folder, room)
        self._expected = self.file.scores()

    def _note(
        self,
        version: int,
        scores_T: np.ndarray,
        seconds: float,
    ) -> None:
        """Keep the scores of a version, of the first one and of the newest ones."""
        expected = {version: scores_T}
        earlier = [number for number in self._expected if number < version]
        for number in (*earlier[:1], *earlier[-KEPT:]):
            earlier_T = self._expected[number]
            if earlier_T.shape == scores_T.shape:
                expected[number] = earlier_T
        self._expected = dict(sorted(expected.items()))
        line = VersionScores(
            version=version,
            scores=scores_T.tolist(),
            seconds=round(seconds, 6),
        )
        self.file.append(line)

    def fingerprinted(self, weights: Iterator[Named]) -> Iterator[Named]:
        """Yield the weights, and note their fingerprint; see PolicyProof."""
        sent = SentWeights()
        for name, tensor in weights:
            sent.add(name, tensor)
            yield name, tensor
        self._fingerprint = sent.fingerprint

    def record(self, version: int) -> str:
        """Return the fingerprint and the expected scores; see PolicyProof."""
        expected_T = self._expected.get(version, np.zeros(0))
        sent = SentVersion(fingerprint=self._fingerprint, scores=expected_T.tolist())
        return msgspec.json.encode(sent).decode()

    # ------------------------------------------------------------ a server's scores

    async def fault(
        self,
        server_id: str,
        version: int,
        generate: Generate,
    ) -> str:
        """Compare a server's scores; see PolicyProof."""
        begin = time.perf_counter()
        proof = ServerProof(version=version, server=server_id)
        try:
            await self._compare(proof, generate)
        except (NotComparable, RoleError, OSError) as error:
            proof.obstacle = str(error)
            if (server_id, proof.obstacle) not in self._warnings:
                self._warnings.add((server_id, proof.obstacle))
                logger.warning("served weights not proven", **msgspec.to_builtins(proof))
        except (InvariantError, ValueError) as error:
            proof.fault = f"its scores cannot be read: {error}"
        proof.seconds = round(time.perf_counter() - begin, 6)
        self.file.append(proof)
        return proof.fault

    async def _compare(self, proof: ServerProof, generate: Generate) -> None:
        """Compare the scores of a server, and note the result in `proof`."""
        version = proof.version
        answers = Wait(
            event=f"the scores of version {version}",
            owner="publisher",
            on=f"llm_server-{proof.server}",
            seconds=self.config.trainer.ppo.publisher.timeout_s,
        )
        with answers:
            scores = await read_scores(generate, self._row, version)
        expected_T = self._expected.get(version)
        if expected_T is None:
            raise NotComparable("newer versions have replaced it")
        previous_version, previous_T = self._own_scores.get(proof.server, (-1, np.zeros(0)))
        evidence = Evidence(
            version=version,
            scores=scores,
            expected=self._expected,
            tolerance=self._tolerance(proof.server),
            previous_version=previous_version,
            previous_T=previous_T,
            drops_caches=self.config.trainer.ppo.publisher.pause_mode != "in_place",
        )
        proof.mean, proof.largest = np.minimum(evidence.errors, LARGEST).tolist()
        proof.fault = evidence.fault()
        proof.is_proven = not proof.fault
        if proof.is_proven:
            evidence.tolerance.learn(evidence.errors, expected_T)
            is_forgotten = previous_version not in self._expected
            if is_forgotten or not evidence.is_unchanged():
                self._own_scores[proof.server] = (version, scores.prompt_T)

    def _tolerance(self, server_id: str) -> Tolerance:
        """Return the differences that are no fault of a server."""
        if server_id not in self._tolerances:
            entries = {entry.id: entry.value for entry in self.names.list("llm_server")}
            dtype = entries.get(server_id, {}).get("dtype")
            self._tolerances[server_id] = tolerance_of(self.config, self.folder, dtype)
        return self._tolerances[server_id]
