"""Build the seccomp filter of confined programs: a BPF program that refuses system calls."""

import os
from errno import ENOSYS, EPERM
from struct import pack

from arealite.base.data import read_toml
from arealite.base.errors import UserError

MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""AUDIT_ARCH, and the column of the numbers in CALLS."""
CALLS = read_toml(__file__, "system_calls.toml")
CLONE3 = 435
"""Answered with ENOSYS, so that the C library uses clone: a filter cannot read clone3's flags."""


def seccomp_filter() -> bytes:
    """Return the filter for this machine.

    Raises:
        UserError: The numbers of its system calls are not known.
    """
    if (machine := os.uname().machine) not in MACHINES:
        what = f"sandbox.backend=bwrap: programs on {machine} cannot be confined"
        raise UserError(f"{what}. Use a host with {' or '.join(MACHINES)}.")
    arch, column = MACHINES[machine]
    refuse = (0x06, 0, 0, 0x50000 | EPERM)
    allow = (0x06, 0, 0, 0x7FFF0000)
    number = (0x20, 0, 0, 0)
    code = [(0x20, 0, 0, 4), (0x15, 1, 0, arch), (0x06, 0, 0, 0x80000000), number]
    code += [(0x35, 0, 1, 0x40000000), refuse]  # x32, the other table of x86_64
    code += [(0x15, 0, 1, CLONE3), (0x06, 0, 0, 0x50000 | ENOSYS)]
    for numbers in CALLS["forbidden"].values():
        code += [(0x15, 0, 1, numbers[column]), refuse]
    for rule in CALLS["allowed_if"].values():
        must = "equal" in rule
        value = rule["equal" if must else "differ"]
        code += [(0x15, 0, 5, rule["numbers"][column]), (0x20, 0, 0, 16 + 8 * rule["argument"])]
        code += [(0x54, 0, 0, rule["mask"]), (0x15, must, not must, value), refuse, allow]
    return b"".join(pack("HBBI", *line) for line in [*code, allow])
