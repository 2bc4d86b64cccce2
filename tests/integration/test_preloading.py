"""Before it forks workers a server imports their backend, and a CUDA that was asked forks badly."""

from __future__ import annotations

import json
import subprocess
import sys

from rl_cli.listing import list_backends
from rl_hosting.local_cluster import PRELOAD

#: Imports modules with a torch that says it sees eight GPUs; prints who asked it.
LOOK = """
import importlib, json, sys, traceback
import torch

asked = []

def watched(name, answer):
    def ask(*args, **kwargs):
        [caller, _] = traceback.extract_stack(limit=2)
        asked.append(f"{name} by {caller.filename}:{caller.lineno}")
        return answer
    return ask

answers = {
    "is_available": True, "device_count": 8, "current_device": 0, "init": None, "_lazy_init": None,
    "get_device_capability": (9, 0), "get_device_name": "GPU", "get_device_properties": None,
    "mem_get_info": (1, 1), "is_bf16_supported": True, "set_device": None, "current_stream": None,
}
for name, answer in answers.items():
    setattr(torch.cuda, name, watched(name, answer))
for module in sys.argv[1:]:
    importlib.import_module(module)
print(json.dumps(asked))
"""


def test_what_is_imported_before_a_fork_asks_nothing_of_cuda() -> None:
    manifests = [listing.manifest for listing in list_backends()]
    paths = [path for found in manifests if found for path in found.factories.values()]
    factories = {path.partition(":")[0] for path in paths}
    assert len(factories) >= 6  # of hf, megatron, sglang, sglang-server, vllm
    ran = subprocess.run(
        [sys.executable, "-c", LOOK, *PRELOAD, *sorted(factories)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == []
