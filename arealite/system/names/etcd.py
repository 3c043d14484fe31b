"""Keeps a trial's names in an etcd, over its v3 JSON gateway, each under a lease of its own.

The standard library's HTTP client: some requests a second from threads that may block need no more.
"""

from __future__ import annotations

import json
import math
import re
import time
from base64 import b64decode, b64encode
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, cast

from arealite.base import log
from arealite.base.errors import RoleError, UserError
from arealite.system.health.waits import waiting
from arealite.system.names.registry import Entry, NameRegistry

logger = log.get(__name__)

ROOT = "/arealite/"
ANSWER_S = 2.0
"""An etcd answers in milliseconds, or has no majority."""


class EtcdRegistry(NameRegistry):
    """The names of one trial in an etcd. While it is away, what was read last still holds; when it
    is back, the next heartbeat of each name brings that back."""

    def __init__(self, trial: str, addresses: str, *, ttl_s: float) -> None:
        """Connect to nobody yet.

        Raises:
            UserError: `addresses` is not host:port[,host:port].
        """
        super().__init__(Path(ROOT + trial), ttl_s=ttl_s)
        self.where = f"{self.root} of the etcd at {addresses}"
        self._addresses, self._key = addresses.split(","), f"cluster.etcd={addresses}"
        if not all(re.fullmatch(r"[^\s/]+:\d{1,5}", each) for each in self._addresses):
            raise UserError(f"{self._key}: use host:port[,host:port], as in 10.0.0.7:2379.")
        self._good = self._addresses[0]
        self._leases = dict[str, str]()
        self._known = dict[str, list[Entry]]()
        self._away = -math.inf

    def check(self) -> None:
        try:
            self._range(str(self.root))
        except RoleError as error:
            fix = "Start it, correct cluster.etcd, or use cluster.name_store=file."
            raise UserError(f"{self._key}: {error}. {fix}") from error

    def put(self, role: str, entry_id: str, value: dict[str, Any]) -> None:
        key = f"{self.root}/{role}/{entry_id}"
        lease = self._leases.get(key)
        if lease is None or not self._ask("lease/keepalive", ID=lease)["result"].get("TTL"):
            lease = self._ask("lease/grant", TTL=math.ceil(self.ttl_s))["ID"]
            self._leases[key] = lease
        self._ask("kv/put", key=_encode(key), value=_encode(json.dumps(value)), lease=lease)

    def remove(self, role: str, entry_id: str) -> None:
        try:
            self._ask("kv/deleterange", key=_encode(f"{self.root}/{role}/{entry_id}"))
        except RoleError as error:  # its lease ends by itself
            logger.warning("name not removed", role=role, id=entry_id, error=str(error))

    def list(self, role: str) -> list[Entry]:
        known = self._known.get(role, [])
        try:
            found = [entry for _, entry in self._range(f"{self.root}/{role}")]
        except RoleError as error:
            if time.monotonic() - self._away > self.ttl_s:
                logger.warning("etcd away", error=str(error))
            self._away = time.monotonic()
            return known
        if time.monotonic() - self._away < self.ttl_s:  # it may come back without its leases
            found = [*({entry.id: entry for entry in [*known, *found]}).values()]
        self._known[role] = found
        return found

    def everywhere(self, role: str, entry_id: str) -> list[tuple[Path, Entry]]:
        found = self._range(ROOT.rstrip("/"))
        return [each for each in found if (each[1].role, each[1].id) == (role, entry_id)]

    def _range(self, folder: str) -> list[tuple[Path, Entry]]:
        """Return what is below a key and a slash, each with the root of its trial, sorted."""
        answer = self._ask("kv/range", key=_encode(f"{folder}/"), range_end=_encode(f"{folder}0"))
        found = list[tuple[Path, Entry]]()
        for pair in answer.get("kvs", []):
            path = Path(b64decode(pair["key"]).decode())
            entry = Entry(path.parent.name, path.name, json.loads(b64decode(pair["value"])), 0.0)
            found.append((path.parents[1], entry))
        return found

    def _ask(self, path: str, **body: Any) -> dict[str, Any]:
        """Ask the address that answered last, then the others.

        Raises:
            RoleError: none gives what was asked for; says what the last one said.
        """
        why = ""
        for address in sorted(self._addresses, key=lambda each: each != self._good):
            host, _, port = address.rpartition(":")
            connection = HTTPConnection(host.strip("[]"), int(port), timeout=ANSWER_S)
            try:
                with waiting(path, owner="name registry", on="etcd", seconds=ANSWER_S):
                    connection.request("POST", f"/v3/{path}", json.dumps(body))
                    with connection.getresponse() as response:
                        answer = cast(dict[str, Any], json.loads(response.read()))
            except (OSError, HTTPException, ValueError) as error:
                why = f"{address}: {error}"
                continue
            finally:
                connection.close()
            if response.status == 200 and "error" not in answer:
                self._good = address
                return answer
            why = f"{address}: {answer}"
        raise RoleError(f"no etcd answers as one (3.4 or newer) would: {why}")


def _encode(text: str) -> str:
    return b64encode(text.encode()).decode()
