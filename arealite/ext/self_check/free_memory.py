"""The memory that new processes can use."""

import os
from pathlib import Path

from arealite.base.host import first_value

MEMORY_INFO = Path("/proc/meminfo")


def kernel_bytes(file: Path, key: str) -> int:
    """Return the bytes that a file of the kernel has as `key: number kB`; 0 without the line."""
    kilobytes = first_value(file, key).removesuffix("kB")
    return int(kilobytes or 0) * 1024


def available_memory() -> int:
    """Return the bytes of memory that new processes can use.

    Files that the kernel keeps in memory count as available, because it drops them on demand.
    Without /proc/meminfo, the result is the memory of the machine.
    """
    available_bytes = kernel_bytes(MEMORY_INFO, "MemAvailable")
    return available_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
