"""Runnable examples: ``python -m examples.grpo`` and ``python -m examples.dpo``."""
