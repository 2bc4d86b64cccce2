"""Distributions that are installed for one test, and what is closed after it."""

from party_fixtures import install, keep

__all__ = ["install", "keep"]
