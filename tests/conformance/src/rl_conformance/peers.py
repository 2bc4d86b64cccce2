"""Backends in processes of their own, which can be killed.

A peer is ``python -m rl_conformance.peers``, driven by lines of JSON over two pipes; nothing that
crosses is unpickled on either side.
"""

from __future__ import annotations

import base64
import concurrent.futures
import dataclasses
import json
import os
import signal
import subprocess
import sys
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Self
from unittest import mock

import torch

from rl_conformance.batches import pad_rows
from rl_conformance.faults import kill_engine_at
from rl_conformance.settings import Settings
from rl_conformance.target import Target
from rl_core.batch import BatchedDataDict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rl_conformance.context import Context

__all__ = ["PeerGoneError", "RemoteGeneration", "RemotePolicy"]

#: Seconds within which a peer must start or answer; the deadlines of checks are shorter.
_ANSWER_S = 3600.0


class PeerGoneError(Exception):
    """The peer's process ended."""


class _Peer:
    """A backend in another process.

    Args:
        ctx: Names the backend.
        kind: ``"generation"`` or ``"policy"``.
        config: Its configuration.
    """

    def __init__(self, ctx: Context, kind: str, config: dict[str, Any]) -> None:
        reference = kind not in ctx.manifest.kinds or not ctx.target.installed
        name = "" if reference else ctx.target.name
        ctx.workshop.built[kind] += 1
        spec = {
            "backend": name,
            "kind": kind,
            "settings": dataclasses.asdict(ctx.settings),
            "config": config,
        }
        to_read, to_write = os.pipe(), os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(to_read[0]), str(to_write[1])],
            pass_fds=(to_read[0], to_write[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(to_read[0])
        os.close(to_write[1])
        self._out, self._in = os.fdopen(to_read[1], "w"), os.fdopen(to_write[0])
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self.call(**spec)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, **command: Any) -> Any:
        """The peer's answer; an error of the peer is raised here."""
        return self.begin(**command).result(_ANSWER_S)

    def begin(self, **command: Any) -> concurrent.futures.Future[Any]:
        """A future of the peer's answer."""
        return self._pool.submit(self._exchange, command)

    def _exchange(self, command: dict[str, Any]) -> Any:
        try:
            print(json.dumps(command), file=self._out, flush=True)
        except BrokenPipeError as error:
            raise PeerGoneError("the peer ended") from error
        line = self._in.readline()
        if not line:
            raise PeerGoneError("the peer ended without an answer")
        answer = json.loads(line)
        if "error" in answer:
            import rl_core.errors

            kind = getattr(rl_core.errors, answer["error"], RuntimeError)
            raise kind(answer["message"])
        return answer["value"]

    def close(self) -> None:
        """Kills the process, if it is still there."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(_ANSWER_S)
        self._pool.shutdown()
        for stream in (self._in, self._out, self.process.stderr):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue


class RemoteGeneration(_Peer):
    """A generation backend in its own process, awake, with the methods that a refit calls."""

    def __init__(self, ctx: Context, **config: Any) -> None:
        if ctx.settings.url is not None:
            ctx.not_run(
                "this check needs an engine that the suite starts, not a server",
                excused=True,
            )
        config = {"model_name": str(ctx.model()), "max_new_tokens": 8, **config}
        super().__init__(ctx, "generation", config)

    @property
    def weights_version(self) -> int:
        """See :class:`rl_core.interfaces.GenerationInterface`."""
        return int(self.call(do="version"))

    def prepare_refit_info(self, info: dict[str, Any]) -> None:
        """See :class:`rl_core.interfaces.GenerationInterface`."""
        self.call(do="prepare", info=info)

    def receive_weights(self, **options: Any) -> list[concurrent.futures.Future[Any]]:
        """See :class:`rl_core.interfaces.GenerationInterface`."""
        return [self.begin(do="receive", options=options)]

    def init_collective(
        self, *group: Any, train_world_size: int = 1
    ) -> list[concurrent.futures.Future[Any]]:
        """See :class:`rl_core.interfaces.GenerationInterface`."""
        return [self.begin(do="join", group=group, trainers=train_world_size)]

    def update_weights_from_collective(
        self, info: Any = None, **options: Any
    ) -> list[concurrent.futures.Future[Any]]:
        """See :class:`rl_core.interfaces.GenerationInterface`."""
        options = {"info": info, **options}
        return [self.begin(do="receive", options=options, method="update_weights_from_collective")]

    def digests(self) -> dict[str, list[str]]:
        """Dtype and digest of every tensor that is installed."""
        found: dict[str, list[str]] = self.call(do="digests")
        return found

    def die_at(self, method: str, count: int) -> list[int]:
        """Kills with SIGKILL at the given call of a method of its sink; which processes."""
        pids: list[int] = self.call(do="kill_engine", method=method, count=count)
        return pids

    def generate(self, data: BatchedDataDict[Any], greedy: bool) -> BatchedDataDict[Any]:
        """See :class:`rl_core.interfaces.GenerationInterface`; only the keys that are compared."""
        lengths = data["input_lengths"].tolist()
        rows = [row[:n] for row, n in zip(data["input_ids"].tolist(), lengths, strict=True)]
        answer = self.call(do="generate", rows=rows, greedy=greedy)
        return BatchedDataDict({key: torch.tensor(value) for key, value in answer.items()})


class RemotePolicy(_Peer):
    """A policy in its own process, with the methods that a refit calls."""

    def __init__(self, ctx: Context, **config: Any) -> None:
        super().__init__(ctx, "policy", {"model_name": str(ctx.model()), **config})

    def prepare_refit_info(self) -> dict[str, Any]:
        """See :class:`rl_core.interfaces.ColocatablePolicyInterface`."""
        info: dict[str, Any] = self.call(do="info")
        return info

    def send_weights(self, **options: Any) -> list[concurrent.futures.Future[Any]]:
        """See :class:`rl_core.interfaces.ColocatablePolicyInterface`."""
        return [self.begin(do="stream", options=options)]

    def die_at(self, method: str, count: int) -> None:
        """Kills the process with SIGKILL at the given call of a method of its source.

        Where the method is ``tensors``, at the tensor of that number.
        """
        self.call(do="die", method=method, count=count)


# -- the peer's side ---------------------------------------------------------------------------


def _serve(commands: IO[str], answers: IO[str]) -> None:
    backend: Any = None
    for line in commands:
        command = json.loads(line)
        try:
            if backend is None:
                backend = _build(command)
                answer: dict[str, Any] = {"value": None}
            else:
                answer = {"value": _ACTIONS[command.pop("do")](backend, **command)}
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}

        def plain(value: Any) -> str:
            return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)

        print(json.dumps(answer, default=plain), file=answers, flush=True)


def _build(spec: dict[str, Any]) -> Any:
    from rl_conformance.reference import reference_target

    kind = spec["kind"]
    target = Target.find(spec["backend"]) if spec["backend"] else reference_target()
    base = target.base_config(kind, Settings(**spec["settings"]))
    backend = getattr(target, f"make_{kind}")(base | spec["config"])
    if kind == "generation":
        backend.prepare_for_generation()
    return backend


def _generate(backend: Any, rows: list[list[int]], greedy: bool) -> dict[str, Any]:
    output = backend.generate(pad_rows(rows), greedy=greedy)
    return {k: v.tolist() for k, v in output.items() if isinstance(v, torch.Tensor)}


def _wait(futures: list[Any], deadline_s: float) -> Any:
    from rl_core.futures import wait

    return wait(futures, deadline_s + 10)[0]


def _transfer(backend: Any, options: dict[str, Any], method: str = "receive_weights") -> Any:
    futures = getattr(backend, method)(**options)
    return _wait(futures, float(options.get("deadline_s", _ANSWER_S)))


def _join(backend: Any, group: list[Any], trainers: int) -> None:
    _wait(backend.init_collective(*group, train_world_size=trainers), _ANSWER_S)


def _digests(backend: Any) -> dict[str, list[str]]:
    from rl_conformance.weights import digests, engine_weights

    return digests(engine_weights(backend))


def _die(backend: Any, method: str, count: int) -> None:
    """Puts a SIGKILL into a method of the backend's source, or between two tensors."""
    calls = iter(range(1 << 30))
    source = type(backend.weight_source())
    original = getattr(source, method)

    def perhaps() -> None:
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(*args: Any, **kwargs: Any) -> Any:
        perhaps()
        return original(*args, **kwargs)

    def dying_source(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for item in original(*args, **kwargs):
            perhaps()
            yield item

    fault = dying_source if method == "tensors" else dying
    mock.patch.object(source, method, fault).start()
    if method == "tensors":  # what would bypass it is switched off
        mock.patch.object(source, "pieces", return_value=None).start()


_ACTIONS: dict[str, Callable[..., Any]] = {
    "version": lambda backend: backend.weights_version,
    "prepare": lambda backend, info: backend.prepare_refit_info(info),
    "receive": _transfer,
    "join": _join,
    "digests": _digests,
    "generate": _generate,
    "info": lambda backend: backend.prepare_refit_info(),
    "stream": partial(_transfer, method="send_weights"),
    "die": _die,
    "kill_engine": kill_engine_at,
}


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1])) as given, os.fdopen(int(sys.argv[2]), "w") as taken:
        _serve(given, taken)
