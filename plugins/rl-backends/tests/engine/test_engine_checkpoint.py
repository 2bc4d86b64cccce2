"""A model that is no directory is looked up in the cache and at the hub, and nobody waits long."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from rl_backends.engine import checkpoint
from rl_backends.engine.checkpoint import check_checkpoint, check_positions
from rl_core.errors import ConfigError


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that never answers, and an empty cache."""
    from huggingface_hub import HfApi, constants

    gone = threading.Event()

    def hang(*args, **kwargs):
        gone.wait()

    monkeypatch.setattr(checkpoint, "_HUB_S", 0.1)
    monkeypatch.setattr(HfApi, "model_info", hang)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(constants, name, str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    yield
    gone.set()


@pytest.mark.parametrize(
    ("variable", "says"), [(None, "did not answer"), ("TRANSFORMERS_OFFLINE", "forbids downloads")]
)
def test_a_name_that_cannot_be_looked_up_is_told_at_once(variable, says, hub, monkeypatch):
    if variable:
        monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError, match=f"neither a directory nor in the cache.*{says}"):
        check_checkpoint("nobody/nothing", "auto", without_weights="")


def test_a_hub_that_has_no_such_model_is_quoted(hub, monkeypatch):
    from httpx import Request, Response
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    def refuse(*args, **kwargs):
        raise RepositoryNotFoundError("401", response=Response(401, request=Request("GET", "h:")))

    monkeypatch.setattr(HfApi, "model_info", refuse)
    with pytest.raises(ConfigError, match="has no such model"):
        check_checkpoint("nobody/nothing", "auto", without_weights="")


def test_a_context_in_which_rows_have_two_kinds_of_positions_is_refused():
    positions = {"rope_type": "longrope", "original_max_position_embeddings": 16}
    text = SimpleNamespace(rope_parameters=positions)
    check_positions(text, 16)
    with pytest.raises(ConfigError, match="set max_model_len to 16"):
        check_positions(text, 17)
    check_positions(SimpleNamespace(rope_parameters=positions | {"rope_type": "yarn"}), 17)
