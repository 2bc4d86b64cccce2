"""Draws mutants of the sources and shows which checks and tests detect them.

``map`` records which line each check executes, ``draw`` makes mutants, ``run`` runs the checks of
each one's lines against a copy of the sources, and ``report`` counts.
"""

from __future__ import annotations

import ast
import difflib
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated, Any

import coverage
import pytest
import typer
from mutation_operators import Site, replaced, sites

ROOT = Path(__file__).parent.parent
TARGETS = [
    "core",
    *(f"plugins/rl-{name}" for name in ("backends", "hf", "losses", "hosting", "guests")),
    "plugins/rl-vllm/src/rl_vllm/server.py",
    "plugins/rl-sglang/src/rl_sglang/server.py",
]
#: An item may take ten times the seconds that it took without a mutant, and at least these: it may
#: compute what other items computed for it then.
PATIENCE, LEAST_S = 10, 240.0
SUITE = ["-c", os.devnull, "--noconftest", "--rl-backend"]
QUIET = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
#: Coverage of the sources, also in child processes, which belongs to what runs when they start.
SETTINGS = """
[run]
parallel = true
patch = _exit
context = ${{MUTATE_CONTEXT-}}
data_file = {folder}/data
include =
    {root}/core/src/**
    {root}/plugins/*/src/**
"""
CLAUSE = re.compile(r"[A-Z]\d+\b")
app = typer.Typer(help=__doc__, add_completion=False)
Mutant = dict[str, Any]


class Mapper:
    """Attributes each line to the item that executes it.

    The lines that make a shared backend are attributed to all items that use the backend.
    """

    def __init__(self, measuring: coverage.Coverage) -> None:
        self.measuring = measuring
        self.items: dict[str, dict[str, Any]] = defaultdict(lambda: {"contexts": []})
        self.running = ""

    def switch(self, context: str) -> None:
        """Begins a context, also in processes that start now."""
        os.environ["MUTATE_CONTEXT"] = context
        self.measuring.switch_context(context)
        self.items[self.running]["contexts"].append(context)

    def pytest_configure(self) -> None:
        """Begins a context when a check asks for a shared backend."""
        from rl_conformance.context import Workshop

        share = Workshop.share

        def shared(workshop: Any, kind: str, dtype: str, config: dict[str, Any]) -> Any:
            self.switch(f"shared {kind} {dtype} {sorted(config.items())}")
            try:
                return share(workshop, kind, dtype, config)
            finally:
                self.switch(self.running)

        Workshop.share = shared  # type: ignore[method-assign]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running = nodeid
        self.switch(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.items[report.nodeid] |= {"seconds": report.duration, "passed": report.passed}


class Selector:
    """Runs some items, and writes what is running and what failed."""

    def __init__(self, items: dict[str, float], state: Path) -> None:
        self.items = items
        self.state = state

    def write(self, **state: Any) -> None:
        """Replaces the state as a whole: another process reads it."""
        self.state.with_suffix(".new").write_text(json.dumps(state))
        self.state.with_suffix(".new").replace(self.state)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (each for each in items if each.nodeid in self.items and not is_summary(each)),
            key=lambda each: self.items[each.nodeid],
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        allowed = max(LEAST_S, PATIENCE * self.items[nodeid])
        self.write(check=nodeid, until=time.time() + allowed)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.write(verdict="killed", check=report.nodeid, message=report.longreprtext[-600:])
            os._exit(0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.write(verdict="survived", ran=session.testscollected)


def is_summary(item: pytest.Item) -> bool:
    """Whether it is a check that runs others for their results, with all of their time."""
    check = getattr(item, "check", None)
    return check is not None and check.summary


@app.command("map")
def make_map(
    what: Annotated[
        list[str], typer.Argument(help="A backend, core, or paths of tests with a slash.")
    ],
    folder: Annotated[Path, typer.Option(help="Is created.")],
) -> None:
    """Records which line each check of a backend, or each test, executes."""
    folder = folder.absolute()
    folder.mkdir(parents=True)
    arguments = what if "/" in what[0] else [*SUITE, *what, str(folder)]
    settings = folder / "coveragerc"
    settings.write_text(SETTINGS.format(folder=folder, root=ROOT))
    os.environ["COVERAGE_PROCESS_START"] = str(settings)
    measuring = coverage.Coverage(config_file=str(settings))
    measuring.start()
    mapper = Mapper(measuring)
    pytest.main([*arguments, *QUIET], plugins=[mapper])
    measuring.stop()
    measuring.save()
    combined = coverage.Coverage(config_file=str(settings))
    combined.combine()
    combined.save()
    passed = {name: item for name, item in mapper.items.items() if item.get("passed")}
    content = {"arguments": arguments, "items": passed}
    (folder / "items.json").write_text(json.dumps(content, indent=1))


def covering(folder: Path, mutant: Mutant) -> dict[str, float]:
    """The items that execute the lines of a mutant, with their seconds."""
    data = coverage.CoverageData(str(folder / "data"))
    data.read()
    first, last = mutant["lines"]
    executed = data.contexts_by_lineno(str(ROOT / mutant["file"]))
    contexts = {name for line, names in executed.items() if first <= line <= last for name in names}
    items = json.loads((folder / "items.json").read_text())["items"]
    return {
        name: item["seconds"] for name, item in items.items() if contexts & set(item["contexts"])
    }


@app.command()
def draw(
    json_path: Annotated[Path, typer.Option("--json", help="Where the mutants are written.")],
    seed: int = 1,
    number: int = 40,
    target: Annotated[
        list[str], typer.Option(help="Folders of distributions, or files.")
    ] = TARGETS,
) -> None:
    """Draws mutants: functions in proportion to their statements, a second one of none before all
    had one; of each function an operator, and of this a place.
    """
    generator = random.Random(seed)
    functions: dict[tuple[Path, str], list[Site]] = defaultdict(list)
    for name in target:
        path = ROOT / name
        for file in sorted((path / "src").rglob("*.py")) if path.is_dir() else [path]:
            for site in sites(ast.parse(file.read_text())):
                functions[file, site.function].append(site)

    def key(function: tuple[Path, str]) -> float:
        statements = {site.lines for site in functions[function]}
        return generator.random() ** (1 / len(statements))

    mutants: list[Mutant] = []
    while len(mutants) < number:
        for file, function in sorted(functions, key=key, reverse=True)[: number - len(mutants)]:
            choices = functions[file, function]
            operator = generator.choice(sorted({site.operator for site in choices}))
            site = generator.choice([each for each in choices if each.operator == operator])
            mutants.append(describe(file, site))
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(mutants, indent=1) + "\n")


def describe(file: Path, site: Site) -> Mutant:
    """A mutant as it is written, and later judged, in JSON."""
    text = file.read_text()
    mutant: Mutant = {
        "file": str(file.relative_to(ROOT)),
        "line": site.span[0],
        "function": site.function,
        "operator": site.operator,
        "span": site.span,
        "after": site.source,
        "lines": site.lines,
        "verdict": None,
    }
    changed = replaced(text, site.span, site.source)
    compile(changed, str(file), "exec")
    before, after = text.splitlines(), changed.splitlines()
    diff = difflib.unified_diff(before, after, mutant["file"], mutant["file"], n=1, lineterm="")
    return {**mutant, "diff": "\n".join(diff)}


@app.command()
def run(
    mutants: Path,
    maps: Annotated[list[Path], typer.Option("--map", help="A folder that `map` made.")],
    budget_s: Annotated[float, typer.Option(help="No mutant begins after these seconds.")] = 3000,
    resume: Annotated[bool, typer.Option(help="Keep the verdicts that there are.")] = False,
) -> None:
    """Runs the items that execute a mutant's lines, the fastest first, until one fails."""
    started, records = time.monotonic(), json.loads(mutants.read_text())
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        use_copies(Path(scratch))
        for record in records:
            if time.monotonic() - started > budget_s:
                break
            if resume and record["verdict"]:
                continue
            began, copied = time.monotonic(), Path(scratch, record["file"])
            copied.write_text(replaced(copied.read_text(), record["span"], record["after"]))
            record.update(examine(record, maps, Path(scratch)))
            shutil.copy2(ROOT / record["file"], copied)
            record["seconds"] = round(time.monotonic() - began, 1)
            print(record["verdict"], record["file"], record["line"], record.get("check", ""))
            mutants.write_text(json.dumps(records, indent=1) + "\n")


def examine(mutant: Mutant, maps: list[Path], scratch: Path) -> Mutant:
    """The verdict, from the first map with an item that fails."""
    result: Mutant = {"verdict": "not covered"}
    for folder in maps:
        if items := covering(folder, mutant):
            ran = result.get("ran", 0)
            result = run_items(folder, items, scratch)
            if result["verdict"] != "survived":
                return result
            result["ran"] += ran
    return {**result, "forbidden_by": ""}


def use_copies(scratch: Path) -> None:
    """Copies all sources, and lets this process and its children import them from there.

    Files that a killed check leaves behind go with the copies. Libraries are imported now, once for
    all mutants.
    """
    paths = []
    for source in (*ROOT.glob("core/src"), *ROOT.glob("plugins/*/src"), *ROOT.glob("tests/*/src")):
        paths.append(str(scratch / source.relative_to(ROOT)))
        shutil.copytree(source, paths[-1])
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(dir=scratch)
    sys.path[:0] = paths
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    import torch
    import transformers

    del torch, transformers


def run_items(folder: Path, items: dict[str, float], scratch: Path) -> Mutant:
    """Runs items in a process of their own, and returns the verdict."""
    state, log = scratch / "state.json", scratch / "log"
    state.write_text(json.dumps({"check": "", "until": time.time() + PATIENCE * LEAST_S}))
    arguments = json.loads((folder / "items.json").read_text())["arguments"]
    child = os.fork()
    if not child:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            selector = Selector(items, state)
            pytest.main([*arguments, *QUIET], plugins=[selector])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    while not os.waitpid(child, os.WNOHANG)[0]:
        now = json.loads(state.read_text())
        if time.time() > now.get("until", math.inf):
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"verdict": "timeout", "check": now["check"]}
        time.sleep(0.2)
    result: Mutant = json.loads(state.read_text())
    if "verdict" not in result:
        message = log.read_text(errors="replace")[-600:]
        return {"verdict": "error", "check": result["check"], "message": message}
    return result


@app.command()
def report(mutants: Path) -> None:
    """Prints, as Markdown, the verdicts and what a person wrote into `forbidden_by`: the clause
    that forbids the change, or why none does.
    """
    records = json.loads(mutants.read_text())
    verdicts = Counter(record["verdict"] or "not run" for record in records)
    print(f"{len(records)} mutants: {', '.join(f'{n} {name}' for name, n in verdicts.items())}.")
    detected = sum(verdicts[name] for name in ("killed", "timeout", "error"))
    left = [record for record in records if "forbidden_by" in record]
    forbidden = sum(bool(CLAUSE.match(record["forbidden_by"])) for record in left)
    low, high = wilson(detected, detected + forbidden)
    print(f"\nOf {detected + forbidden} changes that the contract forbids, {detected} are detected")
    print(f"(95 % interval: {low:.0%} to {high:.0%}).")
    print("\n| change | verdict | forbidden by |\n|---|---|---|")
    for record in left:
        change = record["after"].replace("|", "\\|").replace("\n", " ")
        place = f"{record['file']}:{record['line']}"
        verdict = record["verdict"] or "not run"
        print(f"| {place}: `{change}` | {verdict} | {record['forbidden_by']} |")


def wilson(hits: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share, after Wilson."""
    if not total:
        return 0.0, 1.0
    share, denominator = hits / total, 1 + z * z / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (centre - spread) / denominator, (centre + spread) / denominator


if __name__ == "__main__":
    app()
