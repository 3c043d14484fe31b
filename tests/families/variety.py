"""A reward that random models get: the share of different characters of an answer."""

from __future__ import annotations

from arealite.api.reward import Reward, rewards


@rewards.register("characters")
class Characters(Reward):
    async def score(self, completion: str, ground_truth: object) -> float:
        return len(set(completion)) / max(1, len(completion))
