"""Facts about this machine, from files of its kernel."""

from functools import cache
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
"""Facts about the processor; without the file they are unknown."""


@cache
def has_bfloat16() -> bool:
    """Return whether the processor has instructions for matrix products in bfloat16."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(first_value(CPU_INFO, "flags").split())


def first_value(file: Path, key: str) -> str:
    """Return the value of the first line `key: value` of a file; "": there is none."""
    if not file.is_file():
        return ""
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""
