"""Build the seccomp filter of confined programs: a BPF program that refuses system calls."""

import os
from errno import ENOSYS, EPERM
from struct import pack
from typing import NamedTuple

from arealite.base.data import read_toml
from arealite.base.errors import UserError

MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""AUDIT_ARCH, and the column of the numbers in CALLS."""
CALLS = read_toml(__file__, "system_calls.toml")
CLONE3 = 435
"""Answered with ENOSYS, so that the C library uses clone: a filter cannot read clone3's flags."""
X32_BIT = 0x40000000
"""Numbers from this one are of x32, the other table of x86_64."""

LOAD = 0x20
"""Load 32 bits of the kernel's struct seccomp_data, at an offset."""
AND = 0x54
JUMP_IF_EQUAL = 0x15
JUMP_IF_AT_LEAST = 0x35
RETURN = 0x06
NUMBER_OFFSET = 0
MACHINE_OFFSET = 4
ARGUMENTS_OFFSET = 16
"""Offset of the first argument; each argument has 8 bytes."""


class Instruction(NamedTuple):
    """An instruction of BPF, the kernel's struct sock_filter."""

    code: int
    skip_if_true: int
    """Number of instructions that a jump skips if its condition holds."""
    skip_if_false: int
    operand: int


def _load(offset: int) -> Instruction:
    return Instruction(LOAD, 0, 0, offset)


def _return(action: int) -> Instruction:
    return Instruction(RETURN, 0, 0, action)


REFUSE = _return(0x50000 | EPERM)
MISSING = _return(0x50000 | ENOSYS)
KILL = _return(0x80000000)
ALLOW = _return(0x7FFF0000)


def seccomp_filter() -> bytes:
    """Return the filter for this machine.

    Raises:
        UserError: The numbers of its system calls are not known.
    """
    machine = os.uname().machine
    if machine not in MACHINES:
        raise UserError(
            f"sandbox.backend=bwrap: programs on {machine} cannot be confined. "
            f"Use a host with {' or '.join(MACHINES)}."
        )
    audit_arch, column = MACHINES[machine]
    instructions = [
        _load(MACHINE_OFFSET),
        Instruction(JUMP_IF_EQUAL, 1, 0, audit_arch),
        KILL,
        _load(NUMBER_OFFSET),
        Instruction(JUMP_IF_AT_LEAST, 0, 1, X32_BIT),
        REFUSE,
        Instruction(JUMP_IF_EQUAL, 0, 1, CLONE3),
        MISSING,
    ]
    for numbers in CALLS["forbidden"].values():
        instructions += [
            Instruction(JUMP_IF_EQUAL, 0, 1, numbers[column]),
            REFUSE,
        ]
    for rule in CALLS["allowed_if"].values():
        must_equal = "equal" in rule
        operand = rule["equal"] if must_equal else rule["differ"]
        instructions += [
            Instruction(JUMP_IF_EQUAL, 0, 5, rule["numbers"][column]),
            _load(ARGUMENTS_OFFSET + 8 * rule["argument"]),
            Instruction(AND, 0, 0, rule["mask"]),
            Instruction(JUMP_IF_EQUAL, int(must_equal), int(not must_equal), operand),
            REFUSE,
            ALLOW,
        ]
    instructions.append(ALLOW)
    return b"".join(pack("HBBI", *instruction) for instruction in instructions)
