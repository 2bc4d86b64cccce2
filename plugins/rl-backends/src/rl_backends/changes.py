"""What is known of changes of a trainer's weights, so that no refit reads two states."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from rl_core.errors import LifecycleError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable


class WeightChanges:
    """Knows of every change of a trainer's weights that is declared to it; one for each rank.

    Attributes:
        state: Moves with every change that lasts: the same on ranks that made the same ones.
        torn: Why the weights are half of one state and half of another; empty if they are not.
    """

    def __init__(self) -> None:
        self.state = 0
        self.torn = ""
        self._going_on = 0
        self._ended = 0

    @contextmanager
    def declared(self, *, lasts: bool = True) -> Generator[None]:
        """The weights may change in the body. One that raises leaves them torn.

        Args:
            lasts: False if they are put back at its end, or what lasts is declared within.
        """
        self._going_on += 1
        try:
            yield
            self.state += lasts
        except BaseException as error:
            if lasts:
                self.torn = f"{type(error).__name__}: {error}".splitlines()[0]
                error.add_note("some weights may have changed: load a checkpoint on all ranks")
            raise
        finally:
            self._ended += 1
            self._going_on -= 1

    def agreed(self, state: int) -> None:
        """All ranks have loaded one checkpoint, which is this state."""
        self.state, self.torn = state, ""

    def check_whole(self) -> None:
        """Raises LifecycleError if a change failed midway."""
        if self.torn:
            raise torn_weights("the policy", self.torn)

    def watch(self) -> Callable[..., None]:
        """Returns a check for changes since now.

        The check takes a text that names where a refit is (such as ``", at lm_head.weight"``), and
        raises :class:`LifecycleError` if a change began, ended or is going on.

        Raises:
            LifecycleError: A change failed midway before.
        """
        self.check_whole()
        before = self._ended

        def check(place: str = "") -> None:
            if self._going_on or self._ended != before:
                raise LifecycleError(
                    f"the policy's weights changed during a refit{place}",
                    fix="wait for the refit's futures before training, scoring the reference or "
                    "loading a checkpoint",
                )

        return check


class WatchedTensors:
    """Whether tensors have changed since this was made, as far as torch tells."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._counted = self._counts()
        self._stepped = False
        ours = {id(tensor) for tensor in self._tensors}

        def stepping(optimizer: Any, args: Any, kwargs: Any) -> None:
            groups = optimizer.param_groups
            self._stepped |= any(id(p) in ours for group in groups for p in group["params"])

        # Fused optimizers change tensors without torch's counting it.
        self._hooks = [
            register_optimizer_step_pre_hook(stepping),
            register_optimizer_step_post_hook(stepping),
        ]

    @torch.no_grad()  # or else to_local is a step of autograd
    def _counts(self) -> list[int]:
        local = [getattr(tensor, "to_local", lambda t=tensor: t)() for tensor in self._tensors]
        return counts_of([*self._tensors, *local])

    def check(self, place: str = "") -> None:
        """Raises LifecycleError if they have; at a named place, only for optimizers' steps."""
        # All are counted once, when everything was read.
        if self._stepped or (not place and self._counts() != self._counted):
            raise LifecycleError(
                f"the module's weights changed during a refit{place}",
                fix="refit between two steps, and wait for it before the next one",
            )

    def close(self) -> None:
        """Watches no longer. Idempotent."""
        for hook in self._hooks:
            hook.remove()


def counts_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often torch has counted a change of each tensor; -1 where it does not count."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def torn_weights(who: str, cause: str) -> LifecycleError:
    """The error for weights of which a change failed midway."""
    return LifecycleError(
        f"the weights of {who} are partly old and partly new: a training step or the loading of a "
        f"checkpoint failed ({cause})",
        fix="load a checkpoint on all ranks, or build the policy again",
    )
