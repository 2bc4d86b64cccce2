"""Test classes to derive from: ``class TestMine(GenerationConformance): backend = "mine"``.

The methods are made from the catalogue. They cannot be overridden: what a backend may not change
is what it is checked against.
"""

from __future__ import annotations

import re
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, ClassVar

from rl_conformance.registry import Check, checks_of
from rl_conformance.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

__all__ = [
    "AgreementConformance",
    "Conformance",
    "GenerationConformance",
    "PolicyConformance",
    "RefitConformance",
]


class _Suite:
    """Makes a test of every check and refuses to lose one."""

    __test__ = False
    #: Name of the backend, as ``rl backends list`` shows it.
    backend: ClassVar[str] = ""
    #: Overrides ``--rl-device``.
    device: ClassVar[str | None] = None
    #: Overrides ``--rl-dtype``.
    dtype: ClassVar[str | None] = None

    @classmethod
    def target(cls) -> Target:
        """The backend under test; override it for one that is not installed."""
        return Target.find(cls.backend)

    def __init_subclass__(cls, kinds: tuple[str, ...] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ours = {
            name: method
            for base in cls.__mro__[1:]
            if base.__module__ == __name__
            for name, method in vars(base).items()
            if name.startswith("test_")
        }
        if overridden := sorted(n for n, m in ours.items() if getattr_static(cls, n) is not m):
            raise TypeError(
                f"{cls.__name__} overrides {', '.join(overridden)}: checks of the conformance "
                "suite cannot be overridden; list a known failure in the ledger instead"
            )
        if kinds:
            for check in (each for each in checks_of(*kinds) if not each.of_core):
                name = "test_" + re.sub(r"\W+", "_", check.id).rstrip("_")
                setattr(cls, name, _method(check))
        cls.__test__ = bool(cls.backend)


def _method(check: Check) -> Callable[[_Suite, pytest.FixtureRequest], None]:
    def test(self: _Suite, request: pytest.FixtureRequest) -> None:
        from rl_conformance.pytest_items import conduct, harness_for

        cls = type(self)
        harness = harness_for(
            request.config, lambda _: cls.target(), cls.backend, device=cls.device, dtype=cls.dtype
        )
        conduct(request.node, harness, check)

    test.__doc__ = f"{check.clause.id}: {check.title}"
    return test


class GenerationConformance(_Suite, kinds=("discovery", "generation")):
    """Chapters D and G."""


class PolicyConformance(_Suite, kinds=("discovery", "policy")):
    """Chapters D and P."""


class RefitConformance(_Suite, kinds=("refit", "security")):
    """Chapters R and S."""


class AgreementConformance(_Suite, kinds=("agreement",)):
    """Chapter A."""


class Conformance(
    _Suite,
    kinds=("discovery", "generation", "policy", "refit", "agreement", "security"),
):
    """All chapters that bind a backend."""
