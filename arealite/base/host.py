"""Facts about the processor and the memory of this machine."""

import os
from functools import cache
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
"""Facts about the processor; without the file they are unknown."""
MEMORY_INFO = Path("/proc/meminfo")


@cache
def cpu_vendor() -> str:
    """Return the vendor, for example `AuthenticAMD`; "": unknown."""
    return _first_value(CPU_INFO, "vendor_id")


@cache
def has_bfloat16() -> bool:
    """Return whether the processor has instructions for matrix products in bfloat16."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(_first_value(CPU_INFO, "flags").split())


def available_memory() -> int:
    """Return the bytes of memory that new processes can use.

    Files that the kernel keeps in memory count as available, because it drops them on demand.
    Without /proc/meminfo, the result is the memory of the machine.
    """
    if kilobytes := _first_value(MEMORY_INFO, "MemAvailable"):
        return int(kilobytes.removesuffix("kB")) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _first_value(file: Path, key: str) -> str:
    """Return the value of the first line `key: value` of a file; "": there is none."""
    if not file.is_file():
        return ""
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""
