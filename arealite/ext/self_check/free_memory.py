"""The memory that new processes can use."""

import os
from pathlib import Path

from arealite.base.host import first_value

MEMORY_INFO = Path("/proc/meminfo")


def available_memory() -> int:
    """Return the bytes of memory that new processes can use.

    Files that the kernel keeps in memory count as available, because it drops them on demand.
    Without /proc/meminfo, the result is the memory of the machine.
    """
    if kilobytes := first_value(MEMORY_INFO, "MemAvailable"):
        return int(kilobytes.removesuffix("kB")) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
