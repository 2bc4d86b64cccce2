"""Names of weights that an installed plugin maps, on their way from a trainer to an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from simple_pair import Engine, InPlaceSink, blank, make_persistent, same

from rl_core.backends import PolicyRefits
from rl_core.errors import ConfigError, PluginError
from rl_core.plugins.discovery import HOOKS
from rl_core.plugins.registry import resolve
from rl_core.refit import refit
from rl_core.refit.tensors import NamedTensorSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from installed import Install

#: Writes ``module.layers.0.weight`` as the trainer calls it for ``model.layers.0.weight``.
MAPPER = """
from rl_core.plugins.hookspecs import hookimpl

@hookimpl
def weight_name_mappers(manifest):
    if manifest.name == "toy":
        return lambda name: name.replace("module.", "model.", 1)
"""


class Trainer(PolicyRefits):
    """Named tensors, under the trainer's own names."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors
        self.closed = 0

    def weight_source(self) -> NamedTensorSource:
        source = NamedTensorSource(self.tensors)
        source.close = self._count  # type: ignore[method-assign]
        return source

    def _count(self) -> None:
        self.closed += 1


Trainer.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def under(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    tensors = under("module", make_persistent(1))
    tensors["module.tied"] = next(iter(tensors.values()))
    trainer = Trainer(tensors)
    yield trainer
    trainer.close_refits()


def expected(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name.replace("module.", "model."): t for name, t in trainer.tensors.items()}


@pytest.mark.parametrize("options", [{}, {"delta": True}], ids=["direct", "delta"])
def test_a_refit_arrives_bit_for_bit_under_the_mapped_names(
    install: Install, trainer: Trainer, keep: Callable[[Any], Any], options: dict[str, Any]
) -> None:
    install.toy()
    install("rl-names", {HOOKS: {"names": "rl_names"}}, {"rl_names": MAPPER})
    trainer.manifest = resolve("toy")
    first = next(iter(expected(trainer)))
    engine = keep(Engine(blank(expected(trainer)), {"model.tied": first}, kind=InPlaceSink))
    engine.sink.tensor["model.tied"] = engine.sink.tensor[first]
    refit(trainer, engine)
    with torch.no_grad(), trainer.changes.declared():
        trainer.tensors["module.tied"].add_(1)
    report = refit(trainer, engine, **options)
    assert same(engine.sink.tensor, expected(trainer))
    assert report.tensors == (1 if options else len(expected(trainer)) - 2)  # tied, empty
    assert trainer.refit_source().persistent().keys() == expected(trainer).keys()


def test_without_a_mapper_names_and_manifest_do_not_matter(trainer: Trainer) -> None:
    assert [spec.name for spec in trainer.refit_source().specs()] == list(trainer.tensors)


def test_a_policy_that_does_not_say_its_manifest_is_refused_where_names_are_mapped(
    install: Install, trainer: Trainer
) -> None:
    install("rl-names", {HOOKS: {"names": "rl_names"}}, {"rl_names": MAPPER})
    with pytest.raises(ConfigError, match="Trainer does not say of which backend"):
        trainer.prepare_refit_info()
    assert trainer.closed == 1


def test_names_that_collide_end_the_refit_and_close_the_source(
    install: Install, trainer: Trainer
) -> None:
    install.toy()
    collide = MAPPER.replace('name.replace("module.", "model.", 1)', '"w"')
    install("rl-names", {HOOKS: {"names": "rl_names"}}, {"rl_names": collide})
    trainer.manifest = resolve("toy")
    with pytest.raises(PluginError, match=r"rl-names .* would both be called 'w'"):
        trainer.prepare_refit_info()
    assert trainer.closed == 1
