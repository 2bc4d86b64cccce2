"""Loops over the interfaces, to read and to run, such as ``python -m examples.grpo``."""
