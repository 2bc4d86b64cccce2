"""S1 and S3 again: no path unpickles what was received, no path runs a checkpoint's code."""

from __future__ import annotations

import json
import pickle
import shutil
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from rl_conformance.doubles import TensorEngine, TensorPolicy
from rl_conformance.expect import fail, require
from rl_conformance.refits import odd_tensors, run_refit
from rl_conformance.registry import CORE, check
from rl_conformance.ways import by_ticket
from rl_conformance.weights import same_weights
from rl_core.errors import RLError

if TYPE_CHECKING:
    from pathlib import Path

    from rl_conformance.context import Context

_CODE = """
import os
os.mkdir({marker!r})
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen2ForCausalLM
class RemoteConfig(PretrainedConfig):
    model_type = "qwen2"
class RemoteModel(Qwen2ForCausalLM):
    pass
class RemoteTokenizer(PreTrainedTokenizerFast):
    pass
"""
#: Which file names which class of the checkpoint's own, and by which key.
_PLACES: dict[str, dict[str, Any]] = {
    "configuration": {"file": "config.json", "own": {"AutoConfig": "remote_code.RemoteConfig"}},
    "model": {"file": "config.json", "own": {"AutoModelForCausalLM": "remote_code.RemoteModel"}},
    "tokenizer": {
        "file": "tokenizer_config.json",
        "own": {"AutoTokenizer": ["remote_code.RemoteTokenizer", "remote_code.RemoteTokenizer"]},
    },
}


@check(
    "S3",
    cases={
        f"{kind}_{place}": {"kind": kind, **_PLACES[place]}
        for kind in ("generation", "policy")
        for place in _PLACES
    },
    needs=(),
)
def code_of_one_part_does_not_run(ctx: Context, kind: str, file: str, own: dict[str, Any]) -> None:
    """Of a known architecture, code for the configuration, the model or the tokenizer stays out."""
    if kind not in ctx.manifest.kinds:
        ctx.not_run(f"the backend offers no {kind}", excused=True)
    path, marker = ctx.directory() / "partly-remote", ctx.directory() / "code-was-run"
    shutil.copytree(ctx.model("qwen2"), path)
    (path / "remote_code.py").write_text(_CODE.format(marker=str(marker)))
    described = json.loads((path / file).read_text()) | {"auto_map": own}
    if file == "tokenizer_config.json":
        described["tokenizer_class"] = "RemoteTokenizer"
    (path / file).write_text(json.dumps(described))
    _build_and_use(ctx, kind, path)
    require(not marker.exists(), "the repository's code was run")


def _build_and_use(ctx: Context, kind: str, path: Path) -> None:
    """Builds a backend, which it may refuse, and asks it for something."""
    try:
        backend = getattr(ctx, f"fresh_{kind}")(model_name=str(path))
    except (RLError, ValueError, OSError):
        return
    if kind == "generation":
        backend.prepare_for_generation()
        backend.generate(ctx.prompts(3), greedy=True)
    else:
        backend.get_logprobs(ctx.prompts(3))
        backend.get_reference_policy_logprobs(ctx.prompts(3))


_REFITS: tuple[dict[str, Any], ...] = (
    {},
    {"mode": "packed"},
    {"transport": "collective"},
    {"delta": True},
)


@check("S1", needs=(CORE,))
def no_refit_unpickles(ctx: Context) -> None:
    """Over shared memory, a group, and by ticket: nothing is given to pickle or torch.load."""
    policy = ctx.closing(TensorPolicy(odd_tensors(1)))
    engine = ctx.closing(TensorEngine(odd_tensors(2)))
    run_refit(policy, engine, transport="collective")  # opens the group

    def refused(*_: Any, **__: Any) -> Any:
        fail("what was received is unpickled")

    with ExitStack() as patches:
        for module, name in (
            (pickle, "loads"),
            (pickle, "load"),
            (pickle, "Unpickler"),
            (torch, "load"),
        ):
            patches.enter_context(mock.patch.object(module, name, refused))
        for seed, options in enumerate(_REFITS, 3):
            for tensor in policy.tensors.values():
                if tensor.is_floating_point():
                    tensor.copy_(tensor.float() + seed)  # nothing adds float8
            run_refit(policy, engine, **options)
            same_weights(engine.tensors, policy.tensors, "engine")
        by_ticket(policy, engine)
    same_weights(engine.tensors, policy.tensors, "engine")
