"""The transport ``collective``: refits over gloo or NCCL, between hosts."""
