"""Runs with a faulty worker, which garbles some of its results, complete.

Ranks compare every token that they train with the output of its generation."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from arealite.api.payloads import Payload
from arealite.api.rollout_messages import Episode
from arealite.system.links.worker_link import WorkerLink
from tests.simulation.simulation import Simulation, active, simulate

SHARE = 0.03
CALM: dict[str, Any] = {"faults_per_s": 0.0, "loss": 0.0, "duplicates": 0.0, "max_attempts": 9}


def flipped(payload: Payload, at: int) -> Payload:
    """Flip a bit of the prompt or of the turns."""
    content = bytearray(payload.prompt + payload.turns)
    content[at] ^= 1
    changed = bytes(content)
    end = len(payload.prompt)
    return Payload(prompt=changed[:end], turns=changed[end:])


class Garbler:
    """Wraps a worker's link and garbles some results."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.random, self.garbled, self.rejected = random.Random(7), 0, 0
        submit, final = WorkerLink.submit, Simulation.note

        def garbling(link: WorkerLink, episode: Episode, payloads: list[Payload]) -> None:
            if episode.headers and self.random.random() < SHARE:
                episode, payloads = self.garble(episode, payloads)
                self.garbled += 1
                # Acknowledged, and not to be found in the ledger.
                active().checks.late_results.add((episode.lease_id, episode.member))
            submit(link, episode, payloads)

        def noting(sim: Simulation, what: str, text: str = "") -> None:
            if what == "over" and sim.pipe is not None:
                self.rejected = sim.pipe.machine.requests.rejections.total()
            final(sim, what, text)

        patch.setattr(WorkerLink, "submit", garbling)
        patch.setattr(Simulation, "note", noting)

    def garble(self, episode: Episode, payloads: list[Payload]) -> tuple[Episode, list[Payload]]:
        (header, *rest), (payload, *others) = episode.headers, payloads
        wrong = {
            "reward": header.reward + 1e6,
            "trained_tokens": header.trained_tokens + 1,
            "newest_version": header.newest_version + 50,
            "oldest_version": header.oldest_version + 1,
            "group_id": "g0x",
            "trajectory_id": "g0/0/x",
        }
        kind = self.random.choice(["flip", "flip", "cut", "empty", *wrong])
        if kind in wrong:
            header = msgspec.structs.replace(header, **{kind: wrong[kind]})
        elif kind == "flip":
            payload = flipped(payload, self.random.randrange(payload.size))
        else:
            turns = payload.turns[:-5] if kind == "cut" else b""
            payload = Payload(prompt=payload.prompt, turns=turns)
        episode = msgspec.structs.replace(episode, headers=[header, *rest])
        return episode, [payload, *others]


def test_each_garbled_result_is_counted_and_none_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    garbler, garbled = Garbler(monkeypatch), 0
    for seed in range(30):
        garbler.garbled = garbler.rejected = 0
        outcome = simulate(seed, **CALM)
        assert outcome.violation is None, seed
        assert garbler.rejected == garbler.garbled, seed
        garbled += garbler.garbled
    assert garbled > 20


def test_garbled_results_with_crashes_violate_no_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    garbler = Garbler(monkeypatch)
    broken = {seed: found for seed in range(20) if (found := simulate(seed).violation)}
    assert not broken
    assert garbler.garbled > 10
