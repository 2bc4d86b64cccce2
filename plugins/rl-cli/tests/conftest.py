"""Distributions that are installed for one test."""

from installed import install

__all__ = ["install"]
