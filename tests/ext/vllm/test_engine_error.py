"""The reason of a vLLM server's end, in output as vLLM 0.32 writes it."""

from __future__ import annotations

from arealite.base import entries
from arealite.ext.vllm.engine_error import engine_error

WORKER = "(Worker_TP0 pid=7) ERROR 11-30 00:49:54 [multiproc_executor.py:870] "
ENGINE = "(EngineCore_DP0 pid=6) ERROR 11-30 00:49:55 [core.py:1510] "
MEMORY = "ValueError: No available memory for the cache blocks. Try increasing it."
END = """
Traceback (most recent call last):
  File "vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed: {'EngineCore': 1}
"""


def test_error_of_the_engine_is_the_reason_of_a_failed_start():
    output = f"{ENGINE}    raise ValueError(\n{ENGINE}{MEMORY}\n{END}"
    assert engine_error(output, 1) == MEMORY
    reasons = entries.hooks("exit_reason")
    assert entries.first_result(reasons, output, 1) == MEMORY, "before the reason of any program"


def test_error_of_a_worker_goes_before_its_consequence_in_the_engine():
    consequence = "Exception: WorkerProc initialization failed. See stack trace for root cause."
    output = f"{WORKER}{MEMORY}\n{ENGINE}{consequence}\n{END}"
    assert engine_error(output, 1) == MEMORY


def test_output_without_such_an_error_has_no_reason_here():
    assert engine_error(END, 1) is None
    assert engine_error("(APIServer pid=5) ERROR 1 [a.py:1] ValueError: x", 1) is None


def test_earlier_error_is_no_reason_of_a_death_by_signal():
    assert engine_error(f"{ENGINE}{MEMORY}\n", -9) is None
