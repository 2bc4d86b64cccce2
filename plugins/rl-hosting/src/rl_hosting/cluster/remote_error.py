"""An exception of a worker as text, and as an instance of a class that the driver knows.

Engines raise exceptions that cannot be unpickled where the engine is not installed. A worker
therefore never sends its exception: it sends a :class:`WorkerError` made of text, which is also
an instance of the nearest class of :mod:`rl_core.errors` or of the built-in exceptions.
"""

from __future__ import annotations

import builtins
import functools
import traceback
from functools import cache
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from rl_core import errors
from rl_core.errors import RLError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["encode_error", "as_text", "decode_error", "worker_error"]

P = ParamSpec("P")
T = TypeVar("T")

_SUFFIX = "InWorker"
_PLAIN = (str, int, float, bool, type(None))
#: Built-in exceptions that cannot be made from a message alone.
_SHAPED = (BaseExceptionGroup, UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)


def worker_error(error: BaseException, worker: str) -> WorkerError:
    """Makes the error that travels to the driver.

    Args:
        error: As it was caught in the worker.
        worker: The worker's name, for the message.

    Returns:
        An error with worker, class and text in its message. Its ``details`` hold
        ``worker``, ``remote_type``, ``remote_traceback`` and the details of a core error. It is
        an instance of :class:`WorkerError` and of the nearest known class of ``error``. One that
        came from another worker is returned as it is.
    """
    if isinstance(error, WorkerError):
        return error
    remote_type = f"{type(error).__module__}.{type(error).__qualname__}"
    text, fix, details = str(error), None, {}
    if isinstance(error, RLError):
        text, fix = error.message, error.fix
        details = {key: _plain(value) for key, value in error.details.items()}
    details |= {
        "worker": worker,
        "remote_type": remote_type,
        "remote_traceback": "".join(traceback.format_exception(error)),
    }
    return _rebuild(
        _known_ancestor(type(error)),
        f"{type(error).__qualname__} in {worker}: {text}",
        fix,
        details,
    )


def as_text(method: Callable[P, T]) -> Callable[P, T]:
    """Makes a method of a worker raise errors made of text, so that none of an engine is pickled.

    The worker's name is the attribute ``name`` of the method's object.
    """

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            raise worker_error(error, str(getattr(args[0], "name", "a worker"))) from None

    return guarded


def encode_error(error: BaseException, worker: str) -> list[Any]:
    """The error that :func:`worker_error` makes, as strings, numbers and lists of these.

    For engines that do not run in Ray: it fits any message format.
    """
    remote = worker_error(error, worker)
    known = next(b for b in type(remote).__mro__ if _known(b.__name__) is b)
    name = type(remote).__name__.removesuffix(_SUFFIX)
    return [name if _known(name) else known.__name__, remote.message, remote.fix, remote.details]


def decode_error(plain: list[Any]) -> WorkerError:
    """The error that :func:`encode_error` encoded; a plain WorkerError if it cannot be read."""
    try:
        name, message, fix, details = plain
        return _rebuild(str(name), str(message), fix, dict(details))
    except (TypeError, ValueError):
        return WorkerError(
            f"the engine's process sent an error that cannot be decoded: {plain!r:.200}",
            fix="report it to the backend's author: encode_error makes such errors",
        )


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if type(value) in _PLAIN else repr(value)


def _known_ancestor(cls: type[BaseException]) -> str:
    """Name of the nearest class that every process has."""
    known = (base.__name__ for base in cls.__mro__ if _known(base.__name__) is base)
    return next(known, Exception.__name__)


def _known(name: str) -> type[Exception] | None:
    """The class of a name; none that would end the process that raises it, such as SystemExit."""
    found = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, _SHAPED):
        return found
    return None


def _rebuild(name: str, message: str, fix: str | None, details: dict[str, Any]) -> WorkerError:
    known = name if _known(name) else WorkerError.__name__
    return _class_of(known)(message, fix=fix, **details)


@cache
def _class_of(name: str) -> type[WorkerError]:
    """WorkerError, combined with the named class unless one is the other's ancestor."""
    base = _known(name)
    if base is None or issubclass(WorkerError, base):
        return WorkerError
    if issubclass(base, WorkerError):
        return base

    def reduce(self: WorkerError) -> tuple[Any, ...]:
        return _rebuild, (name, self.message, self.fix, self.details)

    # The message travels as text alone, so the other class's own constructor is not run.
    namespace = {"__reduce__": reduce, "__module__": __name__, "__init__": RLError.__init__}
    return type(f"{name}{_SUFFIX}", (WorkerError, base), namespace)
