"""The last calls that a check made of its backends, in words, for the message of a failure."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from unittest import mock

from rl_core.interfaces import ColocatablePolicyInterface, GenerationInterface

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

__all__ = ["calls_made", "forget_calls", "made_with", "noted", "watch_calls"]

#: So many of the last calls are kept, each with what its backend was made with.
_CALLS: deque[tuple[str, str]] = deque(maxlen=4)
_MADE_WITH: dict[int, str] = {}
_METHODS = {
    name
    for interface in (GenerationInterface, ColocatablePolicyInterface)
    for name, _ in inspect.getmembers(interface, inspect.isfunction)
    if not name.startswith("_") and name != "invalidate_kv_cache"  # which a refit calls
}
#: What every batch has, and what is of no use in a message.
_USUAL = {"input_ids", "input_lengths", "token_mask", "sample_mask", "backend", "model_name"}
_WORDS = {"generation": "engine", "policy": "policy"}
_inside = threading.local()


def forget_calls() -> None:
    """Begins anew, for the next check."""
    _CALLS.clear()


def calls_made() -> str:
    """The last calls, in order, after what their backend was made with."""
    groups: dict[int, list[str]] = {}
    seen, last = set[str](), None
    for number, (call, backend) in enumerate(tuple(_CALLS)):  # other threads add to it
        if backend != last:
            name = f"the same {backend.partition('(')[0]}" if backend in seen else backend
            groups[number], last = [f"{name}: {call}" if name else call], backend
            seen.add(backend)
        elif call not in groups[max(groups)][-1:]:
            groups[max(groups)].append(call)
    return "; ".join(", then ".join(calls) for calls in groups.values())


def made_with(backend: object, kind: str, config: Mapping[str, Any], *, own: bool) -> None:
    """Remembers the configuration of a backend; ``own`` if it is the suite's reference."""
    if _CALLS and _CALLS[-1][0].startswith("create_"):
        _CALLS.pop()  # that was this backend
    with suppress(TypeError):  # of a class without weak references
        weakref.finalize(backend, _MADE_WITH.pop, id(backend), None).atexit = False
    owner = "the suite's own " if own else ""
    _MADE_WITH[id(backend)] = f"{owner}{_WORDS[kind]}({_arguments((), config)})"


@contextmanager
def noted(backend: object, name: str, *args: Any, **options: Any) -> Generator[None]:
    """Keeps a call, and none of those that are made within it in this thread."""
    depth = getattr(_inside, "depth", 0)
    if not depth:
        _CALLS.append((f"{name}({_arguments(args, options)})", _MADE_WITH.get(id(backend), "")))
    _inside.depth = depth + 1
    try:
        yield
    finally:
        _inside.depth = depth


def watch_calls(backend: object, patch: Callable[[Any], object]) -> None:
    """Keeps the calls of a backend's class.

    Args:
        backend: Of that class.
        patch: Enters the patch of a method, and undoes it when the run ends.
    """
    for name in _METHODS:
        owner = next((each for each in type(backend).__mro__ if name in vars(each)), None)
        method = vars(owner)[name] if owner else None
        if inspect.isfunction(method) and not hasattr(method, "_watched"):
            patch(mock.patch.object(owner, name, _watched(method, name)))


def _watched(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(backend: Any, *args: Any, **options: Any) -> Any:
        with noted(backend, name, *args, **options):
            return method(backend, *args, **options)

    call._watched = True  # type: ignore[attr-defined]
    return call


def _arguments(args: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    named = [f"{key}={_short(each)}" for key, each in options.items() if key not in _USUAL]
    return ", ".join([*map(_short, args), *named])


def _short(value: Any) -> str:
    """A value in a few words; of a batch its rows and its unusual columns."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str) and value.startswith("/"):
        value = f".../{value.rpartition('/')[2]}"
    if isinstance(value, str | int | float | list | tuple | None):
        text = repr(value)
    elif hasattr(value, "keys") and "input_lengths" in value:
        lengths = value["input_lengths"].tolist()
        extra = _arguments((), dict(value))
        of = f" of {', '.join(map(str, lengths))} tokens" if 0 < len(lengths) <= 8 else ""
        return f"{len(lengths)} rows{of}" + (f" with {extra}" if extra else "")
    elif isinstance(value, dict):
        text = ", ".join(f"{key}: {_short(each)}" for key, each in value.items()).join("{}")
    else:
        text = getattr(value, "__name__", type(value).__name__)
    return text if len(text) <= 80 else f"{text[:70]} ..."
