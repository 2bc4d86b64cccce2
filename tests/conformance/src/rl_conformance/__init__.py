"""The conformance suite that every backend must pass."""
