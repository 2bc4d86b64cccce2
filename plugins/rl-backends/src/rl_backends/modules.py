"""Refits of torch modules that belong to no backend: your own trainer, or your own engine.

``refit(module, generation)`` makes what is here when it is first called with a module, and keeps it
as long as the module lives. To use the two ends yourself, such as in two processes, create them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from rl_backends.changes import WatchedTensors
from rl_backends.rank_job import follow
from rl_backends.sources import GuardedSource
from rl_backends.spellings import SendsWeights, TakesWeights
from rl_backends.tensors import NamedTensorSink, NamedTensorSource, module_tensors
from rl_core.errors import CapabilityError, LifecycleError
from rl_core.futures import time_left
from rl_core.install import install_command
from rl_core.interfaces import WeightSource
from rl_core.plugins.hookspecs import only_answer
from rl_core.weights.options import SendOptions
from rl_core.weights.receiving.receiver import RefitReceiver
from rl_core.weights.sending.sender import RefitSender

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rl_backends.mesh import MeshRanks
    from rl_core.interfaces import Future
    from rl_core.weights.engine_lock import Lock

__all__ = [
    "ModuleReceiver",
    "ModuleSender",
    "Rename",
    "end_of",
    "plain_name",
    "whole_tensors",
]

#: From a module's name of a tensor to the checkpoint's; None leaves the tensor out.
Rename: TypeAlias = Callable[[str], str | None]
#: Parts of names that torch.compile and checkpoint_wrapper add.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}


class ModuleSender(SendsWeights):
    """The sending end of refits from a module: what :func:`rl_core.refit` needs of a policy.

    Args:
        model: The module that is trained. It may be wrapped for data parallelism or be compiled,
            and have what a plugin reads (:meth:`HookSpecs.weight_source`), such as adapters. Or a
            :class:`WeightSource`, which then serves all refits. It is not kept alive by this.
        rename: Gives every tensor the name that it has in the checkpoint, which is the engine's.

    If the module has DTensors, each rank of their meshes has such an end, and calls its methods at
    the same time as the others. The first rank sends; on the others :meth:`prepare_refit_info`
    returns None, and :meth:`send_weights` takes part.
    """

    def __init__(self, model: nn.Module | WeightSource, *, rename: Rename | None = None) -> None:
        model = unwrapped(model)
        self.rename = rename
        self._model = weakref.ref(model)
        self._ranks: MeshRanks | None = None
        self._places: dict[tuple[int, ...], int] = {}
        self._sender = RefitSender(self._source, name=type(model).__name__)
        self._close = weakref.finalize(model, self._end)
        # Now, as the other ranks do it: this first call of refit may fail before it needs them.
        with suppress(Exception):  # each refit looks again, and raises it
            self._members()

    def prepare_refit_info(self) -> dict[str, Any] | None:
        """As a policy's; None on a rank that does not send.

        Raises:
            CapabilityError: Some tensors cannot be sent; names one.
            RefitPeerError: On another rank: the first one did not come in time.
        """
        ranks = self._find_ranks()
        if ranks is not None and ranks.rank > 0:
            return None
        try:
            return super().prepare_refit_info()
        except BaseException:
            self.cancel_refit(self._sender.number + 1)  # other ranks may wait for it
            raise

    def send_weights(self, **options: Any) -> list[Future]:
        """As a policy's, or takes part in the refit of the rank that sends.

        Raises:
            RefitPeerError: As :meth:`prepare_refit_info`.
        """
        ranks = self._find_ranks()
        if ranks is None or ranks.rank == 0:
            return super().send_weights(**options)
        deadline_s = time_left(SendOptions.of(options).deadline_s)
        return [follow(self._sender, **{**options, "deadline_s": deadline_s})]

    def shutdown(self) -> bool:
        """Ends every refit, and closes sockets and memory. Idempotent."""
        self._close()
        return True

    def _end(self) -> None:
        self._sender.close()

    def _find_ranks(self) -> MeshRanks | None:
        """Those of the module's meshes, anew if they are other ones than in the last refit."""
        members = self._members()
        if self._ranks is not None and self._ranks.members != members:
            self._ranks.close()
            self._ranks = None
        if members and self._ranks is None:
            from rl_backends.mesh import MeshRanks

            self._ranks = MeshRanks(members, self._places[members], self._module())
        self._sender.ranks = self._ranks
        return self._ranks

    def _members(self) -> tuple[int, ...]:
        """The ranks of the module's meshes, among whose modules it has its place from now on."""
        model, tensors, members = self._module(), dict[str, torch.Tensor](), tuple[int, ...]()
        if isinstance(model, nn.Module) and _fsdp1_in(model) is None:  # whose state is a collective
            tensors = module_tensors(model)
        if (
            any(hasattr(tensor, "full_tensor") for tensor in tensors.values())
            and only_answer("weight_source", module=model) is None
        ):
            from rl_backends.mesh import mesh_members, next_place  # takes a second

            members = mesh_members(type(model).__name__, tensors)
            if members not in self._places:
                self._places[members] = next_place(members)
        return members

    def _module(self) -> Any:
        model = self._model()
        if model is None:
            raise LifecycleError(
                f"the module behind {self._sender.name} no longer exists",
                fix="keep a reference to the module as long as you refit from it",
            )
        return model

    def _source(self) -> WeightSource:
        model, rename = self._module(), self.rename or str
        if isinstance(model, WeightSource):
            return GuardedSource(model, lambda place="": None, rename)
        if (ranks := self._ranks or self._find_ranks()) is not None:  # every refit looks first
            from rl_backends.pieces import DTensorSource

            tensors = _without_adapters(model, sharded=True)
            its = DTensorSource(tensors, model, first=ranks.rank == 0)
            state = partial(ranks.changes_of, list(tensors.values()))
            return _Watched(its, tensors.values(), rename, state)
        known = only_answer("weight_source", module=model)
        source = known or NamedTensorSource(_without_adapters(model))
        return _Watched(source, module_tensors(model).values(), rename)


class ModuleReceiver(TakesWeights):
    """The receiving end of refits into a module: what :func:`rl_core.refit` needs of an engine.

    Args:
        model: The module that generates; it is written to in place. It is not kept alive by this.
        lock: Held while the module is used, and by a refit while it writes. By default a lock that
            nothing else uses: make sure that nothing generates during a refit.
        on_commit: Called with the new version before it counts; drops caches.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lock: Lock | None = None,
        on_commit: Callable[[int], None] | None = None,
    ) -> None:
        model = unwrapped(model)
        reference = weakref.ref(model)

        def sink() -> NamedTensorSink:
            found = reference()
            if found is None:
                raise LifecycleError(
                    f"the module behind {type(self).__name__} no longer exists",
                    fix="keep a reference to the module as long as you refit it",
                )
            return NamedTensorSink(_without_adapters(found))

        self._receiver = RefitReceiver(
            sink, name=type(model).__name__, lock=lock or threading.Lock(), on_commit=on_commit
        )
        self._close = weakref.finalize(model, self._receiver.close)

    def check(self) -> None:
        """Raises WeightsTornError unless the weights are whole: call it before they are used."""
        self._receiver.check()

    def shutdown(self) -> bool:
        """Ends every refit, and closes sockets and memory. Idempotent."""
        self._close()
        return True


#: What sends for a module, and what receives for it.
_ends: weakref.WeakKeyDictionary[Any, dict[type, Any]] = weakref.WeakKeyDictionary()
_making_ends = threading.Lock()


def end_of(party: Any, *, sends: bool) -> Any:
    """What sends or receives for a module, or sends for a source: one for as long as it lives.

    Returns:
        A :class:`ModuleSender` or a :class:`ModuleReceiver`; None if the party is none of these.
    """
    if not isinstance(party, nn.Module | WeightSource if sends else nn.Module):
        return None
    model, kind = unwrapped(party), ModuleSender if sends else ModuleReceiver
    with _making_ends:  # two threads that refit a new module at once get the same end
        ends = _ends.setdefault(model, {})
        if kind not in ends:
            ends[kind] = kind(model)
        return ends[kind]


def unwrapped(model: Any) -> Any:
    """The module itself, out of what replicates or compiles it."""
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif (original := getattr(model, "_orig_mod", None)) is not None:
            model = original
        else:
            return model


def whole_tensors(model: nn.Module, *, sharded: bool = False) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, by the names that they have without compiled parts.

    Args:
        model: Whose tensors are wanted.
        sharded: DTensors may be among them.

    Raises:
        CapabilityError: A tensor is not wholly here, or is not here as it is used.
    """
    kind = type(model).__name__
    if (name := _fsdp1_in(model)) is not None:
        raise _not_whole(kind, name or "the module", "is sharded (FSDP)")
    tensors = module_tensors(model)
    for name, tensor in tensors.items():
        if hasattr(tensor, "ds_id") or (hasattr(tensor, "full_tensor") and not sharded):
            raise _not_whole(kind, name, f"is sharded ({type(tensor).__name__})")
        if tensor.is_meta:
            raise _not_whole(kind, name, "is on the meta device, so that its values are elsewhere")
    return {plain_name(name): tensor for name, tensor in tensors.items()}


def _fsdp1_in(model: nn.Module) -> str | None:
    """The name of the first part that the older FSDP shards."""
    where = "torch.distributed.fsdp.fully_sharded"
    parts: list[tuple[str, nn.Module]] = [*model.named_modules()]
    return next((n for n, part in parts if type(part).__module__.startswith(where)), None)


def plain_name(name: str) -> str:
    """The name that a module or a tensor has where no part around it is compiled or wrapped."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _without_adapters(model: nn.Module, *, sharded: bool = False) -> dict[str, torch.Tensor]:
    if hasattr(model, "peft_config"):
        raise CapabilityError(
            f"{type(model).__name__} has adapters, and the engine's model has none",
            fix=f"{install_command('rl-hf', 'lora')}, which merges them; or call merge_and_unload",
        )
    return whole_tensors(model, sharded=sharded)


def _not_whole(kind: str, name: str, why: str) -> CapabilityError:
    return CapabilityError(
        f"{kind}: {name} {why}, and a refit needs every tensor whole in this process",
        fix="shard it with fully_shard (FSDP2), or use a policy backend such as rl-hf or "
        "rl-megatron",
    )


class _Watched(GuardedSource):
    """What a refit reads of a module; it ends if the module changes, as far as torch tells."""

    def __init__(
        self,
        source: WeightSource,
        tensors: Iterable[torch.Tensor],
        rename: Rename,
        state: Callable[[], int] | None = None,
    ) -> None:
        self._watched = WatchedTensors(tensors)
        super().__init__(source, self._watched.check, rename, state)

    def close(self) -> None:
        """See :meth:`WeightSource.close`."""
        self._watched.close()
        super().close()
