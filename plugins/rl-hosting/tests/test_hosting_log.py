"""What an engine printed, while its process is given up."""

from __future__ import annotations

import os
import threading

import pytest

from rl_hosting import _log

#: Ends of logs as engines wrote them, shortened; and what of them says why the engine ended.
SGLANG_STARTS = """\
[2026-11-26 06:59:38] Ignore import error when loading sglang.srt.models.qwen3_5_text: \
'_OpNamespace' 'sgl_kernel' object has no attribute 'fused_qk_gemma_rmsnorm_cpu'
[2026-11-26 06:59:39] Warning: User-specified context_length (264) is greater than the derived \
context_length (256). This may lead to incorrect model outputs or CUDA errors.
Multi-thread loading shards: 100% Completed | 1/1 [00:00<00:00, 276.07it/s]
"""
SGLANG_ENDS = """
nanobind: leaked 4 instances!
 - leaked instance 0x7f7c8ffd9488 of type "triton._C.libtriton.ir.attribute"
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""
TRACEBACK = """\
[2026-11-26 07:02:11] Scheduler hit an exception: Traceback (most recent call last):
  File "/site-packages/sglang/srt/managers/scheduler.py", line 4096, in run_scheduler_process
    scheduler.run_event_loop()
  File "/site-packages/sglang/srt/mem_cache/memory_pool.py", line 218, in _set_kv_buffer_impl
    k_cache[indices] = k
    ~~~~~~~^^^^^^^^^
RuntimeError: shape mismatch: value tensor of shape [3, 4, 64] cannot be broadcast
"""
VLLM_STARTS = """\
(MainProcess pid=12543) WARNING 11-26 07:00:16 [arg_utils.py:1945] The global random seed is set \
to 247163663. Since VLLM_ENABLE_V1_MULTIPROCESSING is set to False, this may affect the state.
(MainProcess pid=12543) WARNING 11-26 07:00:16 [arg_utils.py:3005] This model does not officially \
support disabling chunked prefill. Disabling this manually may cause the engine to crash.
"""
VLLM_WORKER = """\
(Worker pid=18712) ERROR 11-26 07:03:24 [executor.py:870] Traceback (most recent call last):
(Worker pid=18712) ERROR 11-26 07:03:24 [executor.py:870]   File "/vllm/_custom_ops.py", \
line 3208, in cpu_attention_with_kv_cache
(Worker pid=18712) ERROR 11-26 07:03:24 [executor.py:870]     torch.ops._C.cpu_attention(
(Worker pid=18712) ERROR 11-26 07:03:24 [executor.py:870] RuntimeError: Unsupported CPU \
attention configuration: head_dim=16 isa=2 kv_cache_idx=0
"""
FOLLOWED = """\
Traceback (most recent call last):
  File "/vllm/v1/executor/multiproc_executor.py", line 491, in wait
    return self.pipe.recv()
EOFError
"""
SETTINGS = """\
Traceback (most recent call last):
  File "/vllm/engine/arg_utils.py", line 2100, in create_engine_config
    config = VllmConfig(
pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
  Assertion failed, Chunked prefill is required for mamba cache mode 'align'.
"""
MISMATCH = "RuntimeError: shape mismatch: value tensor of shape [3, 4, 64] cannot be broadcast"
HEADS = "RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0"
SEGFAULT = (
    "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):"
)


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (SGLANG_STARTS + TRACEBACK + SGLANG_ENDS, MISMATCH),
        (SGLANG_STARTS * 50 + TRACEBACK[200:] + SGLANG_ENDS * 50, MISMATCH),
        (VLLM_STARTS + VLLM_WORKER + FOLLOWED, HEADS),
        (VLLM_STARTS + TRACEBACK + VLLM_WORKER, f"{MISMATCH}\n{HEADS}"),
        (VLLM_STARTS + SETTINGS, "\n".join(SETTINGS.splitlines()[-2:])),
        (FOLLOWED, "EOFError"),
        (
            VLLM_STARTS + SEGFAULT + "\n  <no Python frame>\n",
            "Fatal Python error: Segmentation fault",
        ),
        ("the engine starts\nlast words\n", "the engine starts\nlast words"),
        ("", ""),
    ],
)
def test_what_says_why_an_engine_ended_is_not_hidden_by_what_it_prints_else(log: str, cause: str):
    assert _log.find_cause(log) == cause


def test_no_log_makes_a_message_long():
    assert len(_log.find_cause("x" * 5000 + "\n" + VLLM_STARTS * 100)) < 1000
    assert len(_log.find_cause(TRACEBACK.rstrip() + "x" * 5000)) < 1000


def test_a_log_that_is_read_is_closed_afterwards(monkeypatch):
    log = _log.Log(show=False)
    os.write(log.fileno(), b"its last words")
    closing = threading.Thread(target=log.close)
    look = os.fstat

    def fstat_while_it_is_closed(descriptor):
        closing.start()
        closing.join(0.2)
        return look(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(_log.os, "fstat", fstat_while_it_is_closed)
        last = log.tail()
    assert last == "its last words"
    closing.join(10)
    assert log.tail() == ""
