"""Environment variables of HTTP proxies. Programs must reach the addresses of a run directly."""

import os
from collections.abc import MutableMapping

LOOPBACK = ("localhost", "127.0.0.1", "::1")
BYPASS = ("NO_PROXY", "no_proxy")
"""Variables with the hosts that need no proxy. Each program reads one of them."""
NO_HOSTS = ("", "auto", "0.0.0.0", "::")
"""Values of options for a host that name no host."""


def bypass_proxies(*hosts: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Add loopback and `hosts` to the hosts that need no proxy.

    The hosts that the user has listed stay. A list of one variable is used for both.

    Args:
        hosts: Names or addresses; "", "auto" and addresses of all interfaces are left out.
        environment: The variables to change; by default those of this process.
    """
    lists = {name: environment.get(name, "") for name in BYPASS}
    run_hosts = [host for host in hosts if host not in NO_HOSTS]
    for name in BYPASS:
        users_list = lists[name] or "".join(lists.values())
        if users_list.strip() == "*":  # no program uses a proxy
            environment[name] = users_list
            continue
        entries = [users_list] if users_list else []
        present = {host.strip() for host in users_list.split(",")}
        for host in (*LOOPBACK, *run_hosts):
            if host not in present:
                entries.append(host)
                present.add(host)
        environment[name] = ",".join(entries)
