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
    text = CPU_INFO.read_text() if CPU_INFO.is_file() else ""
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), "")
