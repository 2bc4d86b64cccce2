"""Every task of the project. ``nox`` alone runs what CI runs; ``nox -l`` lists the rest."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.10"
nox.options.sessions = [
    "lint",
    "types",
    "tests",
    "conformance(hf)",
    "conformance(vllm)",
    "oldest(vllm)",
    "wheels",
]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
OUT = ROOT / "out"
CONSTRAINTS = str(ROOT / "constraints.txt")
CORE, LOSSES, CONFORMANCE = "core", "plugins/rl-losses", "tests/conformance"
PLUGINS = {"hf": "plugins/rl-hf", "vllm": "plugins/rl-vllm"}
#: Engines that get an environment of their own, and what is installed there on a CPU.
ENGINES = {"vllm": "plugins/rl-vllm"}
HOSTING = "plugins/rl-hosting"
DISTRIBUTIONS = [CORE, LOSSES, HOSTING, *PLUGINS.values(), CONFORMANCE]
#: Checks that look different in the dtype of the CUDA profile; all of them pass in it.
IN_LOWER_PRECISION = "G4 or G7 or G8 or G10 or G11 or P1 or P4 or P5 or P13 or R1 or R15"
#: All but processes that die, which takes long and is the same in every release of an engine.
WITH_THE_OLDEST = "not (killed or outlives or sockets or forked or cluster)"
TEST_TOOLS = [
    "pytest",
    "pytest-cov",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "greenlet",  # stops the refit's code where a model wants to
    "hatchling",
    "ruff",
    "playwright",  # drives an installed Chromium, or one from `playwright install chromium`
]


def install(session: nox.Session, *requirements: str) -> None:
    """Installs at the versions that CI pins."""
    session.env["PIP_CONSTRAINT"] = CONSTRAINTS
    session.install(*requirements)


def install_workspace(session: nox.Session, *requirements: str) -> None:
    """The whole workspace, editable, with every optional part that runs without a GPU."""
    extras = {CORE: "[ray]", PLUGINS["hf"]: "[lora,device-map]"}
    editable = [part for path in DISTRIBUTIONS for part in ("-e", path + extras.get(path, ""))]
    install(session, *editable, *requirements)


def install_engine(session: nox.Session, plugin: str, which: str = "cpu-engine") -> None:
    """The engine behind a plugin, for CPUs, if the plugin does not bring it itself."""
    if plugin in ENGINES:
        install(session, "--no-deps", "-r", f"{ENGINES[plugin]}/{which}.txt")
        install(session, "-r", f"{ENGINES[plugin]}/cpu-runtime.txt")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, import directions, spelling."""
    install(session, "ruff", "import-linter", "codespell", "typing-extensions")
    session.install("--no-deps", *[p for path in DISTRIBUTIONS for p in ("-e", path)])
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--config", "pyproject.toml")
    session.run("codespell", *session.posargs)


@nox.session
def types(session: nox.Session) -> None:
    """Mypy --strict on what is typed for others."""
    install_workspace(session, "mypy")
    session.run("mypy", *[f"{path}/src" for path in DISTRIBUTIONS])


@nox.session
def tests(session: nox.Session) -> None:
    """Unit, property, integration and example tests, with coverage."""
    install_workspace(session, *TEST_TOOLS, "matplotlib", "typer")
    # Two processes with one thread each are faster on two cores than the other way round.
    session.env["OMP_NUM_THREADS"] = "1"
    (OUT / "tests").mkdir(parents=True, exist_ok=True)
    coverage = ["--cov", "--cov-report=term:skip-covered", f"--cov-report=xml:{OUT}/tests/cov.xml"]
    session.run("pytest", "-n", "2", "--dist", "loadgroup", *coverage, *session.posargs)


@nox.session
def full(session: nox.Session) -> None:
    """What takes too long for every run: all that is marked full."""
    install_workspace(session, *TEST_TOOLS)
    session.env["OMP_NUM_THREADS"] = "1"
    session.run("pytest", "-m", "full", "-n", "2", *session.posargs)


@nox.session
@nox.parametrize("plugin", list(PLUGINS), ids=list(PLUGINS))
def conformance(session: nox.Session, plugin: str) -> None:
    """The suite against one backend on the CPU, with its reports.

    Before it, the tests of a plugin whose engine has an environment of its own.
    """
    install_workspace(session, *(TEST_TOOLS if plugin in ENGINES else ["pytest-xdist"]))
    install_engine(session, plugin)
    if plugin in ENGINES:
        session.env["OMP_NUM_THREADS"] = "1"
        session.run("pytest", "-n", "2", "--dist", "loadgroup", f"{PLUGINS[plugin]}/tests")
    # In two processes, unless a part is asked for.
    how = session.posargs or ["-n", "2"]
    session.run("rl", "conformance", "run", plugin, *reports(plugin, "cpu"), *how)
    if not session.posargs:
        part = ["--dtype", "bfloat16", "-k", IN_LOWER_PRECISION]
        session.run("rl", "conformance", "run", plugin, *part)


@nox.session
@nox.parametrize("plugin", list(ENGINES), ids=list(ENGINES))
def oldest(session: nox.Session, plugin: str) -> None:
    """A plugin's tests with the oldest engine that it supports."""
    install_workspace(session, *TEST_TOOLS)
    install_engine(session, plugin, "cpu-engine-oldest")
    session.env["OMP_NUM_THREADS"] = "1"
    how = session.posargs or ["-n", "2", "--dist", "loadgroup", "-k", WITH_THE_OLDEST]
    session.run("pytest", f"{PLUGINS[plugin]}/tests", *how)


@nox.session(name="conformance-gpu")
@nox.parametrize("plugin", list(PLUGINS), ids=list(PLUGINS))
def conformance_gpu(session: nox.Session, plugin: str) -> None:
    """The suite against one backend on a GPU; without one it reports not_run and fails."""
    install_workspace(session)
    if plugin in ENGINES:
        session.install("-e", f"{PLUGINS[plugin]}[engine]")  # brings the torch that it needs
    session.run("rl", "conformance", "run", plugin, *reports(plugin, "cuda"), *session.posargs)


def reports(plugin: str, device: str) -> list[str]:
    """Options that write every kind of report under ``out/conformance``."""
    folder = OUT / "conformance"
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{plugin}-{device}"
    kinds = {"json": "json", "junit": "xml", "markdown": "md", "html": "html", "badge": "svg"}
    options = [part for kind, end in kinds.items() for part in (f"--{kind}", f"{stem}.{end}")]
    return ["--device", device, *options]


@nox.session
def quickstart(session: nox.Session) -> None:
    """A GRPO run that learns to add, with generation in a process of its own."""
    install_workspace(session, "matplotlib", "typer")
    for plugin in set(ENGINES) & set(session.posargs):  # such as: -- --generation vllm
        install_engine(session, plugin)
    session.run("python", "-m", "examples.grpo", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Every benchmark, as ratios within one run; JSON under out/bench."""
    install_workspace(session, "matplotlib", "tensordict", "typer")
    folder = OUT / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    for script in sorted((ROOT / "benchmarks").glob("bench_*.py")):
        session.run("python", str(script), "--json", str(folder / f"{script.stem}.json"))
    plots = ["benchmarks/plots.py", str(folder / "bench_refit.json"), "--out", str(folder)]
    session.run("python", *plots)


@nox.session(name="bench-engine")
@nox.parametrize("plugin", list(ENGINES), ids=list(ENGINES))
def bench_engine(session: nox.Session, plugin: str) -> None:
    """A plugin next to its bare engine, in the engine's environment."""
    install_workspace(session)
    install_engine(session, plugin)
    script = f"benchmarks/engine_{plugin}.py"
    session.run("python", script, "--json", str(OUT / "bench" / f"engine_{plugin}.json"))


@nox.session
def fuzz(session: nox.Session) -> None:
    """A million inputs for all that reads what another process wrote, guided by coverage."""
    install(session, "-e", CORE, "atheris")
    target = ["core/tests/fuzz_messages.py", "--runs", "1000000"]
    session.run("python", *target, *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Builds every wheel and tries them in an environment that has nothing else."""
    install(session, "build", "hatchling")
    folder = OUT / "wheels"
    shutil.rmtree(folder, ignore_errors=True)
    for path in DISTRIBUTIONS:
        session.run(
            "python",
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "-o",
            str(folder),
            path,
            silent=True,
        )
    built = sorted(str(wheel) for wheel in folder.glob("*.whl"))
    empty = Path(session.create_tmp()).resolve() / "empty"
    shutil.rmtree(empty, ignore_errors=True)
    session.run("python", "-m", "venv", str(empty))
    scripts = empty / ("Scripts" if sys.platform == "win32" else "bin")
    session.run(str(scripts / "pip"), "install", "-q", "-c", CONSTRAINTS, *built, external=True)
    elsewhere = {**os.environ, "PYTHONPATH": ""}
    with session.chdir(empty):
        run = [str(scripts / "rl")]
        session.run(*run, "backends", "list", external=True, env=elsewhere)
        session.run(*run, "backends", "doctor", "hf", external=True, env=elsewhere)
        smoke = ["conformance", "run", "hf", "-k", "B1 or D1 or G3 or P1 or R1"]
        session.run(*run, *smoke, external=True, env=elsewhere)
    follow_tutorial(session, empty)


def follow_tutorial(session: nox.Session, environment: Path) -> None:
    """Somebody else's backend, from nothing to a whole report, as the tutorial says."""
    directory = environment.parent / "tutorial"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    tutorial = ["tests/tutorial.py", "docs/write-a-backend.md"]
    where = ["--directory", str(directory), "--environment", str(environment)]
    # The models are tiny: a second thread costs more than it brings.
    settings = {"PIP_CONSTRAINT": CONSTRAINTS, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    session.run("python", *tutorial, *where, env={"PYTHONPATH": "", **settings})
    require_whole(session, directory / "rl-mine" / "report.json")


def require_whole(session: nox.Session, path: Path) -> None:
    """Fails unless a report has a status for every clause of the contract, and none is bad."""
    report = json.loads(path.read_text(encoding="utf-8"))
    statuses = {clause["id"]: clause["status"] for clause in report["clauses"]}
    contract = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    without = [c for c in re.findall(r"(?m)^- ([A-Z]\d+) ", contract) if not statuses.get(c)]
    if report["verdict"] != "conformant" or report["selection"] or without:
        session.error(f"{path}: {report['verdict']}, without a status: {without}")


@nox.session
def docs(session: nox.Session) -> None:
    """Builds the documentation; a dead link or a missing page is an error."""
    install_workspace(session, "mkdocs-material", "mkdocstrings[python]")
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    session.run("mkdocs", "build", "--strict", "--site-dir", str(OUT / "site"), *session.posargs)
