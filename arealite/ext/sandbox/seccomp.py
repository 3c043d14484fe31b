"""Build the seccomp filter of confined programs: a BPF program that refuses system calls."""

import os
from dataclasses import dataclass
from errno import ENOSYS, EPERM
from struct import pack

from arealite.base.errors import UserError
from arealite.base.files import read_toml

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """An instruction of BPF, the kernel's struct sock_filter."""

    code: int
    skip_if_true: int
    """Number of instructions that a jump skips if its condition holds."""
    skip_if_false: int
    operand: int

    def encode(self) -> bytes:
        """Return the struct."""
        return pack("HBBI", self.code, self.skip_if_true, self.skip_if_false, self.operand)


def _plain(code: int, operand: int) -> Instruction:
    return Instruction(
        code=code,
        skip_if_true=0,
        skip_if_false=0,
        operand=operand,
    )


def _load(offset: int) -> Instruction:
    return _plain(LOAD, offset)


def _return(action: int) -> Instruction:
    return _plain(RETURN, action)


def _jump(code: int, operand: int, *, if_true: int = 0, if_false: int = 0) -> Instruction:
    return Instruction(
        code=code,
        skip_if_true=if_true,
        skip_if_false=if_false,
        operand=operand,
    )


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
        _jump(JUMP_IF_EQUAL, audit_arch, if_true=1),
        KILL,
        _load(NUMBER_OFFSET),
        _jump(JUMP_IF_AT_LEAST, X32_BIT, if_false=1),
        REFUSE,
        _jump(JUMP_IF_EQUAL, CLONE3, if_false=1),
        MISSING,
    ]
    for numbers in CALLS["forbidden"].values():
        instructions += [
            _jump(JUMP_IF_EQUAL, numbers[column], if_false=1),
            REFUSE,
        ]
    for rule in CALLS["allowed_if"].values():
        if "equal" in rule:
            refuse_next = _jump(JUMP_IF_EQUAL, rule["equal"], if_true=1)
        else:
            refuse_next = _jump(JUMP_IF_EQUAL, rule["differ"], if_false=1)
        instructions += [
            _jump(JUMP_IF_EQUAL, rule["numbers"][column], if_false=5),
            _load(ARGUMENTS_OFFSET + 8 * rule["argument"]),
            _plain(AND, rule["mask"]),
            refuse_next,
            REFUSE,
            ALLOW,
        ]
    instructions.append(ALLOW)
    return b"".join(instruction.encode() for instruction in instructions)
