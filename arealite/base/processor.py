"""Facts about the processor of this machine, from /proc/cpuinfo; elsewhere they are unknown."""

from functools import cache
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


@cache
def cpu_vendor() -> str:
    """Return the vendor, for example `AuthenticAMD`; "": unknown."""
    return _first_line("vendor_id")


@cache
def has_bfloat16() -> bool:
    """Return whether the processor has instructions for matrix products in bfloat16."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(_first_line("flags").split())


def _first_line(key: str) -> str:
    """Return the value of the first line with a key; "": there is none."""
    if not CPU_INFO.is_file():
        return ""
    for line in CPU_INFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""
