"""The variables that vLLM gets."""

from __future__ import annotations

from rl_vllm.environment import engine_environment


def test_its_logging_is_left_as_it_is_where_the_user_reads_it(monkeypatch):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    assert engine_environment("cuda")["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert "VLLM_LOGGING_LEVEL" not in engine_environment("cuda", verbose=True)
