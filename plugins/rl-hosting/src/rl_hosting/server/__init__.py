"""Backends for servers that are already running: what those of all engines share.

The author of a backend derives a :class:`Server`, which knows the routes of the engine, and a
:class:`ServerGeneration`. Nothing here imports an engine; it need not be installed where this runs.
"""
