"""Contracts, batches, weight refits and plugin discovery for RL post-training."""
