"""GRPO on additions."""
