"""Diagnostics that users run on a model: do trainer and engine agree, does the engine hold."""
