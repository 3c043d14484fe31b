"""Facts about the processor and the memory, read from files of the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from arealite.base import host
from arealite.ext.self_check import free_memory

AMD = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx512_bf16 sse\n"
INTEL = "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu amx_bf16\n"
OLD = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx512_bf16x avx2\n"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    for cached in (host.has_bfloat16,):
        cached.cache_clear()
    yield
    for cached in (host.has_bfloat16,):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("text", "vendor", "has_bfloat16"),
    [(AMD, "AuthenticAMD", True), (INTEL, "GenuineIntel", True), (OLD, "AuthenticAMD", False)],
)
def test_vendor_and_instructions_are_read(
    text: str, vendor: str, has_bfloat16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    monkeypatch.setattr(host, "CPU_INFO", file)
    assert host.first_value(file, "vendor_id") == vendor
    assert host.has_bfloat16() == has_bfloat16


def test_nothing_is_known_without_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CPU_INFO", tmp_path / "absent")
    assert host.first_value(host.CPU_INFO, "vendor_id") == ""
    assert not host.has_bfloat16()


def test_memory_of_cached_files_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "meminfo"
    file.write_text(
        "MemTotal:  2000 kB\nMemFree:  10 kB\nMemAvailable:  1500 kB\nCached: 1490 kB\n"
    )
    monkeypatch.setattr(free_memory, "MEMORY_INFO", file)
    assert free_memory.available_memory() == 1500 * 1024
    monkeypatch.setattr(free_memory, "MEMORY_INFO", tmp_path / "absent")
    assert free_memory.available_memory() > 1500 * 1024
