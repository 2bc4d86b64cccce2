"""Two data-parallel workers do what one does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rl_backends.policy.ranks import RankGroup
from rl_core.errors import ConfigError
from rl_core.interfaces import WorkerContext


def test_workers_without_a_port_are_refused():
    with pytest.raises(ConfigError, match="no port"):
        RankGroup(WorkerContext(rank=0, world_size=2))


def test_a_group_of_gpus_is_aborted_before_it_is_dropped():
    aborted: list[str] = []
    alone = RankGroup()
    alone.close()
    alone._messages = object()
    alone._tensors = SimpleNamespace(abort=lambda: aborted.append("tensors"))
    alone.close()
    alone.close()
    assert aborted == ["tensors"]
