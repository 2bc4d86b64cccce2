"""Writes ``docs/reference/configuration.md``: every configuration key, from its TypedDict.

``python docs/hooks/keys.py`` writes the page; with ``--check`` it fails if the page is not current.
Types and ranges are those that a configuration is checked against; defaults and meanings come from
the docstring beside them.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from rl_backends.engine.config import EngineLoraConfig
from rl_core.config import config_keys
from rl_core.interfaces import specs
from rl_core.interfaces.constraints import Range, Unsupported
from rl_core.weights.options import SendOptions
from rl_hf import config as hf
from rl_hosting.server.config import ServerConfig
from rl_losses import DPOLossFn, GRPOLossFn, NLLLossFn, TopkKLLossFn
from rl_megatron.config import MegatronPolicyConfig
from rl_sglang.config import SglangConfig, SglangEngineConfig
from rl_train import config as train
from rl_vllm.config import VllmConfig, VllmEngineConfig

PAGE = Path(__file__).parents[1] / "reference" / "configuration.md"
HEAD = """# Configuration keys

<!-- Written by docs/hooks/keys.py. Change the docstrings of the TypedDicts, then run it. -->

The first sections have the keys of a file for `rl train`. The other sections have the keys of its sections `policy` and
`generation`, which are also those of `create_policy` and `create_generation` in Python. An unknown key, or a value of the wrong
type or out of range, raises `ConfigError` before a model is loaded. Only the keys that are marked **required** must be there.
`section.key` is a key of a mapping inside the mapping. The [glossary](../guide/terms.md) explains the words.

```python
from rl_core import create_policy

config = {
    "backend": "hf",
    "model_name": path,
    "optimizer": {"lr": 1e-6, "weight_decay": 0.0},
    "scheduler": {"name": "cosine", "warmup_steps": 10, "total_steps": 100},
    "max_grad_norm": 1.0,
}
policy = create_policy(config)
```

`rl train` reads `1e-6` in a YAML file as a number. If your own loop reads the file with PyYAML, write `1.0e-6`: PyYAML reads
`1e-6` as a string.
"""
#: A whole sentence at the end, such as "Default 1.0." or "Default: the model's."
_DEFAULT = re.compile(r"(?:^|(?<=\. )|(?<=\) ))Default:? ((?:[^.]|\.(?=\w))+)\.")
MODEL = (hf.HuggingFaceModelConfig,)
#: Title, backends, prefix of the keys, and the TypedDicts or dataclasses that declare them.
SECTIONS: list[tuple[str, str, str, tuple[type, ...]]] = [
    ("rl train", "all", "", (train.RunConfig,)),
    ("rl train: data", "all", "data.", (train.DataConfig,)),
    ("rl train: rewards", "all", "rewards.", (train.RewardsConfig,)),
    ("rl train: one reward", "all", "rewards.functions[].", (train.RewardConfig,)),
    ("rl train: GRPO", "all", "grpo.", (train.GrpoConfig,)),
    ("rl train: several turns", "all", "environment.", (train.EnvironmentConfig,)),
    ("rl train: where backends run", "all", "placement.", (train.PlacementConfig,)),
    ("rl train: one place", "all", "placement.policy.", (train.PlaceConfig,)),
    ("rl train: evaluation", "all", "evaluation.", (train.EvaluationConfig,)),
    ("rl train: checkpoints", "all", "checkpoint.", (train.CheckpointConfig,)),
    ("rl train: log", "all", "log.", (train.LogConfig,)),
    ("Policy", "hf, megatron", "", (specs.PolicyConfig,)),
    ("Optimizer", "hf, megatron", "optimizer.", (specs.OptimizerConfig,)),
    ("Learning rate", "hf, megatron", "scheduler.", (specs.SchedulerConfig,)),
    ("Dynamic batching", "hf, megatron", "dynamic_batching.", (specs.DynamicBatchingConfig,)),
    ("Sequence packing", "hf, megatron", "sequence_packing.", (specs.SequencePackingConfig,)),
    ("Policy: Hugging Face", "hf", "", (hf.HuggingFacePolicyConfig,)),
    ("LoRA", "hf", "lora.", (hf.LoraConfig,)),
    ("Loading a checkpoint: Hugging Face", "hf (policy and generation)", "", MODEL),
    ("Policy: Megatron", "megatron", "", (MegatronPolicyConfig,)),
    ("Generation", "hf, vllm, sglang, vllm-server, sglang-server", "", (specs.GenerationConfig,)),
    ("Sharing a device", "hf, vllm, sglang", "colocated.", (specs.ColocationConfig,)),
    ("Generation: Hugging Face", "hf", "", (hf.HuggingFaceGenerationConfig,)),
    ("Generation: vLLM", "vllm", "", (VllmConfig,)),
    ("How vLLM is started", "vllm", "vllm_cfg.", (VllmEngineConfig,)),
    ("Generation: SGLang", "sglang", "", (SglangConfig,)),
    ("How SGLang is started", "sglang", "sglang_cfg.", (SglangEngineConfig,)),
    (
        "Adapters that an engine serves",
        "vllm, sglang (`sglang_cfg.lora`)",
        "vllm_cfg.lora.",
        (EngineLoraConfig,),
    ),
    ("Generation: a running server", "vllm-server, sglang-server", "", (ServerConfig,)),
    ("Options of refit()", "all", "", (SendOptions,)),
    ("GRPOLossFn", "all policies", "", (GRPOLossFn,)),
    ("DPOLossFn", "all policies", "", (DPOLossFn,)),
    ("NLLLossFn", "all policies", "", (NLLLossFn,)),
    ("TopkKLLossFn", "all policies", "", (TopkKLLossFn,)),
]
#: Classes that others extend, by the section that has their keys.
EXTENDED: dict[str, type] = {
    "[Policy](#policy)": specs.PolicyConfig,
    "[Generation](#generation)": specs.GenerationConfig,
    "[Loading a checkpoint](#loading-a-checkpoint-hugging-face)": hf.HuggingFaceModelConfig,
}


def page() -> str:
    """The whole page, as Markdown."""
    parts = [HEAD]
    for title, backends, prefix, classes in SECTIONS:
        keys = {key for spec in classes for key in spec.__annotations__}
        extended = [
            link
            for link, spec in EXTENDED.items()
            if spec not in classes and keys > spec.__annotations__.keys()
        ]
        also = f" Also the keys of {' and '.join(extended)}." if extended else ""
        parts.append(f"## {title}\n\nBackends: {backends}.{also}\n")
        parts.append("| key | type | range | default | meaning |\n|---|---|---|---|---|")
        parts[-1] += "".join(row for spec in classes for row in rows(spec, prefix)) + "\n"
    return "\n".join(parts)


def rows(spec: type, prefix: str) -> list[str]:
    """The rows of the keys that a class declares itself, inherited ones left out."""
    meanings = attributes(spec)
    # A TypedDict of Python 3.11 does not know its bases; its docstring has only its own keys.
    inherited = {key for base in EXTENDED.values() for key in base.__annotations__} - {*meanings}
    hints = get_type_hints(spec, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(spec)} if dataclasses.is_dataclass(spec) else {}
    found = []
    for key, hint in hints.items():
        if key.startswith("_") or key in inherited or get_origin(hint) is ClassVar:
            continue
        inner = get_args(hint)[0] if get_origin(hint) is NotRequired else hint
        refused = any(isinstance(mark, Unsupported) for mark in getattr(inner, "__metadata__", ()))
        if refused and key not in meanings:  # another library's key, which is there to be explained
            continue
        if fields and key not in fields:  # fixed by the class, not an option
            continue
        required = not fields and config_keys(spec)[key]
        shown, bounds = described(hint)
        meaning = meanings.get(key, "")
        default = ""
        if match := _DEFAULT.search(meaning):
            default, meaning = match[1], (meaning[: match.start()] + meaning[match.end() :]).strip()
        if key in fields and fields[key].default is not dataclasses.MISSING:
            value = fields[key].default
            default = f"`{getattr(value, 'name', None) or repr(value)}`"
        cells = [
            f"`{prefix}{key}`",
            shown,
            bounds,
            "**required**" if required else default,
            meaning,
        ]
        found.append("\n| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return found


def attributes(spec: type) -> dict[str, str]:
    """What the docstring of a class has about each of its attributes, on one line."""
    text = inspect.getdoc(spec) or ""
    _, _, body = text.partition("Attributes:\n")
    found = re.findall(r"(?m)^    (\w+): (.*(?:\n     +.*)*)", body)
    return {key: plain(" ".join(meaning.split())) for key, meaning in found}


def plain(text: str) -> str:
    """A docstring's text as Markdown: a class with a section becomes a link, other names code."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    for title, _, _, classes in SECTIONS:
        anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for spec in classes:
            text = text.replace(f"`{spec.__name__}`", f"[{title}](#{anchor})")
    return text


def described(hint: Any) -> tuple[str, str]:
    """The type as a user writes it, and its range."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (NotRequired, Required):
        return described(arguments[0])
    if origin is Annotated:
        bounds = [str(mark) for mark in arguments[1:] if isinstance(mark, Range)]
        bounds += ["only None" for mark in arguments[1:] if isinstance(mark, Unsupported)]
        return described(arguments[0])[0], ", ".join(bounds)
    if origin is Literal:
        return " or ".join(f"`{value!r}`" for value in arguments), ""
    if origin in (Union, types.UnionType):
        inner = [described(one) for one in arguments]
        return " or ".join(one[0] for one in inner), ", ".join(one[1] for one in inner if one[1])
    if origin is not None:
        inside = ", ".join(described(one)[0] for one in arguments if one is not Ellipsis)
        return f"{origin.__name__} of {inside}", ""
    if hint is types.NoneType:
        return "None", ""
    name = getattr(hint, "__name__", str(hint))
    return ("mapping" if name.endswith("Config") else name), ""


def main() -> int:
    """Writes the page, or compares it.

    Returns:
        1 if ``--check`` was given and the page is not current.
    """
    text = page()
    if "--check" in sys.argv:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        if not current:
            print(f"{PAGE} is not current: run python docs/hooks/keys.py")
        return 0 if current else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
