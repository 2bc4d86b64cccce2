"""Plugins that are installed for one test, and parties of a refit that are closed after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import hypothesis
import pytest
from cuda_emulation import Gpu, emulate
from installed import install
from simple_pair import Engine, Trainer, blank, make_tensors

__all__ = ["either_device", "gpu", "install", "keep", "nothing_is_left", "pair", "stack"]

# How long an example takes says more about the machine than about what is tested.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture
def keep() -> Iterator[Callable[[Any], Any]]:
    """Hands back what it is given, and closes it after the test."""
    with ExitStack() as stack:

        def keep(party: Any) -> Any:
            stack.callback(party.close)
            return party

        yield keep


@pytest.fixture
def pair(keep: Callable[[Any], Any]) -> tuple[Trainer, Engine]:
    """A trainer with every awkward kind of tensor, and an engine with zeros in their place."""
    tensors = make_tensors()
    return keep(Trainer(tensors)), keep(Engine(blank(tensors)))


@pytest.fixture
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that leaves something in this process, or a file."""
    from killable import as_it_was

    with as_it_was(monkeypatch):
        yield


@pytest.fixture
def stack(nothing_is_left: None) -> Iterator[ExitStack]:
    """Closes what enters it, the last one first, before what is left is looked for."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """The CPU, which refits take for a GPU as long as the test runs."""
    return emulate(monkeypatch)


@pytest.fixture(params=["cpu", "as on a GPU"])
def either_device(request: pytest.FixtureRequest) -> None:
    """Runs a test twice, the second time with what stands for a GPU."""
    if request.param != "cpu":
        request.getfixturevalue("gpu")
