"""DPO on additions."""
