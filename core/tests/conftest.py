"""Plugins that are installed for one test, and parties of a refit that are closed after it."""

from party_fixtures import either_device, gpu, install, keep, nothing_is_left, pair, stack

__all__ = ["either_device", "gpu", "install", "keep", "nothing_is_left", "pair", "stack"]
