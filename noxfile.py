"""Every task of the project. ``nox`` alone runs what CI runs; ``nox -l`` lists the rest."""

from __future__ import annotations

import atexit
import datetime as dt
import hashlib
import json
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tests"))

from nox_parts import Parts, join_parts  # noqa: E402
from selection import Selection, changed_since  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: What ``nox`` alone runs: the short run.
SHORT = [
    "environments",
    "lint",
    "types",
    "tests",
    "conformance(core)",
    "conformance(hf)",
    "conformance(megatron)",
    "conformance(vllm)",
    "conformance(sglang)",
    "wheels",
]
#: What it leaves out, and ``nox -s full`` adds.
LEFT_OUT = {
    "rest": "tests that are marked full, and most mutants",
    **{f"layouts({name})": "its other layouts over ranks" for name in ("hf", "megatron")},
    **{f"precision({name})": "its second dtype" for name in ("hf", "megatron", "vllm", "sglang")},
    **{f"oldest({name})": "what it supports" for name in ("hf", "megatron", "vllm", "sglang")},
    **{f"architectures({name})": "which models refits reach" for name in ("vllm", "sglang")},
    "python-3.12": "tests on the next Python, for which torch is a download of gigabytes",
    "newest": "torch, transformers and all else at their newest releases",
    "newest-apis": "what the newest engines lack or have new",
    "verl": "the checkpoint engine in verl's registry and under its manager",
    "fuzz": "a million inputs for what reads messages",
    "tutorial": "the whole suite against the backend of the tutorial",
    **{f"real-model({name})": "a real model" for name in ("hf", "vllm", "sglang")},
}
#: Seconds, as seen on 2 quiet cores; each part of a run says how long it usually takes.
USUAL = {
    "environment workspace": 35,
    "environment cpu-engine-vllm": 40,
    "environment cpu-engine-sglang": 50,
    "types: mypy 3.11": 20,
    "types: mypy 3.12": 20,
    "tests: pytest": 490,
    "conformance(core): suite": 25,
    "conformance(hf): suite": 95,
    "conformance(megatron): suite": 115,
    "conformance(vllm): pytest": 80,
    "conformance(vllm): suite": 155,
    "conformance(sglang): pytest": 70,
    "conformance(sglang): suite": 165,
    "wheels: install": 25,
    "tutorial: tutorial": 210,
    "python-3.12: environment": 80,
    "python-3.12: pytest": 75,
    "quickstart: GRPO": 90,
}
OUT = ROOT / "out"
PARTS = Parts(USUAL, record=OUT / "parts.jsonl")
# nox has no hook for its end, and goes on after a session that fails.
atexit.register(lambda: PARTS.done and PARTS.print_table(SHORT, LEFT_OUT))

nox.needs_version = ">=2024.10"
nox.options.sessions = SHORT
nox.options.reuse_existing_virtualenvs = True

CONSTRAINTS = str(ROOT / "constraints.txt")
CORE, LOSSES, CONFORMANCE = "core", "plugins/rl-losses", "tests/conformance"
PLUGINS = {name: f"plugins/rl-{name}" for name in ("hf", "megatron", "vllm", "sglang")}
#: Engines that get an environment of their own, and what is installed there on a CPU.
ENGINES = {name: PLUGINS[name] for name in ("vllm", "sglang")}
#: Tests of what every engine does, and of refits by its own API; what is not installed is skipped.
OF_ENGINES = ["tests/engines", "plugins/rl-guests/tests"]
#: What backends and launchers are made of.
SHARED = [f"plugins/rl-{name}" for name in ("cli", "backends", "collective", "hosting", "ray")]
#: What brings backends and refits into other libraries.
BRIDGES = ["plugins/rl-guests", "plugins/rl-nemo", "plugins/rl-trl"]
TRAIN = "plugins/rl-train"
DISTRIBUTIONS = [CORE, LOSSES, *SHARED, *PLUGINS.values(), *BRIDGES, TRAIN, CONFORMANCE]
#: Checks that look different in the dtype of the CUDA profile; all of them pass in it.
IN_LOWER_PRECISION = "G4 or G7 or G8 or G10 or G11 or P1 or P4 or P5 or P13 or R1 or R15"
#: Checks that take any model, and few enough: an engine of it takes half a minute to start.
WITH_A_REAL_MODEL = "G8 or G11 or P1"
#: All but processes that die, which takes long and is the same in every release of an engine.
WITH_THE_OLDEST = "not (killed or outlives or sockets or forked or cluster)"
TOOLS = [
    "build",
    "codespell",
    "greenlet",  # stops the refit's code where a model wants to
    "hatchling",
    "hypothesis",
    "import-linter",
    "matplotlib",
    "mypy",
    "nox",
    "playwright",  # drives an installed Chromium, or one from `playwright install chromium`
    "pytest",
    "pytest-cov",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "tensorboard",
    "typer",
]
#: What NeMo RL's algorithms need, besides the workspace; what they only import has test doubles.
FOR_NEMO = [
    "grpcio",
    "matplotlib",
    "omegaconf==2.4.0",
    "torchdata==0.11.0",
    "transformers==5.11.0",
]
#: verl and what it imports, without its pins: they fit neither the engines nor the trainer here.
FOR_VERL = [
    "antlr4-python3-runtime==4.9.3",
    "codetiming",
    "fastapi",
    "hydra-core",
    "opentelemetry-api",
    "orjson",
    "pillow",  # imported by its trainer
    "pylatexenc",
    "pyvers",
    "starlette",
    "tensordict==0.10.0",
    "torchdata==0.11.0",
    "uvicorn",
    "verl==0.9.1",
    "wandb",
]
SCRIPTS = "Scripts" if sys.platform == "win32" else "bin"
IN_TWO = ["-n", str(min(2, os.cpu_count() or 1)), "--dist", "loadgroup"]
#: Found here because pyenv's ``python3.12`` fails unless that version is selected.
NEXT_PYTHON = next(map(str, Path.home().glob(".pyenv/versions/3.12.*/bin/python")), "3.12")
#: pip compiles every module of an environment, which takes as long as the rest of its work; Python
#: compiles those that are imported.
PIP_INSTALL = ["-m", "pip", "install", "-q", "--no-compile"]
#: It keeps them also where an image asks it not to: or else every process would compile them anew.
COMPILE = {"PYTHONDONTWRITEBYTECODE": ""}


def editable() -> list[str]:
    """The whole workspace, with every optional part that runs without a GPU."""
    extras = {
        "backends": "[torch]",
        "hf": "[lora,device-map]",
        "megatron": "[cpu]",
        "sglang": "[server]",
    }
    chosen = {f"plugins/rl-{name}": extra for name, extra in extras.items()}
    return [part for path in DISTRIBUTIONS for part in ("-e", path + chosen.get(path, ""))]


def install(session: nox.Session, *requirements: str, constraints: str = CONSTRAINTS) -> None:
    """Installs at the versions that CI pins, in an environment that is the session's alone."""
    session.env.update({"PIP_CONSTRAINT": constraints, **COMPILE})
    with PARTS.part(session.name, "environment"):
        session.install("--no-compile", *requirements)


def environment(
    session: nox.Session,
    engine: str = "",
    release: str = "cpu-engine",
    constraints: str = CONSTRAINTS,
) -> None:
    """Lends a session an environment that several share: the workspace, and an engine for CPUs.

    It is made anew when what it is made of has changed; one of the newest releases, each day.
    """
    name = f"{release}-{engine}" if engine else "workspace" if constraints else release
    folder = Path(session.cache_dir).resolve() / name
    lists = [f"{PLUGINS[engine]}/{part}.txt" for part in (release, "cpu-runtime")] if engine else []
    lists = [file for file in lists if (ROOT / file).exists()]
    sources = [CONSTRAINTS, *lists, *(f"{path}/pyproject.toml" for path in DISTRIBUTIONS)]
    parts = [sys.version, *editable(), *TOOLS, *((ROOT / file).read_text() for file in sources)]
    parts += [] if constraints else [str(dt.datetime.now(dt.UTC).date())]
    made_of, stamp = hashlib.sha256("\n".join(parts).encode()).hexdigest(), folder / "made-of"
    session.env.update(
        {
            "VIRTUAL_ENV": str(folder),
            "PATH": os.pathsep.join([str(folder / SCRIPTS), os.environ["PATH"]]),
            "PIP_CONSTRAINT": constraints,
            **COMPILE,
        }
    )
    if stamp.exists() and stamp.read_text() == made_of:
        return
    python = str(folder / SCRIPTS / "python")
    with PARTS.part(session.name, f"environment {name}"):
        session.run(sys.executable, "-m", "virtualenv", "-q", "--clear", str(folder))
        session.run(python, *PIP_INSTALL, "hatchling", "editables")
        runtime = [part for file in lists[1:] for part in ("-r", file)]
        session.run(python, *PIP_INSTALL, "--no-build-isolation", *editable(), *TOOLS, *runtime)
        if engine:  # pinned to what the engine wants, which may be other versions
            session.run(
                python, *PIP_INSTALL, "--no-deps", "-r", lists[0], env={"PIP_CONSTRAINT": ""}
            )
        stamp.write_text(made_of)


def run(session: nox.Session, what: str, program: str, *arguments: str) -> None:
    """Runs a program of the environment that the session was lent, as a part of the run."""
    # Two processes with one thread each are faster on two cores than the other way round.
    threads = {"OMP_NUM_THREADS": "1"} if "-n" in arguments else {}
    if program == "pytest":
        report = OUT / "tests" / f"{session.name} {what}.xml"
        arguments = (*arguments, "--junit-xml", str(report))
    wrote = next((Path(b) for a, b in pairwise(arguments) if a.startswith("--junit")), None)
    # A change may concern no test: pytest then ends with 5.
    codes = [0, 5] if any(part.startswith("--changed-since") for part in arguments) else [0]
    with PARTS.part(session.name, what, wrote):
        command = str(Path(session.env["VIRTUAL_ENV"], SCRIPTS, program))
        session.run(command, *arguments, env=threads, external=True, success_codes=codes)


def at_once(work: Callable[[str], None], names: Iterable[str]) -> None:
    """What takes one core each, side by side; raises what the first of them raised."""
    with ThreadPoolExecutor() as threads:
        list(threads.map(work, names))


@cache
def selection_since(commit: str) -> Selection:
    """What the files concern that differ from a commit."""
    return Selection(ROOT, tuple(changed_since(ROOT, commit)))


def selection() -> Selection | None:
    """What a run has to test, where CI names the commit that passed; None if everything."""
    commit = os.environ.get("RL_CHANGED_SINCE")
    return selection_since(commit) if commit else None


def suite_is_concerned(plugin: str) -> bool:
    """Whether the suite can end otherwise for a backend, or for core, than when it last passed."""
    chosen = selection()
    return chosen is None or chosen.concerns_packages(f"rl_{plugin}", "rl_conformance")


def tests_are_concerned(*folders: str) -> bool:
    """Whether a test in these folders reaches a file that changed."""
    chosen = selection()
    tests = [path for folder in folders for path in (ROOT / folder).rglob("test_*.py")]
    return chosen is None or any(chosen.concerns_test(path) for path in tests)


def engine_is_concerned(plugin: str) -> bool:
    """Whether the session of an engine has anything to run."""
    return suite_is_concerned(plugin) or tests_are_concerned(
        f"{PLUGINS[plugin]}/tests", *OF_ENGINES
    )


def leave_out(session: nox.Session, what: str) -> None:
    """Says at the end of the run that a change does not concern what is left out."""
    PARTS.leave_out(session.name, f"{what}: no change since {os.environ['RL_CHANGED_SINCE'][:12]}")


@nox.session(venv_backend="none")
def environments(session: nox.Session) -> None:
    """All environments of the short run; alone, each session makes its own when it needs it."""
    at_once(partial(environment, session), ("", *filter(engine_is_concerned, ENGINES)))


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style, import directions, circles of imports, long files, spelling."""
    environment(session)
    run(session, "ruff", "ruff", "check", ".")
    run(session, "ruff format", "ruff", "format", "--check", ".")
    run(session, "import-linter", "lint-imports", "--config", "pyproject.toml")
    run(session, "structure", "python", "tests/structure.py")
    run(session, "configuration keys", "python", "docs/hooks/keys.py", "--check")
    run(session, "codespell", "codespell", *session.posargs)


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Mypy --strict on what is typed for others, for the oldest Python and the next one."""
    environment(session)

    def check(python: str) -> None:
        how = ["--python-version", python, *(f"{path}/src" for path in DISTRIBUTIONS)]
        run(session, f"mypy {python}", "mypy", *how)

    at_once(check, ("3.11", "3.12"))


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Unit, property, integration and example tests; mutants take turns."""
    environment(session)
    run_tests(session, *IN_TWO, *session.posargs)


def run_tests(session: nox.Session, *arguments: str) -> None:
    """Runs pytest on the tests that a change concerns, or on all of them."""
    commit = os.environ.get("RL_CHANGED_SINCE")
    since = [f"--changed-since={commit}"] if commit else []
    run(session, "pytest", "pytest", *arguments, *since)


@nox.session(venv_backend="none")
def rest(session: nox.Session) -> None:
    """What ``tests`` leaves out: all that is marked full, and mutants whose turn it is not."""
    pythons = []
    for engine in ENGINES:
        environment(session, engine)
        pythons.append(f"{engine}={Path(session.env['VIRTUAL_ENV'], SCRIPTS, 'python')}")
    session.env["RL_ENGINES"] = " ".join(pythons)
    environment(session)
    run(session, "pytest", "pytest", "-m", "full", *IN_TWO, *session.posargs)
    for engine in ENGINES:
        environment(session, engine)
        how = ["-m", "full", *IN_TWO, f"{PLUGINS[engine]}/tests", *OF_ENGINES, *session.posargs]
        run(session, f"pytest {engine}", "pytest", *how)


@nox.session(venv_backend="none")
def coverage(session: nox.Session) -> None:
    """``tests``, with the lines that they reach: out/coverage. Takes a third longer."""
    environment(session)
    how = ["--cov", f"--cov-report=html:{OUT}/coverage", *session.posargs]
    run(session, "pytest", "pytest", *IN_TWO, *how)


@nox.session(venv_backend="none")
def full(session: nox.Session) -> None:
    """Everything: the short run, and all that it leaves out. Takes some hours on two cores.

    It may run in parts, session by session; ``full-report`` joins the parts of one commit.
    """
    os.environ.pop("RL_CHANGED_SINCE", None)
    for name in [*SHORT, *LEFT_OUT, "full-report"]:
        session.notify(name)


@nox.session(name="full-report", venv_backend="none")
def full_report(session: nox.Session) -> None:
    """One report of all parts that ran at this commit: out/full.md."""
    report = join_parts(OUT / "parts.jsonl", [*SHORT, *LEFT_OUT])
    (OUT / "full.md").write_text(report.text, encoding="utf-8")
    session.log(report.text)
    if not report.whole:
        session.error("not every part has passed at this commit")


@nox.session(venv_backend="none")
@nox.parametrize("plugin", ["core", *PLUGINS], ids=["core", *PLUGINS])
def conformance(session: nox.Session, plugin: str) -> None:
    """The suite against one backend on the CPU, or what core alone keeps, with its reports.

    Before it, the tests of a plugin whose engine has an environment of its own.
    """
    folders = [f"{PLUGINS[plugin]}/tests", *OF_ENGINES] if plugin in ENGINES else []
    with_tests = bool(folders) and tests_are_concerned(*folders)
    with_suite = bool(session.posargs) or suite_is_concerned(plugin)
    if with_tests or with_suite:
        environment(session, plugin if plugin in ENGINES else "")
    if with_tests:
        run_tests(session, *IN_TWO, *folders)
    elif folders:
        leave_out(session, "pytest")
    if with_suite:
        # In two processes, unless a part is asked for.
        options = session.posargs or ["-n", "2"]
        run(session, "suite", "rl", "conformance", "run", plugin, *reports(plugin), *options)
    else:
        leave_out(session, "suite")


@nox.session(venv_backend="none")
@nox.parametrize("plugin", ["hf", "megatron"], ids=["hf", "megatron"])
def layouts(session: nox.Session, plugin: str) -> None:
    """Refits and steps of a policy over ranks, in every layout that the plugin names."""
    environment(session)
    options = session.posargs or ["--layouts", "all", "-k", "P14 or R16"]
    run(session, "suite", "rl", "conformance", "run", plugin, *options)


@nox.session(venv_backend="none")
@nox.parametrize("plugin", list(PLUGINS), ids=list(PLUGINS))
def precision(session: nox.Session, plugin: str) -> None:
    """The part of the suite that looks different in the second dtype, in that."""
    environment(session, plugin if plugin in ENGINES else "")
    part = session.posargs or ["--dtype", "bfloat16", "-k", IN_LOWER_PRECISION]
    run(session, "suite", "rl", "conformance", "run", plugin, *part)


@nox.session(venv_backend="none")
@nox.parametrize("plugin", list(PLUGINS), ids=list(PLUGINS))
def oldest(session: nox.Session, plugin: str) -> None:
    """A plugin's tests with the oldest engine that it supports."""
    environment(session, plugin, "cpu-engine-oldest")
    folders = [f"{PLUGINS[plugin]}/tests", *(OF_ENGINES if plugin in ENGINES else [])]
    how = session.posargs or [*IN_TWO, "-k", WITH_THE_OLDEST]
    run(session, "pytest", "pytest", *folders, *how)


@nox.session(venv_backend="none")
def newest(session: nox.Session) -> None:
    """What runs on torch and transformers, with the newest releases instead of those CI pins."""
    environment(session, release="newest", constraints="")
    folders = [PLUGINS["hf"], PLUGINS["megatron"], "plugins/rl-backends", LOSSES, CONFORMANCE]
    how = session.posargs or [*IN_TWO, *(f"{folder}/tests" for folder in folders)]
    run(session, "pytest", "pytest", *how)
    for plugin in ("hf", "megatron"):
        run(session, f"suite {plugin}", "rl", "conformance", "run", plugin, "-n", "2")


@nox.session(name="python-3.12", python=NEXT_PYTHON)
def python_312(session: nox.Session) -> None:
    """The quick tests on the next Python; nothing where that is not installed, except in CI."""
    install(session, *editable(), *TOOLS)
    of_core = [f"{CORE}/tests/{part}" for part in ("batch", "plugins", "weights/unit")]
    how = session.posargs or [*IN_TWO, *of_core, f"{LOSSES}/tests", "plugins/rl-backends/tests"]
    with PARTS.part(session.name, "pytest"):
        session.run("pytest", *how, env={"OMP_NUM_THREADS": "1"})


@nox.session(venv_backend="none")
@nox.parametrize("plugin", list(ENGINES), ids=list(ENGINES))
def architectures(session: nox.Session, plugin: str) -> None:
    """Which models an engine can be refit with; fails if any of them got worse.

    What was wrong, and what was exact, is in the newest report under ``docs/reports``.
    """
    environment(session, plugin)
    *_, newest = sorted(ROOT.glob(f"docs/reports/*-architectures-{plugin}-cpu.json"))
    written = OUT / "architectures" / f"{plugin}-cpu"
    how = ["--known", str(newest), "--json", f"{written}.json", "--markdown", f"{written}.md"]
    script = "benchmarks/try_architectures.py"
    run(session, "all", "python", script, plugin, *how, *session.posargs)


@nox.session(name="newest-apis", venv_backend="none")
def newest_apis(session: nox.Session) -> None:
    """What the newest engines lack of what is used, and have new; reads wheels, runs none."""
    environment(session)
    run(session, "compare", "python", "tests/newest_apis.py", *session.posargs)


@nox.session
@nox.parametrize("plugin", list(PLUGINS), ids=list(PLUGINS))
def gpu(session: nox.Session, plugin: str) -> None:
    """All that needs a GPU, part by part; what cannot run is said by name."""
    run_on_gpu(session, plugin)


@nox.session(name="conformance-gpu")
@nox.parametrize("plugin", list(PLUGINS), ids=list(PLUGINS))
def conformance_gpu(session: nox.Session, plugin: str) -> None:
    """The suite against one backend on CUDA, in pieces of ten minutes: a part of ``gpu``."""
    run_on_gpu(session, plugin, "conformance")


def run_on_gpu(session: nox.Session, plugin: str, *parts: str) -> None:
    """Runs parts of ``tests/gpu_run.py`` in an environment of the session's own.

    Where pip cannot install it (there is no network), in the environment that nox runs in.
    """
    how = ["tests/gpu_run.py", "--backend", plugin, *parts, *session.posargs]
    if "--rehearse" in how:
        environment(session, plugin if plugin in ENGINES else "")
        run(session, "parts", "python", *how)
        return
    python = "python"
    session.env["PIP_RETRIES"] = "1"
    try:
        install(session, *editable(), *TOOLS)
        if plugin in ENGINES:
            session.install("-e", f"{PLUGINS[plugin]}[engine]")  # brings the torch that it needs
    except CommandFailed:
        session.warn(f"pip cannot install all of it: {sys.executable} is used as it is")
        python = sys.executable
    with PARTS.part(session.name, "parts"):
        session.run(python, *how, external=True)


def reports(plugin: str) -> list[str]:
    """Options that write every kind of report under ``out/conformance``."""
    folder = OUT / "conformance"
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{plugin}-cpu"
    kinds = {"json": "json", "junit": "xml", "markdown": "md", "html": "html", "badge": "svg"}
    options = [part for kind, end in kinds.items() for part in (f"--{kind}", f"{stem}.{end}")]
    return ["--device", "cpu", *options]


@nox.session(venv_backend="none")
def quickstart(session: nox.Session) -> None:
    """``rl train``: a tiny model learns to add, by example and then by reward.

    Arguments are those of ``examples/train/grpo.yaml``, such as ``generation.backend=vllm``.
    """
    engines = [name for name in ENGINES if f"generation.backend={name}" in session.posargs]
    environment(session, *engines[:1])
    made = OUT / "quickstart"
    shutil.rmtree(made, ignore_errors=True)
    run(session, "model and data", "python", "-m", "examples.additions", str(made))
    run(session, "SFT", "rl", "train", "examples/train/sft.yaml")
    run(session, "GRPO", "rl", "train", "examples/train/grpo.yaml", *session.posargs)


@nox.session(venv_backend="none")
def real(session: nox.Session) -> None:
    """``rl train``: a real, pretrained chat model learns to add, by reward; draws the curves.

    Arguments are an engine, ``vllm`` or ``sglang``, and keys of ``examples/real/grpo.yaml``.
    """
    engines = [name for name in ENGINES if name in session.posargs]
    environment(session, *engines[:1])
    made = OUT / "real"
    shutil.rmtree(made, ignore_errors=True)
    run(session, "model and data", "python", "examples/real/make.py", str(made))
    keys = [f"generation.backend={a}" if a in ENGINES else a for a in session.posargs]
    run(session, "GRPO", "rl", "train", "examples/real/grpo.yaml", *keys)


@nox.session(name="real-model", venv_backend="none")
@nox.parametrize("plugin", ["hf", *ENGINES], ids=["hf", *ENGINES])
def real_model(session: nox.Session, plugin: str) -> None:
    """A part of the suite, steps of GRPO and refits with the model of ``real``."""
    environment(session, plugin if plugin in ENGINES else "")
    made = OUT / "real"
    shutil.rmtree(made, ignore_errors=True)
    run(session, "model and data", "python", "examples/real/make.py", str(made))
    part = session.posargs or ["--timeout", "600", "-k", WITH_A_REAL_MODEL]
    model = ["--model", str(made / "model")]
    run(session, "suite", "rl", "conformance", "run", plugin, *model, *part)
    keys = [f"generation.backend={plugin}", "steps=5", "refit.verify=installed"]
    run(session, "GRPO", "rl", "train", "examples/real/grpo.yaml", *keys)
    script = ["python", "benchmarks/real_model.py"]
    run(session, "refits", *script, "refits", plugin)
    if plugin == "hf":
        run(session, "step, and TRL's", *script, "step")


@nox.session
def nemo(session: nox.Session) -> None:
    """NeMo RL's own loops, as they are, from a checkout: ``nox -s nemo -- CHECKOUT``."""
    # It refuses transformers of 5.12 and above, which the other sessions run with.
    other = ("transformers==", "tokenizers==")
    lines = [
        line for line in Path(CONSTRAINTS).read_text().splitlines() if not line.startswith(other)
    ]
    constraints = OUT / "nemo" / "constraints.txt"
    constraints.parent.mkdir(parents=True, exist_ok=True)
    constraints.write_text("\n".join(lines))
    install(session, *editable(), *FOR_NEMO, constraints=str(constraints))
    with PARTS.part(session.name, "loops"):
        session.run("python", "-W", "ignore", "plugins/rl-nemo/real/run.py", *session.posargs)


@nox.session
def verl(session: nox.Session) -> None:
    """The checkpoint engine of rl-guests, in verl's registry and under its manager on Ray."""
    install(session, *editable(), "pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
    with PARTS.part(session.name, "pytest"):
        session.env["PIP_CONSTRAINT"] = ""
        session.install("--no-deps", "--no-compile", *FOR_VERL)
        tests = [f"plugins/rl-guests/tests/test_guests_verl{part}.py" for part in ("", "_manager")]
        session.run("pytest", "-W", "ignore", *tests, *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Every benchmark, as ratios within one run; JSON under out/bench.

    ``nox -s bench -- --against COMMIT`` compares with another commit instead; see
    benchmarks/README.md.
    """
    install(session, *editable(), "matplotlib", "tensordict", "typer")
    folder = OUT / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    if "--against" in session.posargs:
        at = session.posargs.index("--against")
        compare_with(session, session.posargs[at + 1], folder, session.posargs[at + 2 :])
        return
    for script in sorted((ROOT / "benchmarks").glob("bench_*.py")):
        session.run("python", str(script), "--json", str(folder / f"{script.stem}.json"))
    plots = ["benchmarks/plots.py", str(folder / "bench_refit.json"), "--out", str(folder)]
    session.run("python", *plots)


def compare_with(session: nox.Session, commit: str, folder: Path, options: list[str]) -> None:
    """Another commit in a worktree and an environment of its own, with the same pinned packages."""
    tree, python = folder / "against", str(folder / "against-env" / SCRIPTS / "python")
    shutil.rmtree(tree, ignore_errors=True)  # of a run that was ended
    session.run("git", "worktree", "add", "--detach", "-f", str(tree), commit, external=True)
    try:
        found = [*tree.glob("plugins/*/pyproject.toml"), tree / "tests/conformance/pyproject.toml"]
        parts = [
            part
            for file in (tree / CORE / "pyproject.toml", *found)
            for part in ("-e", str(file.parent))
        ]
        make = ["-m", "virtualenv", "-q", "--clear", str(folder / "against-env")]
        session.run(sys.executable, *make, external=True)
        session.run(python, *PIP_INSTALL, *parts, "typer", "matplotlib", external=True)
        sides = ["--before", str(tree), "--before-python", python]
        result = str(folder / "against.json")
        session.run("python", "benchmarks/compare.py", *sides, "--json", result, *options)
    finally:
        session.run("git", "worktree", "remove", "--force", str(tree), external=True)


@nox.session(name="bench-engine", venv_backend="none")
@nox.parametrize("plugin", list(ENGINES), ids=list(ENGINES))
def bench_engine(session: nox.Session, plugin: str) -> None:
    """A plugin next to its bare engine, in the engine's environment."""
    environment(session, plugin)
    result = str(OUT / "bench" / f"engine_{plugin}.json")
    run(session, "benchmark", "python", f"benchmarks/engine_{plugin}.py", "--json", result)
    result = str(OUT / "bench" / f"callers_{plugin}.json")
    callers = ["benchmarks/bench_callers.py", "--backend", plugin, "--json", result]
    run(session, "many callers", "python", *callers)


@nox.session
def fuzz(session: nox.Session) -> None:
    """A million inputs for all that reads what another process wrote, guided by coverage."""
    install(session, "-e", CORE, "atheris")
    target = ["core/tests/support/fuzz_messages.py", "--runs", "1000000"]
    with PARTS.part(session.name, "atheris"):
        session.run("python", *target, *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Builds every wheel and tries them in an environment that has nothing else."""
    chosen = selection()
    packages = [path.rpartition("/")[2].replace("-", "_") for path in DISTRIBUTIONS]
    packages = [{"core": "rl_core", "conformance": "rl_conformance"}.get(p, p) for p in packages]
    if chosen is not None and not chosen.concerns_packages(*packages):
        leave_out(session, "wheels")
        return
    empty = environment_of_wheels(session)
    rl, elsewhere = str(empty / SCRIPTS / "rl"), {**os.environ, **COMPILE, "PYTHONPATH": ""}
    smoke = ["conformance", "run", "hf", "-k", "D1 or G5 or P6 or what_was_committed"]
    with PARTS.part(session.name, "first checks"), session.chdir(empty):
        for arguments in (["backends", "list"], ["backends", "doctor", "hf"], smoke):
            session.run(rl, *arguments, external=True, env=elsewhere)


@nox.session
def tutorial(session: nox.Session) -> None:
    """All of the tutorial: a backend from nothing to a whole report, with nothing but wheels."""
    empty = environment_of_wheels(session)
    with PARTS.part(session.name, "tutorial"):
        follow_tutorial(session, empty)
    require_whole(session, empty.parent / "tutorial" / "rl-mine" / "report.json")


def environment_of_wheels(session: nox.Session) -> Path:
    """An environment with every wheel, which are built first, and nothing else."""
    install(session, "build", "hatchling")
    folder = OUT / "wheels"
    shutil.rmtree(folder, ignore_errors=True)
    build = ["-m", "build", "--wheel", "--no-isolation", "-o", str(folder)]
    with PARTS.part(session.name, "build"):
        for path in DISTRIBUTIONS:
            session.run("python", *build, path, silent=True)
    built = sorted(str(wheel) for wheel in folder.glob("*.whl"))
    empty = Path(session.create_tmp()).resolve() / "empty"
    shutil.rmtree(empty, ignore_errors=True)
    with PARTS.part(session.name, "install"):
        session.run("python", "-m", "venv", str(empty))
        session.run(str(empty / SCRIPTS / "python"), *PIP_INSTALL, *built, external=True)
    return empty


def follow_tutorial(session: nox.Session, environment: Path, *options: str) -> None:
    """Somebody else's backend, made, broken, mended and checked as the tutorial says."""
    directory = environment.parent / "tutorial"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    tutorial = ["tests/tutorial.py", "docs/write-a-backend.md"]
    where = ["--directory", str(directory), "--environment", str(environment)]
    # The models are tiny: a second thread costs more than it brings.
    settings = {"PIP_CONSTRAINT": CONSTRAINTS, "OMP_NUM_THREADS": "1", "COLUMNS": "120", **COMPILE}
    session.run("python", *tutorial, *where, *options, env={"PYTHONPATH": "", **settings})


def require_whole(session: nox.Session, path: Path) -> None:
    """Fails unless every clause has a status, or is core's, and none is bad."""
    report = json.loads(path.read_text(encoding="utf-8"))
    statuses = {clause["id"]: clause["status"] for clause in report["clauses"]}
    contract = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    clauses = re.findall(r"(?m)^- ([A-Z]\d+) ", contract)
    statuses |= dict.fromkeys(re.findall(r"[A-Z]\d+", report["cites"]), "see core")
    without = [c for c in clauses if not statuses.get(c)]
    if report["verdict"] != "conformant" or report["selection"] or without:
        session.error(f"{path}: {report['verdict']}, without a status: {without}")


@nox.session
def docs(session: nox.Session) -> None:
    """Builds the documentation; a dead link or a missing page is an error."""
    install(session, *editable(), "mkdocs-material", "mkdocstrings[python]")
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    session.run("mkdocs", "build", "--strict", "--site-dir", str(OUT / "site"), *session.posargs)
