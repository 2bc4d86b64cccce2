"""What a policy or an engine shows of itself, and why it is not copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_core.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["described", "not_copied"]


def described(backend: Any, config: Mapping[str, Any], *facts: str) -> str:
    """The ``repr`` of a backend: its model, the facts, and the version of its weights."""
    shown = [f"{config.get('backend')!r}", f"model {config.get('model_name')!r}"]
    shown += [fact for fact in facts if fact]
    return (
        f"{type(backend).__name__}({', '.join(shown)}, weights version {backend.weights_version})"
    )


def not_copied(backend: Any, create: str) -> CapabilityError:
    """The error of pickling or copying a backend."""
    return CapabilityError(
        f"a {type(backend).__name__} cannot be pickled or copied: it works only in the process "
        "that built it",
        fix=f"run it in a worker, {create}(config, LocalCluster(1)), or build another one in the "
        f"other process, {create}(config)",
    )
