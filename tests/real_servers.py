"""Options of launch_llm_server for real SGLang and vLLM servers on this machine's CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.real import PYTHON as SGLANG_PYTHON
from tests.vllm.real import PYTHON as VLLM_PYTHON


def vllm_options() -> list[str]:
    """Return the options of a vLLM server; fail the test if vLLM is not installed."""
    return [
        "llm_server.type=vllm",
        "llm_server.vllm.device=cpu",
        "llm_server.vllm.kv_cache_gb=1",
        "llm_server.vllm.start_timeout_s=1200",
        f"llm_server.vllm.python={installed(VLLM_PYTHON, 'vllm')}",
    ]


def sglang_options() -> list[str]:
    """Return the options of an SGLang server; fail the test if SGLang is not installed."""
    return [
        "llm_server.type=sglang",
        "llm_server.sglang.device=cpu",
        "llm_server.sglang.start_timeout_s=1200",
        f"llm_server.sglang.python={installed(SGLANG_PYTHON, 'sglang')}",
    ]


def installed(python: str, package: str) -> str:
    """Return the path of the Python that has a package of servers; fail the test without it."""
    if not Path(python).exists():
        pytest.fail(
            f"needs a Python with {package}, but {python} does not exist. "
            f"Run make {package}, or set {package.upper()}_PYTHON."
        )
    return python
