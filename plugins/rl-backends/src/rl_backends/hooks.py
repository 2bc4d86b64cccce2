"""What this library adds to ``refit``: the ends of torch modules and sources of weights."""

from __future__ import annotations

from typing import Any

from rl_core.plugins.hookspecs import hookimpl

__all__ = ["refit_end"]


@hookimpl
def refit_end(party: Any, sends: bool) -> Any:
    """What :mod:`rl_backends.modules` has for a module or a source; None for anything else."""
    from rl_backends.modules import end_of

    return end_of(party, sends=sends)
