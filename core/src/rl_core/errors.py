"""Every error the product raises on purpose, split by who is at fault.

::

    RLError                            what, where, cause, and a fix
    ├── ConfigError                    yours: a key, a value or a path (also ValueError)
    ├── DataError                      yours: a batch that breaks the contract (also ValueError)
    │   └── MissingKeyError            a key that other batches have (also KeyError)
    ├── LifecycleError                 yours: a call in the wrong state (also RuntimeError)
    ├── CapabilityError                the backend does not offer this
    ├── TrainingError                  the run's: what is not finite: a loss, a gradient, a weight
    ├── CheckpointError                the file's: missing, incomplete or of another shape
    ├── PluginError                    the plugin's: names distribution and version
    │   ├── BackendNotFoundError       no installed plugin provides the name
    │   ├── AmbiguousBackendError      several plugins provide the name
    │   ├── BrokenPluginError          the plugin cannot be imported or has no valid manifest
    │   ├── IncompatiblePluginError    made for another version of the contract
    │   └── MissingEngineError         the plugin's engine is not installed, or in another version
    ├── RemoteError                    another process's
    │   ├── WorkerError                an exception in a worker, with its traceback as text
    │   └── WorkerDiedError            the worker process has ended
    ├── DeadlineError                  a wait that ran out (also TimeoutError)
    └── RefitError                     the weight transfer's: names phase and peer
        ├── ManifestMismatchError      the two sides disagree on names, shapes or dtypes
        ├── RefitProtocolError         a message that is malformed, out of order or misdirected
        ├── RefitAborted               given up before commit; the old weights still serve
        ├── RefitCorrupted             bytes that arrived are not the bytes that were sent
        ├── RefitPeerError             the other side died or went silent
        └── WeightsTornError           the weights are half old, half new; only a full refit helps

A :class:`LoopWarning` points to a loop that is legal, and most likely not what was meant.

Every class here survives pickling, so that an error raised in one process is the same error in
another.
"""

from __future__ import annotations

from functools import partial
from typing import Any

__all__ = [
    "AmbiguousBackendError",
    "BackendNotFoundError",
    "BrokenPluginError",
    "CapabilityError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DeadlineError",
    "IncompatiblePluginError",
    "LifecycleError",
    "LoopWarning",
    "ManifestMismatchError",
    "MissingEngineError",
    "MissingKeyError",
    "PluginError",
    "RLError",
    "RefitAborted",
    "RefitCorrupted",
    "RefitError",
    "RefitPeerError",
    "RefitProtocolError",
    "RemoteError",
    "TrainingError",
    "WeightsTornError",
    "WorkerDiedError",
    "WorkerError",
]


class RLError(Exception):
    """Base of all errors of the product.

    Args:
        message: What went wrong and where, in one or more lines.
        fix: What the reader can do about it; printed on a separate line.
        **details: The facts behind the message (names, indices, versions), for programs.
            Values must be picklable; keep them to strings, numbers and lists of these.
    """

    def __init__(self, message: str, *, fix: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.details = details

    def __str__(self) -> str:
        return f"{self.message}\nFix: {self.fix}" if self.fix else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), fix=self.fix, **self.details), (self.message,)


class ConfigError(RLError, ValueError):
    """A configuration key, value or path is wrong. ``details["key"]`` names it."""


class DataError(RLError, ValueError):
    """A batch breaks the data contract. ``details`` names the key and the row where known."""


class MissingKeyError(DataError, KeyError):
    """A batch lacks a key. ``details`` has ``key`` and, where there are several, ``batch``."""


class LifecycleError(RLError, RuntimeError):
    """A method was called in a state in which it is not legal."""


class CapabilityError(RLError):
    """The backend declares that it does not offer this; nothing was changed."""


class TrainingError(RLError):
    """A loss, gradient or weight is not finite, and was not used; or another rank failed."""


class CheckpointError(RLError):
    """A checkpoint is missing, incomplete or does not fit the model."""


class PluginError(RLError):
    """A plugin is at fault. ``details`` has ``distribution`` and ``version`` where known."""


class BackendNotFoundError(PluginError):
    """No installed plugin provides the requested backend."""


class AmbiguousBackendError(PluginError):
    """Several distributions provide the same backend name; ``dist:name`` picks one."""


class BrokenPluginError(PluginError):
    """The plugin's manifest or factory cannot be imported, or is not valid."""


class IncompatiblePluginError(PluginError):
    """The plugin was written for a version of the contract that this core does not support."""


class MissingEngineError(PluginError):
    """The engine behind the plugin is not installed, or its version is out of range."""


class RemoteError(RLError):
    """Something went wrong in another process."""


class WorkerError(RemoteError):
    """An exception was raised in a worker; its traceback travels as text.

    An error of this module (or a built-in one) raised in a worker arrives as an instance of both
    ``WorkerError`` and its own class, so that the same ``except`` works embedded and remote.
    """

    @property
    def remote_traceback(self) -> str:
        """The worker's traceback, formatted where it happened."""
        return str(self.details.get("remote_traceback", ""))

    @property
    def remote_type(self) -> str:
        """Qualified name of the exception's class in the worker."""
        return str(self.details.get("remote_type", ""))


class WorkerDiedError(RemoteError):
    """A worker process has ended (killed, out of memory, crashed)."""


class DeadlineError(RLError, TimeoutError):
    """A wait ran out of time. ``details`` has ``seconds`` and what was waited for."""


class RefitError(RLError):
    """A weight transfer failed. ``details`` has ``phase`` and, where known, ``peer``."""

    @property
    def phase(self) -> str:
        """The phase of the transfer that failed, such as ``"TRANSFER"``."""
        return str(self.details.get("phase", ""))

    @property
    def peer(self) -> str:
        """Who is at fault, such as ``"receiver 1"``."""
        return str(self.details.get("peer", ""))


class ManifestMismatchError(RefitError):
    """Trainer and engine disagree on the tensors; nothing was written.

    ``details`` has the lists ``missing``, ``unexpected``, ``misshaped``, ``mistyped`` and
    ``duplicate`` of tensor names.
    """


class RefitProtocolError(RefitError):
    """A message is malformed, too large, out of order or not for this session."""

    def __init__(self, message: str, *, fix: str | None = None, **details: Any) -> None:
        super().__init__(message, fix=fix or "install the same rl-core on both sides", **details)


class RefitAborted(RefitError):
    """The transfer was given up before anything was written; the old weights still serve."""


class RefitCorrupted(RefitError):
    """What arrived is not what was sent, or what was installed is not what arrived."""


class RefitPeerError(RefitError):
    """The other side died, hung or refused."""


class WeightsTornError(RefitError):
    """The engine's weights are partly old and partly new; only a full refit makes them whole."""


class LoopWarning(UserWarning):
    """A training loop that is legal, and most likely not what was meant.

    Issued once for each policy or engine, not once for each call. A loop that means it calls
    ``warnings.simplefilter("ignore", rl_core.LoopWarning)``.
    """
