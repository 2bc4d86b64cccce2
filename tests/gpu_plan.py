"""What ``tests/gpu_run.py`` runs: programs that fit into ten minutes each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Part", "plan"]

#: Seconds of any part: machines with GPUs are lent for ten minutes at a time.
LIMIT_S = 570.0
_FIRST = "{0}1 or {0}2 or {0}3 or {0}4 or {0}5 or {0}6 or {0}7"
#: The suite in pieces that fit: which options choose each, and the clause of it that is rehearsed.
PIECES: dict[str, tuple[tuple[str, ...], str]] = {
    "discovery": (("--kind", "discovery"), "D1"),
    "generation-1": (("--kind", "generation", "-k", _FIRST.format("G")), "G1"),
    "generation-2": (("--kind", "generation", "-k", f"not ({_FIRST.format('G')})"), "G8"),
    "policy": (("--kind", "policy"), "P1"),
    "refit-1": (("--kind", "refit", "-k", _FIRST.format("R")), "R1"),
    "refit-2": (("--kind", "refit", "-k", f"not ({_FIRST.format('R')})"), "R12"),
    "agreement": (("--kind", "agreement"), "A1"),
    "security": (("--kind", "security"), "S1"),
}
#: Pieces that are about what a backend is not.
NOT_OF = {
    "megatron": ("generation-1", "generation-2"),
    "vllm": ("policy",),
    "sglang": ("policy",),
}
#: The tests that need a GPU; others import what may not be here.
TESTS = (
    "core/tests/weights/transports/test_cuda.py",
    "core/tests/weights/unit/test_hashing.py",
    "plugins/rl-hf/tests/test_hf_generation.py",
    "plugins/rl-hf/tests/test_hf_refit.py",
)
#: What :data:`TESTS` need besides what the suite does.
FOR_TESTS = ("hypothesis",)


@dataclass(frozen=True)
class Part:
    """One program, and what it writes.

    Attributes:
        name: What users call it by.
        backend: In whose environment it runs.
        what: What it does.
        command: After the name of the Python program.
        limit_s: Seconds after which it is stopped.
        report: The file that its figures are in.
        gpu_gb: Memory that the GPU must have, in 10^9 bytes.
        needs: Distributions besides those of its backend.
    """

    name: str
    backend: str
    what: str
    command: Sequence[str]
    limit_s: float
    report: str = ""
    gpu_gb: int = 0
    needs: Sequence[str] = ()


def plan(folder: Path, *, rehearse: bool = False) -> list[Part]:
    """All parts, in the order in which they run.

    Args:
        folder: Where they write.
        rehearse: On the CPU, with tiny inputs, and with the tests of an emulated GPU.
    """
    rl, device = ("-m", "rl_cli"), "cpu" if rehearse else "cuda"

    def suite(name: str, backend: str, some: Sequence[str], what: str, inside: str) -> Part:
        stem = folder / name
        kinds = {"json": "json", "junit": "xml", "markdown": "md"}
        writes = [part for kind, end in kinds.items() for part in (f"--{kind}", f"{stem}.{end}")]
        command = (*rl, "conformance", "run", backend, "--device", device, *writes, *some)
        return Part(name, inside, what, command, LIMIT_S, f"{name}.json")

    def conformance(backend: str) -> list[Part]:
        found = []
        for piece, (chosen, clause) in PIECES.items():
            if piece not in NOT_OF.get(backend, ()):
                some = ("-k", clause) if rehearse else chosen
                what = f"of the suite against {backend}: {' '.join(some)}"
                found.append(suite(f"conformance-{backend}-{piece}", backend, some, what, backend))
        return found

    def bench(gigabytes: int, tensors: int, repeats: int, gpu_gb: int) -> Part:
        size = (gigabytes / 100, 10, 1) if rehearse else (gigabytes, tensors, repeats)
        options = zip(("--gb", "--tensors", "--repeats"), map(str, size), strict=True)
        command = ["benchmarks/refit_copies.py", "--json", "--device", device]
        command += [part for option in options for part in option]
        name, what = f"bench-{gigabytes}gb", f"refits of {size[0]:g} GB next to plain copies"
        return Part(name, "hf", what, command, LIMIT_S, f"{name}.json", 0 if rehearse else gpu_gb)

    core = ("-k", "B1") if rehearse else ()
    marked, files = ("not gpu", TESTS[1:2]) if rehearse else ("gpu", TESTS)
    # Warnings of another torch than the one that CI has are no failures here.
    plain = ("-q", "-o", "filterwarnings=default", "--junit-xml", str(folder / "tests.xml"))
    tests = ("-m", "pytest", *plain, "-m", marked, *files)
    what = f"tests that are marked {marked}"
    return [
        Part("doctor", "hf", "what is installed", (*rl, "backends", "doctor", "hf"), 120),
        Part("tests", "hf", what, tests, LIMIT_S, "tests.xml", needs=FOR_TESTS),
        suite("conformance-core", "core", core, "what core alone keeps", "hf"),
        *conformance("hf"),
        # A model at both ends, the memory of a bound, and buckets.
        bench(1, 200, 5, 6),
        bench(16, 340, 3, 80),
        *(part for backend in ("megatron", "vllm", "sglang") for part in conformance(backend)),
    ]
