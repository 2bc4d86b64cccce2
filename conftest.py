"""What holds for all tests of the workspace: which of them run, and what is said of the others."""

from __future__ import annotations

import os
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from mutant_sample import SAMPLES, changed_files, number_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

_LEFT = pytest.StashKey[Counter[str]]()
_CHANGED = pytest.StashKey[list[str]]()


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


def pytest_configure(config: pytest.Config) -> None:
    """The sample is chosen once, not by each process."""
    if config.option.mutants is None:
        config.option.mutants = number_of(config.rootpath)
    config.stash[_LEFT] = Counter()
    config.stash[_CHANGED] = changed_files(config.rootpath)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Sees to it that tests which no change concerns count as full, and modules stay together.

    What the tests of a module share, such as a cluster, is made once if one process runs them all.
    """
    concerned = item.get_closest_marker("concerns")
    changed = item.config.stash[_CHANGED]
    if concerned and not any(path.startswith(concerned.args) for path in changed):
        item.add_marker(pytest.mark.full)
    found = getattr(item, "_fixtureinfo", None)
    made = [each[-1].scope for each in found.name2fixturedefs.values()] if found else []
    if "module" in made:
        item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that are ``full`` run only where ``-m`` speaks of them."""
    # Each process of xdist would have another name for it, and then none runs anything.
    if unnamed := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{unnamed[0]} has an address in its name; give its cases ids")
    if "full" in config.getoption("markexpr"):
        return
    left = [item for item in items if item.get_closest_marker("full") is not None]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    config.stash[_LEFT] = Counter(_kind(item.nodeid) for item in left)


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
    """Nothing is lost silently: how many mutants ran, and how many tests were left out."""
    left = config.stash[_LEFT]
    ran = sum(
        _kind(report.nodeid) == "mutants"
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
    )
    for line in said(left, ran, config.getoption("mutants")):
        terminalreporter.write_line(line, yellow=True)


def said(left: Mapping[str, int], ran: int, number: int) -> list[str]:
    """What a run says of what it left out; nothing, if it left out nothing.

    Args:
        left: How many mutants, and how many other tests, did not run.
        ran: How many mutants did.
        number: The sample that these are, besides those that a change may concern.
    """
    lines = []
    if mutants := left.get("mutants", 0):
        lines.append(
            f"{ran} of {ran + mutants} mutants ran (sample {number % SAMPLES} of 0 to "
            f"{SAMPLES - 1}, and those that changes concern); the others: nox -s full"
        )
    if others := left.get("others", 0):
        lines.append(f"{others} other tests are full, or no change concerns them: nox -s full")
    return lines


def _kind(nodeid: str) -> str:
    return "mutants" if "test_a_mutant_is_killed_where_it_is_broken[" in nodeid else "others"
