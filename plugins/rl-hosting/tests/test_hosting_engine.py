"""What an engine that has just loaded a model is asked before it is taken for one that works."""

from __future__ import annotations

from typing import Any

import pytest

from rl_backends import Completion, FailedRow
from rl_core.errors import ConfigError, PluginError
from rl_hosting import Engine


class Computing(Engine):
    """A named test double: what it does with the one row is given."""

    def __init__(self, outcome: Exception | None, *, raises: bool = False) -> None:
        self._outcome, self._raises, self.reset = outcome, raises, False

    def submit(self, rows: Any) -> None:
        [self._row] = rows

    def step(self) -> list[Completion | FailedRow]:
        if self._outcome is not None and self._raises:
            raise self._outcome
        if self._outcome is not None:
            return [FailedRow(self._row.key, self._outcome)]
        return [Completion(self._row.key, [1, 2], [-1.0, -1.0], True)]

    def reset_caches(self) -> bool:
        self.reset = True
        return True

    start = cancel = call_workers = shutdown = None  # type: ignore[assignment]


@pytest.mark.parametrize("raises", [True, False], ids=["in a step", "as a row that failed"])
def test_an_engine_that_cannot_compute_is_refused(raises: bool) -> None:
    engine = Computing(RuntimeError("Unsupported attention: head_dim=16"), raises=raises)
    with pytest.raises(
        ConfigError, match=r"loaded tiny, but cannot compute .*head_dim=16"
    ) as caught:
        engine.check_rows("tiny")
    assert caught.value.fix


@pytest.mark.parametrize(
    "outcome",
    [None, PluginError("a log-prob that is not finite"), ValueError("longer than the context")],
    ids=str,
)
def test_an_engine_that_computes_is_taken(outcome: Exception | None) -> None:
    engine = Computing(outcome)
    engine.check_rows("tiny")
    assert engine.reset
