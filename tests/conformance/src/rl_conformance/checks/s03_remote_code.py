"""S3: code of a checkpoint."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rl_conformance.expect import raises, require
from rl_conformance.registry import check
from rl_core.errors import ConfigError, RLError

if TYPE_CHECKING:
    from pathlib import Path

    from rl_conformance.context import Context


_REMOTE = """
import os
os.mkdir({marker!r})
from transformers import Qwen2Config, Qwen2ForCausalLM
class RemoteConfig(Qwen2Config):
    model_type = "remote-of-rl-conformance"
class RemoteModel(Qwen2ForCausalLM):
    config_class = RemoteConfig
"""


@check(
    "S3",
    cases={"generation": {"kind": "generation"}, "policy": {"kind": "policy"}},
    needs=(),
)
def remote_code_does_not_run(ctx: Context, kind: str) -> None:
    """A checkpoint that brings code raises ConfigError and its code is not imported."""
    if kind not in ctx.manifest.kinds:
        ctx.not_run(f"the backend offers no {kind}", excused=True)
    path, marker = _with_remote_code(ctx)
    with raises(ConfigError, "trust_remote_code"):
        getattr(ctx, f"fresh_{kind}")(model_name=str(path))
    require(not marker.exists(), "the checkpoint's own code", "it is not run", "it was run")


def _with_remote_code(ctx: Context) -> tuple[Path, Path]:
    """A checkpoint with its own classes of configuration and model, and the folder they create."""
    path, marker = ctx.directory() / "remote", ctx.directory() / "code-was-run"
    shutil.copytree(ctx.model("qwen2"), path)
    (path / "remote_code.py").write_text(_REMOTE.format(marker=str(marker)))
    config = json.loads((path / "config.json").read_text())
    config["model_type"] = "remote-of-rl-conformance"
    config["architectures"] = ["RemoteModel"]
    config["auto_map"] = {
        "AutoConfig": "remote_code.RemoteConfig",
        "AutoModelForCausalLM": "remote_code.RemoteModel",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path, marker


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
    backend = None
    with suppress(RLError, ValueError, OSError):  # a backend may refuse it
        backend = getattr(ctx, f"fresh_{kind}")(model_name=str(path))
    if backend is not None and kind == "generation":
        backend.prepare_for_generation()
        backend.generate(ctx.prompts(3), greedy=True)
    elif backend is not None:
        backend.get_logprobs(ctx.prompts(3))
        backend.get_reference_policy_logprobs(ctx.prompts(3))
    require(not marker.exists(), "the checkpoint's own code", "it is not run", "it was run")
