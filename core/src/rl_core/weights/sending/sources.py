"""What a refit reads of a policy: tensors of one state, under the names of the checkpoint."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from rl_core.errors import ConfigError, LifecycleError
from rl_core.interfaces import WeightSource

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    import torch

    from rl_core.interfaces import TensorSpec


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
                error.add_note("the weights may be half changed: load a checkpoint, on all ranks")
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


def torn_weights(who: str, cause: str) -> LifecycleError:
    """The error for weights of which a change failed midway."""
    return LifecycleError(
        f"{who} has weights that are half of one state and half of another: a step, or a load, "
        f"failed midway ({cause})",
        fix="load a checkpoint, on all ranks, or build the policy again",
    )


class GuardedSource(WeightSource):
    """Another source, which raises as soon as the weights behind it change.

    Args:
        source: Gives the tensors under the trainer's names.
        unchanged: What :meth:`WeightChanges.watch` returned when the source was made.
        rename: Gives a tensor its new name, or None to leave it out. Of tensors that are tied to
            one that is left out, the first then stands for it.

    Raises:
        ConfigError: Two tensors would have one name.
    """

    def __init__(
        self,
        source: WeightSource,
        unchanged: Callable[..., None],
        rename: Callable[[str], str | None] = str,
    ) -> None:
        self.device = source.device
        self._source = source
        self._unchanged = unchanged
        self._rename = rename
        self._old: dict[str, str] = {}  # by new name
        self._owner: dict[str, str] = {}  # the old name of what the refit reads, by new name
        self._specs: list[TensorSpec] = []

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSource.specs`."""
        if self._specs:
            return self._specs
        owners: dict[str, str] = {}  # new names, by the old one of the owner
        for spec in self._source.specs():
            name = self._rename(spec.name)
            if name is None:
                continue
            if name in self._old:
                raise ConfigError(
                    f"refit: {self._old[name]} and {spec.name} would both be called {name!r}",
                    fix="give every tensor a different name, or None to leave it out",
                    key="rename",
                )
            owner = spec.alias_of or spec.name
            self._old[name], self._owner[name] = spec.name, owner
            first = owners.setdefault(owner, name)
            alias_of = None if first == name else first
            self._specs.append(msgspec.structs.replace(spec, name=name, alias_of=alias_of))
        return self._specs

    def open(self, rank_call_id: str, deadline_s: float) -> None:
        """See :meth:`WeightSource.open`."""
        self._source.open(rank_call_id, deadline_s)

    def check(self) -> None:
        """See :meth:`WeightSource.check`."""
        self._source.check()

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`.

        Raises:
            LifecycleError: The weights changed since this source was made.
        """
        self.specs()
        new = {self._owner[name]: name for name in names}
        for old, tensor in self._source.tensors(list(new)):
            name = new.get(old, old)
            self._unchanged(f", at {name}")
            yield name, tensor
            self._unchanged(f", at {name}")

    def persistent(self) -> Mapping[str, torch.Tensor] | None:
        """See :meth:`WeightSource.persistent`."""
        self.specs()
        tensors = self._source.persistent()
        if tensors is None:
            return None
        return {
            name: tensor
            for name, old in self._old.items()
            if (tensor := tensors.get(old, tensors.get(self._owner[name]))) is not None
        }

    def confirm(self) -> None:
        """See :meth:`WeightSource.confirm`."""
        self._unchanged()
        self._source.confirm()

    def close(self) -> None:
        """See :meth:`WeightSource.close`."""
        self._source.close()
