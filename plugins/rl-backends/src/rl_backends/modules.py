"""Refits of torch modules that belong to no backend: your own trainer, or your own engine.

``refit(module, generation)`` makes what is here when it is first called with a module, and keeps it
as long as the module lives. To use the two ends yourself, such as in two processes, create them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from rl_backends.spellings import SendsWeights, TakesWeights
from rl_core.errors import CapabilityError, LifecycleError
from rl_core.install import install_command
from rl_core.interfaces import WeightSource
from rl_core.plugins.hookspecs import only_answer
from rl_core.weights.receiving.receiver import RefitReceiver
from rl_core.weights.sending.sender import RefitSender
from rl_core.weights.sending.sources import GuardedSource
from rl_core.weights.tensors import NamedTensorSink, NamedTensorSource, module_tensors

if TYPE_CHECKING:
    import torch

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
    """

    def __init__(self, model: nn.Module | WeightSource, *, rename: Rename | None = None) -> None:
        model = unwrapped(model)
        self.rename = rename
        self._model = weakref.ref(model)
        name = type(model).__name__
        self._sender = RefitSender(self._source, name=name)
        self._close = weakref.finalize(model, self._sender.close)

    def shutdown(self) -> bool:
        """Ends every refit, and closes sockets and memory. Idempotent."""
        self._close()
        return True

    def _source(self) -> WeightSource:
        model = self._model()
        if model is None:
            raise LifecycleError(
                f"the module behind {self._sender.name} no longer exists",
                fix="keep a reference to the module as long as you refit from it",
            )
        if isinstance(model, WeightSource):
            return GuardedSource(model, lambda place="": None, self.rename or str)
        return _Watched(model, self.rename)


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


def whole_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, by the names that they have without compiled parts.

    Raises:
        CapabilityError: A tensor is not wholly here, or is not here as it is used.
    """
    kind = type(model).__name__
    for name, part in model.named_modules():
        if type(part).__module__.startswith("torch.distributed.fsdp.fully_sharded"):
            raise _not_whole(kind, name or "the module", "is sharded (FSDP)")
    tensors = module_tensors(model)
    for name, tensor in tensors.items():
        if hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_id"):
            raise _not_whole(kind, name, f"is sharded ({type(tensor).__name__})")
        if tensor.is_meta:
            raise _not_whole(kind, name, "is on the meta device, so that its values are elsewhere")
    return {plain_name(name): tensor for name, tensor in tensors.items()}


def plain_name(name: str) -> str:
    """The name that a module or a tensor has where no part around it is compiled or wrapped."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _without_adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    if hasattr(model, "peft_config"):
        raise CapabilityError(
            f"{type(model).__name__} has adapters, and the engine's model has none",
            fix=f"{install_command('rl-hf', 'lora')}, which merges them; or call merge_and_unload",
        )
    return whole_tensors(model)


def _not_whole(kind: str, name: str, why: str) -> CapabilityError:
    return CapabilityError(
        f"{kind}: {name} {why}, and a refit needs every tensor whole in this process",
        fix="give refit a WeightSource that gathers them (rl_backends.gathering.GatheredSource "
        "for several ranks), or a policy backend such as rl-hf or rl-megatron",
    )


class _Watched(GuardedSource):
    """What a refit reads of a module; it ends if the module changes, as far as torch tells."""

    def __init__(self, module: nn.Module, rename: Rename | None) -> None:
        known = only_answer("weight_source", module=module)
        source = known or NamedTensorSource(_without_adapters(module))
        super().__init__(source, self._check, rename or str)
        self._tensors = list(module_tensors(module).values())
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

    def _counts(self) -> list[int]:
        return [-1 if tensor.is_inference() else tensor._version for tensor in self._tensors]

    def _check(self, place: str = "") -> None:
        # All are counted once, when everything was read.
        if self._stepped or (not place and self._counts() != self._counted):
            raise LifecycleError(
                f"the module's weights changed during a refit{place}",
                fix="refit between two steps, and wait for it before the next one",
            )

    def close(self) -> None:
        """See :meth:`WeightSource.close`."""
        for hook in self._hooks:
            hook.remove()
        super().close()
