"""Loss functions for RL post-training: GRPO, DPO and NLL."""
