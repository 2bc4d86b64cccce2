"""What holds for all tests of the workspace: which of them run, and what is said of the others."""

from __future__ import annotations

import os
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from selection import SAMPLES, Selection, changed_since, number_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

_LEFT = pytest.StashKey[Counter[str]]()
SELECTION = pytest.StashKey["Selection | None"]()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny(family="qwen2", **overrides)`` is the directory of such a model, made once."""
    from rl_conformance.models import make_tiny_model

    @cache
    def make(family: str = "qwen2", **overrides: Any) -> Path:
        return make_tiny_model(tmp_path_factory.mktemp("models") / family, family, **overrides)

    return make


@pytest.fixture(scope="session")
def model(tiny: Callable[..., Path]) -> Path:
    """The directory of the tiny model of which most tests need no more than one."""
    return tiny()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Sums here in the order of workers with one thread; others are added up in another order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Takes back what a test exports, or vLLM, Ray and megatron-core in it.

    Engines of other environments share no process, and tests that count processes would fail.
    """
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which mutants run; the others, and all that is marked ``full``, run with ``-m full``."""
    parser.addoption(
        "--mutants",
        type=int,
        metavar="K",
        help=f"the sample of mutants, 0 to {SAMPLES - 1}; by default the commit says which",
    )
    parser.addoption(
        "--changed-since",
        metavar="COMMIT",
        help="only tests that reach a file which differs from this commit, see tests/selection.py",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the sample once for all processes, and reads what changed."""
    if config.option.mutants is None:
        config.option.mutants = number_of(config.rootpath)
    config.stash[_LEFT] = Counter()
    commit = config.option.changed_since
    changed = tuple(changed_since(config.rootpath, commit)) if commit else ()
    config.stash[SELECTION] = Selection(config.rootpath, changed) if commit else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keeps modules together whose tests share a fixture.

    A module's cluster, for example, is made once if one process runs all of its tests.
    """
    fixtures = getattr(item, "_fixtureinfo", None)
    shared = [each[-1].scope for each in fixtures.name2fixturedefs.values()] if fixtures else []
    if "module" in shared:
        item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that are ``full``, unless ``-m`` names them, and those of no change."""
    # Each process of xdist would have another name for it, and then none runs anything.
    if unnamed := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{unnamed[0]} has an address in its name; give its cases ids")
    with_full = "full" in config.getoption("markexpr")
    selection = config.stash[SELECTION]
    concerned = cache(lambda file: selection is None or selection.concerns_test(file))
    left: dict[pytest.Item, str] = {}
    for item in items:
        if not concerned(item.path):
            left[item] = "unchanged"
        elif item.get_closest_marker("full") and not with_full:
            left[item] = "mutants" if _is_mutant(item.nodeid) else "full"
    if left:
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
    config.stash[_LEFT] = Counter(left.values())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of xdist tells the one that reports what it left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = dict(session.config.stash[_LEFT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """All processes collect, and leave out, the same."""
    if left := getattr(node, "workeroutput", {}).get("left"):
        node.config.stash[_LEFT] = Counter(left)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Nothing is lost silently: how many tests were left out, and why."""
    left = config.stash[_LEFT]
    ran = sum(
        _is_mutant(report.nodeid)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
    )
    options = config.option
    for line in describe_left_out(left, ran, options.mutants, options.changed_since):
        terminalreporter.write_line(line, yellow=True)


def describe_left_out(
    left: Mapping[str, int], ran: int, sample: int, commit: str | None
) -> list[str]:
    """Says how many tests did not run, and why; nothing if all of them ran.

    Args:
        left: The numbers of tests that did not run, by reason.
        ran: The number of mutants that ran.
        sample: Which sample of the mutants these are; mutants that a change concerns ran, too.
        commit: The commit with which the checkout was compared.
    """
    mutants, full, unchanged = (left.get(key, 0) for key in ("mutants", "full", "unchanged"))
    lines = []
    if unchanged:
        lines.append(f"{unchanged} tests reach no file that differs from {commit}, which passed")
    if mutants:
        lines.append(
            f"{ran} of {ran + mutants} mutants ran (sample {sample % SAMPLES} of 0 to "
            f"{SAMPLES - 1}, and mutants that changes concern); the others: nox -s full"
        )
    if full:
        lines.append(f"{full} tests are marked full: nox -s full")
    return lines


def _is_mutant(nodeid: str) -> bool:
    return "test_a_mutant_is_killed_where_it_is_broken[" in nodeid
