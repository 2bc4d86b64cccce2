"""Random numbers of one owner."""

from __future__ import annotations

import base64
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence


class RandomStream:
    """Torch's random numbers for one owner, independent of everybody else's in the process.

    Args:
        seed: Where the stream starts.
        device: Its generator belongs to the stream, besides the CPU's.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        generators = [torch.Generator(), *map(torch.Generator, self._devices)]
        self._states = [generator.manual_seed(seed).get_state() for generator in generators]

    @contextmanager
    def drawn(self) -> Generator[None]:
        """Random numbers come from the stream, which moves on."""
        with self.kept():
            self._write(self._states)
            try:
                yield
            finally:
                self._states = self._read()

    @contextmanager
    def kept(self) -> Generator[None]:
        """Nobody's random state moves: torch's is restored afterwards."""
        with torch.random.fork_rng(devices=self._devices):
            yield

    def state(self) -> dict[str, list[str]]:
        """Where the stream is, and where torch's own numbers are, for a checkpoint."""
        return {"stream": _encode(self._states), "process": _encode(self._read())}

    def set_state(self, state: Mapping[str, Sequence[str]]) -> None:
        """Goes where :meth:`state` was, torch's own numbers too.

        Devices that the state does not know go on as they are.
        """
        self._states = _decode(state["stream"], self._states)
        self._write(_decode(state["process"], self._read()))

    def _read(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]

    def _write(self, states: Sequence[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)


def _encode(states: Sequence[torch.Tensor]) -> list[str]:
    return [base64.b64encode(state.numpy().tobytes()).decode() for state in states]


def _decode(texts: Sequence[str], before: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    states = [torch.frombuffer(bytearray(base64.b64decode(t)), dtype=torch.uint8) for t in texts]
    return [*states, *before[len(states) :]][: len(before)]
