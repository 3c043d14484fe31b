"""Injects the faults of a seed: their kinds, times and places."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from tests.simulation.loop import Process

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


class Adversary:
    """Injects faults for `fault_s`, then ends all lasting faults."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.scenario = sim.scenario
        self.rng = random.Random(f"adversary {sim.scenario.seed}")
        self.calm = False
        self._writes: int | None = None
        """Number of transactions until the datapipe is killed."""
        self._messages: dict[str, int] = {}
        """By role: number of messages until one of its processes is killed."""

    def begin(self) -> asyncio.Task[None]:
        """Start as a background task."""
        return asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        scenario, rng, sim = self.scenario, self.rng, self.sim
        names = list(scenario.weights)
        weights = [scenario.weights[name] for name in names]
        until = sim.loop.now + scenario.fault_s
        while scenario.faults_per_s and sum(weights):
            await asyncio.sleep(rng.expovariate(scenario.faults_per_s))
            if sim.loop.now > until:
                break
            (name,) = rng.choices(names, weights)
            sim.counts[name] += 1
            sim.note("fault", name)
            self.inject(name)
        await asyncio.sleep(max(0.0, until - sim.loop.now))
        self.calm = True
        self._writes = None
        self._messages.clear()
        faults = sim.network.faults
        faults.loss = faults.duplicates = 0.0
        faults.latency_s, faults.jitter = min(faults.latency_s, 0.03), min(faults.jitter, 1.0)
        sim.note("calm")

    def inject(self, name: str) -> None:
        """Inject one fault."""
        sim, rng = self.sim, self.rng
        verb, _, rest = name.partition(" ")
        if verb in ("kill", "freeze"):
            self._hit(verb, rest)
        elif name == "stop run":
            sim.launch.stop()
        elif name == "terminate worker":
            if process := self._some("rollout"):
                sim.terminate(process.name)
        elif name == "pause machine":
            seconds = rng.expovariate(0.1)
            for process in list(sim.roles.values()):
                sim.freeze(process, seconds + rng.uniform(0.0, 0.05))
        elif name == "full disk":
            sim.full_disk = rng.randint(0, 3)
        elif sim.network.connections:
            connection = rng.choice(sim.network.connections)
            if name == "partition":
                ways = rng.choice((("up",), ("down",), ("up", "down")))
                sim.network.block(connection, rng.expovariate(0.2), ways)
            else:
                sim.network.reset(connection)

    def _hit(self, verb: str, whom: str) -> None:
        sim, rng = self.sim, self.rng
        role, _, where = whom.partition(" ")
        role = {"worker": "rollout", "rank": "trainer"}.get(role, role)
        if role == "launcher":
            sim.launch.kill()
        elif role == "server":
            sim.kill_server(rng.randrange(len(sim.servers.versions)))
        elif where == "in a write":
            self._writes = rng.randint(0, 6)
        elif where == "at a message":
            self._messages[role] = rng.randint(1, 15)
        elif process := self._some(role):
            if verb == "kill":
                sim.counts["kills"] += 1
                sim.kill(process, "by the adversary")
            else:
                sim.freeze(process, rng.expovariate(0.25))

    def _some(self, role: str) -> Process | None:
        found = [p for name, p in self.sim.roles.items() if name.startswith(role)]
        return self.rng.choice(found) if found else None

    def cut(self, statements: int) -> int | None:
        """Return the statement of a transaction at which the datapipe dies; None for never."""
        if self._writes is None:
            return None
        self._writes -= 1
        if self._writes >= 0:
            return None
        self._writes = None
        self.sim.counts["kills"] += 1
        return self.rng.choice((0, statements + 1, self.rng.randint(0, statements)))

    def dies_at_message(self, process: Process) -> bool:
        """Return whether a process dies while it sends."""
        role = process.name.split("-")[0]
        if role not in self._messages or process.dead:
            return False
        self._messages[role] -= 1
        if self._messages[role] > 0:
            return False
        del self._messages[role]
        self.sim.counts["kills"] += 1
        return True

    def changes_between_launches(self) -> None:
        """Change the settings of the next launch, sometimes."""
        if self.sim.counts["launches"] and not self.calm and self.rng.random() < 0.15:
            self.sim.change(self.sim.scenario.changed(self.rng))
