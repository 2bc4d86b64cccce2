"""Runs of GRPO, DPO and SFT: ``rl train CONFIG.yaml key=value ...``, or :class:`GRPOTrainer`."""
