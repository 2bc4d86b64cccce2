"""What a policy does for the loop that calls it: times, numbers, and the names of its arguments."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    import numpy as np

    from rl_core.interfaces import Timer

__all__ = ["Scalar", "checkpoint_path", "scalars", "timed"]


def timed(timer: Timer | None, label: str) -> AbstractContextManager[object]:
    """Measures what is done in the body, if a loop brought its stopwatch along."""
    return nullcontext() if timer is None else timer.time(label)


class Scalar(float):
    """A number that also has what loops ask of a 0-d tensor."""

    def item(self) -> float:
        """The number alone."""
        return float(self)

    def numpy(self) -> np.ndarray[Any, Any]:
        """``[]`` float64."""
        import numpy as np

        return np.asarray(float(self))


def scalars(result: dict[str, Any]) -> dict[str, Any]:
    """What ``train`` returns, from a worker's result, in which numbers are plain."""
    return result | {key: Scalar(result[key]) for key in ("loss", "grad_norm") if key in result}


def checkpoint_path(
    path: str | Path | None = None,
    *,
    weights_path: str | Path | None = None,
    optimizer_path: object = None,
    tokenizer_path: object = None,
    checkpointing_cfg: object = None,
) -> str | Path:
    """The directory that ``save_checkpoint`` was given.

    Args:
        path: The directory.
        weights_path: The same.
        optimizer_path: Where others put a part; all parts are in the one directory.
        tokenizer_path: Likewise.
        checkpointing_cfg: How others write; here it is written when ``save_checkpoint`` returns.

    Raises:
        ConfigError: There is none, or there are two.
    """
    del optimizer_path, tokenizer_path, checkpointing_cfg
    chosen: list[Any] = [given for given in (path, weights_path) if given is not None]
    if chosen and not (isinstance(chosen[0], str | os.PathLike) and str(chosen[0])):
        raise ConfigError(
            f"save_checkpoint: path must be a path, got {chosen[0]!r}",
            fix='give a directory, such as "runs/step-100"',
            key="path",
        )
    if len(chosen) != 1:
        raise ConfigError(
            f"save_checkpoint takes one directory, got {len(chosen)}",
            fix="give either path or weights_path",
            key="path",
        )
    found: str | Path = chosen[0]
    return found
