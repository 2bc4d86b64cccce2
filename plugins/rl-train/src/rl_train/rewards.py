"""Reward functions with TRL's signature, called in processes that are ended at a deadline."""

from __future__ import annotations

import ast
import asyncio
import inspect
import math
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, Self, TypeAlias, TypedDict

import cloudpickle
from pebble import ProcessExpired, ProcessPool

from rl_core.config import Range, check_config, nearest
from rl_core.errors import ConfigError, LifecycleError, RLError
from rl_train.data import import_function
from rl_train.shipped import SHIPPED

if TYPE_CHECKING:
    import torch

__all__ = ["SHIPPED", "Grades", "RewardConfig", "RewardError", "Rewards"]

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Arguments that are no columns of the data.
_OF_RUN = ("prompts", "completions", "completion_ids")

#: Keywords of one call: lists of one length.
Given: TypeAlias = dict[str, Any]


class RewardConfig(TypedDict):
    """One reward function.

    Attributes:
        function: ``module:name``, ``file.py:name``, or ``math``, ``exact``, ``format``, ``gsm8k``
            or ``overlong``, see :mod:`rl_train.shipped`.
        weight: Factor of its rewards in the sum. Default 1.0.
        name: Its name in metrics. Default: the function's name.
        options: Further keyword arguments of the function. Default none.
        columns: Columns for parameters with other names: ``{solution: answer}`` passes the column
            ``answer`` as ``solution``. Default none.
    """

    function: str
    weight: NotRequired[Annotated[float, Range()]]
    name: NotRequired[str | None]
    options: NotRequired[dict[str, Any]]
    columns: NotRequired[dict[str, str]]


class RewardError(RLError, RuntimeError):
    """A reward function or an environment failed. ``details`` has ``function`` and ``rows``."""


@dataclass(frozen=True, slots=True)
class Grades:
    """The rewards of some rows.

    Attributes:
        total: ``[B]`` float32 weighted sum; 0 where no function gives a reward.
        each: For each function ``[B]`` float32 rewards, without weight; NaN where it gave none.
        timed_out: For each function how many rows have none because of the deadline.
    """

    total: torch.Tensor
    each: dict[str, torch.Tensor]
    timed_out: dict[str, int]


class Rewards:
    """Reward functions that are called together, until :meth:`close`.

    A function is called as ``f(prompts=..., completions=..., completion_ids=..., **columns)``, with
    those of these arguments that it has parameters for. It returns a list with a number or None for
    each row. Consecutive rows of one prompt are in one call. Calls are spread over processes, which
    do not share a function's global state. An async function gets one process, in which the calls
    for all prompts run at the same time.

    Args:
        functions: Names, configurations (see :class:`RewardConfig`) or functions.
        weights: One for each function; overrides ``weight``.
        workers: Number of processes. 0 calls each function once for all rows, in a thread of this
            process: for functions that cannot be sent to another, or hold a model. Default: one for
            each CPU core, at most 8.
        deadline_s: Seconds that one call may take. The rows of a longer one get None and are
            counted, and its process is ended; a thread cannot be ended and is left alone.

    Attributes:
        names: Of the functions, in their order.

    Raises:
        ConfigError: There is no such function or option, or a function cannot be sent to a process.
    """

    def __init__(
        self,
        functions: Sequence[str | Mapping[str, Any] | Callable[..., Any]],
        weights: Sequence[float] | None = None,
        *,
        workers: int | None = None,
        deadline_s: float = 30.0,
    ) -> None:
        if not functions or (weights is not None and len(weights) != len(functions)):
            raise ConfigError(
                f"rewards: the number of functions is {len(functions)}, that of weights is "
                f"{len(weights or ())}",
                fix="give at least one function, and either no weights or one for each function",
                key="rewards",
            )
        self._functions = [_Function.make(each) for each in functions]
        for each in self._functions:
            if inspect.isclass(each.load()):
                raise ConfigError(
                    f"rewards: {each.name!r} is a class, not a function",
                    fix=f"make an instance, such as score = {each.name}(...), and give that",
                    key="function",
                )
        self._weights = list(weights or [function.weight for function in self._functions])
        self.names = [function.name for function in self._functions]
        if twice := {name for name in self.names if self.names.count(name) > 1}:
            raise ConfigError(
                f"rewards: several functions have the name {min(twice)!r}",
                fix="set another 'name' for one of them",
                key="name",
            )
        self._workers = min(8, len(os.sched_getaffinity(0))) if workers is None else workers
        self._deadline_s = deadline_s
        self._pickled = [each.pickled() for each in self._functions] if self._workers else []
        self._pool: ProcessPool | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes; nothing can be graded afterwards."""
        self._closed = True
        self._end_processes()

    def _end_processes(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            with suppress(TimeoutError):  # what is left ends with this process
                self._pool.join(10)
            self._pool = None

    def check(self, columns: Sequence[str], where: str) -> None:
        """Checks that the functions can be called with the columns of some rows.

        Raises:
            ConfigError: A function needs a column that there is not.
        """
        for function in self._functions:
            function.choose(_given((), (), (), dict.fromkeys(columns, ())), where)

    def grade(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> Grades:
        """The rewards of completions.

        Args:
            prompts: ``B`` texts or conversations.
            completions: ``B`` texts, or lists of messages. A text that completes a conversation is
                passed on as a message of the assistant.
            completion_ids: The tokens of each completion.
            columns: Columns of the data, with a value for each row.

        Returns:
            Rewards in the order of the rows.

        Raises:
            RewardError: A function failed, or did not return a finite number or None for each row.
            ConfigError: A function needs a column that there is not.
            LifecycleError: After :meth:`close`.
        """
        import torch

        if self._closed:
            raise LifecycleError("these Rewards were closed", fix="build new Rewards")
        began = time.monotonic()
        given = _given(prompts, completions, completion_ids, columns or {})
        chosen = [function.choose(given) for function in self._functions]
        rows = range(len(prompts))
        groups = [list(rows)]
        if self._workers:
            groups = [list(group) for _, group in groupby(rows, lambda row: prompts[row])]
        calls: list[tuple[int, list[list[int]], list[Given], Future[Any]]] = []
        each = torch.full((len(self.names), len(rows)), math.nan)
        timed_out = dict.fromkeys(self.names, 0)
        try:
            for index, function in enumerate(self._functions if rows else ()):
                for part in [groups] if function.is_async else [[group] for group in groups]:
                    given_to = [
                        {key: [value[row] for row in group] for key, value in chosen[index].items()}
                        for group in part
                    ]
                    calls.append((index, part, given_to, self._start(index, given_to)))
            for index, part, given_to, call in calls:
                results = self._result(index, given_to, call, began)
                for group, result in zip(part, results, strict=True):
                    if result is None:
                        timed_out[self.names[index]] += len(group)
                    elif isinstance(result, _Failure):
                        name, last = self.names[index], group[-1]
                        where = f"row {last}" if len(group) == 1 else f"rows {group[0]} to {last}"
                        raise RewardError(
                            f"reward function {name!r}, {where} (prompt {prompts[last]!r:.100}): "
                            f"{result.text}",
                            fix="correct the function; it returns a list with a finite number, or "
                            "None, for each completion",
                            function=name,
                            rows=group,
                            traceback=result.traceback,
                        )
                    else:
                        values = [math.nan if value is None else value for value in result]
                        each[index, group] = torch.tensor(values)
        finally:
            for *_, call in calls:
                call.cancel()
        total = each.nan_to_num(nan=0.0).mul(torch.tensor(self._weights)[:, None]).sum(0)
        by_name = dict(zip(self.names, each.unbind(0), strict=True))
        return Grades(total, by_name, timed_out)

    def _start(self, index: int, parts: list[Given]) -> Future[Any]:
        if not self._workers:
            future: Future[Any] = Future()
            function = self._functions[index].bound()

            def call() -> None:
                with suppress(InvalidStateError):  # its caller waits no longer
                    future.set_result(_call(function, parts, self._deadline_s))

            threading.Thread(target=call, daemon=True).start()
            return future
        if self._pool is not None and not self._pool.active:  # its processes were killed
            self._end_processes()
        if self._pool is None:
            self._pool = ProcessPool(
                self._workers,
                initializer=_begin,
                initargs=[self._pickled],
                context=multiprocessing.get_context("spawn"),
            )
        # One that awaits ends its calls itself; one that blocks its loop has to be ended.
        patience = 2 if self._functions[index].is_async else 1
        how = (index, parts, self._deadline_s)
        started: Future[Any] = self._pool.schedule(
            _call, args=how, timeout=patience * self._deadline_s
        )
        return started

    def _result(
        self, index: int, parts: list[Given], call: Future[Any], began: float, again: bool = True
    ) -> list[Any]:
        wait = None if self._workers else max(0.0, began + self._deadline_s - time.monotonic())
        try:
            result: list[Any] = call.result(wait)
            return result
        except TimeoutError:
            return [None] * len(parts)
        except ProcessExpired as error:
            if again:  # it may have been killed for the memory that an earlier call took
                return self._result(index, parts, self._start(index, parts), began, False)
            why = f"({error}) twice; it was killed, ran out of memory, or called exit"
        except BrokenProcessPool as error:
            why = f"({error}); a script that makes Rewards needs 'if __name__ == \"__main__\":'"
        return [_Failure(f"its process has ended {why}")] * len(parts)


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str
    traceback: str = ""


@dataclass(frozen=True)
class _Function:
    """A function as a process is sent it."""

    name: str
    source: str | Callable[..., Any]
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)

    @classmethod
    def make(cls, given: str | Mapping[str, Any] | Callable[..., Any]) -> _Function:
        if callable(given):
            plain = given.func if isinstance(given, partial) else given
            return cls(getattr(plain, "__name__", type(plain).__name__), given)
        config = check_config(
            RewardConfig, {"function": given} if isinstance(given, str) else given, what="rewards"
        )
        source = config["function"]
        if source not in SHIPPED and ":" not in source:
            match = nearest(source, SHIPPED)
            fix = f"write {match!r}" if match else "write one of these, module:name or file.py:name"
            if source.endswith(".py"):
                with suppress(OSError, SyntaxError):  # reported once a function is named
                    body = ast.parse(Path(source).read_bytes()).body
                    names = [each.name for each in body if isinstance(each, _DEFINITIONS)]
                    fix = f"write {' or '.join(f'{source}:{name}' for name in names)}"
            raise ConfigError(
                f"rewards: there is no function {source!r}; the built-in ones are "
                f"{', '.join(SHIPPED)}",
                fix=fix,
                key="function",
            )
        if source.partition(":")[0].endswith(".py"):
            source = os.path.abspath(source)
        name = config.get("name") or source.rpartition(":")[2]
        weight, options = config.get("weight", 1.0), config.get("options", {})
        made = cls(name, source, weight, options, config.get("columns", {}))
        takes, takes_all = made.takes
        unknown = [key for key in [*made.options, *made.columns] if key not in takes]
        if unknown and not takes_all:
            match = nearest(unknown[0], takes)
            raise ConfigError(
                f"rewards: {name!r} takes no {unknown[0]!r}; it takes {', '.join(takes)}",
                fix=f"write {match!r}" if match else "remove it",
                key=unknown[0],
            )
        return made

    def load(self) -> Callable[..., Any]:
        """The function itself, without its options."""
        if not isinstance(self.source, str):
            return self.source
        return SHIPPED.get(self.source) or import_function(self.source, key="rewards.function")

    def bound(self) -> Callable[..., Any]:
        return partial(self.load(), **self.options) if self.options else self.load()

    def pickled(self) -> bytes:
        try:
            return bytes(cloudpickle.dumps(self))
        except Exception as error:
            raise ConfigError(
                f"rewards: {self.name!r} cannot be sent to a worker process: {error}",
                fix="set workers to 0, or remove that object from the function",
                key="function",
            ) from error

    @property
    def takes(self) -> tuple[dict[str, bool], bool]:
        """Its parameters, with whether each is needed; and whether it takes any other."""
        parameters = inspect.signature(self.load()).parameters.values()
        named = {
            p.name: p.default is p.empty
            for p in parameters
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        return named, any(p.kind is p.VAR_KEYWORD for p in parameters)

    @property
    def is_async(self) -> bool:
        function = self.load()
        plain = function.func if isinstance(function, partial) else function
        return any(map(inspect.iscoroutinefunction, (plain, type(plain).__call__)))

    def choose(self, given: Given, where: str = "data") -> Given:
        """The keywords that it is called with, for rows of the section ``where``."""
        takes, takes_all = self.takes
        renamed = {key: given[name] for key, name in self.columns.items() if name in given}
        usable = {**given, **renamed, **self.options}
        missing = [name for name in self.columns.values() if name not in given]
        missing += [key for key, needed in takes.items() if needed and key not in usable]
        if missing:
            columns = [name for name in given if name not in _OF_RUN]
            column = nearest(missing[0], columns) or "COLUMN"
            # A file needs the place of the function; an object has none.
            named = "..."
            if isinstance(self.source, str):
                named = self.source.replace(f"{os.getcwd()}/", "")
            raise ConfigError(
                f"reward function {self.name!r} needs {missing[0]!r}, which is neither a column "
                f"nor an option; the columns of {where} are {', '.join(columns) or 'none'}",
                fix=f"write rewards: [{{function: {named}, columns: {{{missing[0]}: {column}}}}}] "
                "with a column of the data, or set its 'options'"
                if where == "data"
                else f"give these rows a column {missing[0]!r}, as the rows of data have",
                key=missing[0],
            )
        chosen = {
            key: value
            for key, value in usable.items()
            if key not in self.options and (takes_all or key in takes)
        }
        if not chosen:
            raise ConfigError(
                f"reward function {self.name!r} takes none of {', '.join(given)}",
                fix="give it a parameter 'completions'",
                key=self.name,
            )
        return chosen


def _given(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]] | None,
    columns: Mapping[str, Sequence[Any]],
) -> Given:
    messages = [
        [{"role": "assistant", "content": text}]
        if isinstance(prompt, list) and isinstance(text, str)
        else text
        for prompt, text in zip(prompts, completions, strict=False)
    ]
    own = ("prompt", "completion", "completion_ids")  # as TRL, which leaves these columns out
    given = {key: value for key, value in columns.items() if key not in own}
    given |= {"prompts": prompts, "completions": messages}
    if completion_ids is not None:
        given["completion_ids"] = completion_ids
    given = {k: v.tolist() if hasattr(v, "tolist") else list(v) for k, v in given.items()}
    lengths = {**{key: len(value) for key, value in given.items()}, "completions": len(completions)}
    if wrong := [key for key, length in lengths.items() if length != len(prompts)]:
        raise ConfigError(
            f"rewards: the number of prompts is {len(prompts)}, but that of {wrong[0]} is "
            f"{lengths[wrong[0]]}",
            fix=f"give one of the {wrong[0]} for each prompt",
            key=wrong[0],
        )
    return given


_LOADED: list[Any] = []


def _begin(pickled: list[bytes]) -> None:
    """A worker process begins: it loads all functions, so that no deadline counts that."""
    import fcntl

    parent = multiprocessing.parent_process()
    assert parent is not None
    # The kernel sends SIGIO, which ends this process, when the pipe closes: also where the parent
    # was killed, and where a function holds Python's lock.
    pipe = int(parent.sentinel)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():  # since before that
        os._exit(1)
    for each in pickled:
        try:
            _LOADED.append(cloudpickle.loads(each).bound())
        except Exception as error:
            _LOADED.append(_Failure(f"cannot be loaded in a worker process: {error!r}"))


def _call(called: Callable[..., Any] | int, parts: list[Given], deadline_s: float) -> list[Any]:
    """For each part its rewards, a failure, or None if its time ran out.

    Args:
        called: The function; in a worker its number.
        parts: Keywords of one call each.
        deadline_s: Of each call; it ends calls of async functions alone.
    """
    function = _LOADED[called] if isinstance(called, int) else called
    if isinstance(function, _Failure):
        return [function] * len(parts)

    async def awaited(part: Given, started: Any) -> Any:
        try:
            async with asyncio.timeout(deadline_s) as limit:
                return _checked(await started, part)
        except (Exception, SystemExit) as error:
            return None if limit.expired() else _failure(error)

    async def all_at_once(first: Any) -> list[Any]:
        calls = [first, *(function(**part) for part in parts[1:])]
        return await asyncio.gather(*map(awaited, parts, calls))

    results: list[Any] = []
    for part in parts:
        try:
            returned = function(**part)
            if inspect.isawaitable(returned):
                return asyncio.run(all_at_once(returned))
            results.append(_checked(returned, part))
        except (Exception, SystemExit) as error:
            results.append(_failure(error))
    return results


def _failure(error: BaseException) -> _Failure:
    within = error.__traceback__.tb_next if error.__traceback__ else None
    lines = traceback.format_exception(type(error), error, within)
    *_, last = lines
    return _Failure(last.strip() + "\n" + "".join(lines[-4:-1]).rstrip(), "".join(lines))


def _checked(values: Any, part: Given) -> list[float | None] | _Failure:
    """Rewards as numbers, if there is one for each row."""
    rows = len(part["completions"] if "completions" in part else next(iter(part.values())))
    if isinstance(values, str | Mapping) or not hasattr(values, "__len__"):
        return _Failure(f"returned {values!r:.100} ({type(values).__name__}), not a list")
    if len(values) != rows:
        return _Failure(f"returned a list of {len(values)}, but the completions are {rows}")
    rewards: list[float | None] = []
    for row, value in enumerate(values):
        try:
            number = None if value is None else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(value, str) or (number is not None and not math.isfinite(number)):
            shown = f"{value!r:.100} ({type(value).__name__})"
            return _Failure(f"returned {shown} as reward {row} of {rows}, not a finite number")
        rewards.append(number)
    return rewards
