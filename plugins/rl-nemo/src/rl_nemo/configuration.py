"""NeMo RL's configuration keys as those of rl-core's backends, and a list of what has no place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_core.errors import ConfigError
from rl_nemo.synchronizer import refuse

__all__ = ["Translation", "generation_config", "policy_config"]


@dataclass(frozen=True)
class Translation:
    """A configuration for ``create_policy`` or ``create_generation``.

    Attributes:
        config: The keys that have a place here.
        dropped: Those that do not and are set to something, with their values, by dotted name.
    """

    config: dict[str, Any] = field(default_factory=dict)
    dropped: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"  {key}: {value!r}" for key, value in self.dropped.items()]
        return "\n".join(["these keys are ignored:", *lines]) if lines else "all keys are used"


def _lora(given: Mapping[str, Any]) -> dict[str, Any] | None:
    if not given.get("enabled"):
        return None
    named = given.get("target_modules")
    return {
        "r": given["dim"],
        "alpha": float(given["alpha"]),
        "dropout": given.get("dropout", 0.0),
        "target_modules": list(named) if named else "all-linear",
    }


def _optimizer(given: Mapping[str, Any]) -> dict[str, Any]:
    name = str(given.get("name", "AdamW")).rpartition(".")[2]
    if name.lower() not in ("adamw", "adam"):
        raise ConfigError(
            f"the optimizer {given['name']!r} is not supported", fix="use AdamW", key="optimizer"
        )
    known = ("lr", "weight_decay", "betas", "eps")
    kwargs = given.get("kwargs") or {}
    chosen = {key: kwargs[key] for key in known if key in kwargs}
    return chosen | ({"betas": tuple(chosen["betas"])} if "betas" in chosen else {})


def _unless_auto(given: str) -> str | None:
    return None if given == "auto" else given


#: From their dotted names to ours, with what makes our value of theirs.
Table = Mapping[str, tuple[str, Callable[[Any], Any] | None]]


def _same(*keys: str, section: str = "") -> Table:
    """Keys that have the same name here."""
    return {f"{section}{key}": (f"{section}{key}", None) for key in keys}


_POLICY: Table = {
    **_same("model_name", "train_global_batch_size", "train_micro_batch_size"),
    **_same("logprob_batch_size", "max_grad_norm"),
    "precision": ("torch_dtype", None),
    "generation.temperature": ("temperature", None),
    "router_replay.enabled": (
        "",
        lambda given: given and refuse("router_replay", "no engine here returns routed_experts"),
    ),
    **_same(
        "enabled",
        "train_mb_tokens",
        "logprob_mb_tokens",
        "sequence_length_round",
        section="dynamic_batching.",
    ),
    **_same(
        "enabled", "train_mb_tokens", "logprob_mb_tokens", "algorithm", section="sequence_packing."
    ),
}
_DTENSOR: Table = {
    **_POLICY,
    "optimizer": ("optimizer", _optimizer),
    "dtensor_cfg.enabled": ("dtensor_cfg.enabled", None),
    "dtensor_cfg.activation_checkpointing": ("gradient_checkpointing", None),
    "dtensor_cfg.lora_cfg": ("lora", _lora),
}
_MEGATRON: Table = {
    **_POLICY,
    "megatron_cfg.enabled": ("", None),
    "megatron_cfg.activation_checkpointing": (
        "activation_recompute",
        lambda given: "full" if given else "none",
    ),
    **{
        f"megatron_cfg.{key}": (key, None)
        for key in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "sequence_parallel",
        )
    },
    "megatron_cfg.optimizer.lr": ("optimizer.lr", None),
    "megatron_cfg.optimizer.weight_decay": ("optimizer.weight_decay", None),
    "megatron_cfg.optimizer.adam_eps": ("optimizer.eps", None),
}
#: Values of keys that have no place, at which nothing is lost.
_AS_HERE = {"sequence_packing.microbatch_order": "largest_first"}
#: By the section that enables it: the backend, and its table.
_TRAINERS = {"dtensor_cfg": ("hf", _DTENSOR), "megatron_cfg": ("megatron", _MEGATRON)}

#: Keys for training, which have twins for validation.
_SAMPLING = ("temperature", "top_p", "top_k")
_GENERATION: Table = {
    **_same(
        "backend",
        "model_name",
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stop_token_ids",
        "stop_strings",
    ),
    "_pad_token_id": ("pad_token_id", None),
    "colocated.enabled": ("colocated.enabled", None),
    "use_async_rollouts": ("", None),
    "bad_words": (
        "",
        lambda given: given and refuse("bad_words", "no engine here leaves out words"),
    ),
    **{f"val_{key}": ("", None) for key in _SAMPLING},
}
_VLLM: Table = {
    "vllm_cfg.precision": ("vllm_cfg.dtype", None),
    "vllm_cfg.logprobs_mode": ("logprobs_mode", lambda given: given.removesuffix("_logprobs")),
    "vllm_cfg.max_model_len": ("max_model_len", None),
    **_same(
        "async_engine",
        "enforce_eager",
        "gpu_memory_utilization",
        "load_format",
        "pipeline_parallel_size",
        "tensor_parallel_size",
        section="vllm_cfg.",
    ),
    "vllm_cfg.kv_cache_dtype": ("vllm_cfg.kv_cache_dtype", _unless_auto),
    "vllm_kwargs": ("vllm_cfg.engine_args", None),
}
_SGLANG: Table = {
    "sglang_cfg.context_length": ("max_model_len", None),
    "sglang_cfg.kv_cache_dtype": ("sglang_cfg.kv_cache_dtype", _unless_auto),
    **_same(
        "attention_backend",
        "chunked_prefill_size",
        "disable_cuda_graph",
        "disable_radix_cache",
        "dtype",
        "max_prefill_tokens",
        "max_running_requests",
        "mem_fraction_static",
        "random_seed",
        "tp_size",
        section="sglang_cfg.",
    ),
    "sglang_kwargs": ("sglang_cfg.engine_args", None),
}
#: Of engines whose sections have a place here.
_ENGINES: Mapping[str, Table] = {"sglang": _SGLANG, "vllm": _VLLM}


def policy_config(given: Mapping[str, Any], **more: Any) -> Translation:
    """NeMo RL's ``policy`` section as a configuration for ``create_policy``.

    Args:
        given: The section, as plain values.
        **more: Keys of ours on top, such as ``reference``; sections are merged.

    Raises:
        ConfigError: Both or neither of its trainers is enabled, or its optimizer is not offered.
        CapabilityError: Router replay is enabled.
    """
    chosen = [section for section in _TRAINERS if (given.get(section) or {}).get("enabled")]
    if len(chosen) != 1:
        raise ConfigError(
            f"exactly one of {', '.join(sorted(_TRAINERS))} must be enabled, not {len(chosen)}",
            fix="enable dtensor_cfg for rl-hf, or megatron_cfg for rl-megatron",
            key="policy",
        )
    backend, table = _TRAINERS[chosen[0]]
    # The other trainer's section, and an engine's, say nothing about this trainer.
    elsewhere = {section: None for section in _TRAINERS if section != chosen[0]}
    sampling = given.get("generation") or {}
    own = {"generation": {key: sampling[key] for key in ("temperature",) if key in sampling}}
    translated = _translate({**given, **own, **elsewhere}, table)
    _merge(translated.config, {"backend": backend, **more})
    return translated


def generation_config(given: Mapping[str, Any], **more: Any) -> Translation:
    """NeMo RL's ``policy.generation`` section as a configuration for ``create_generation``.

    Args:
        given: The section, as plain values.
        **more: Keys of ours on top, such as ``model_name``, which theirs takes from the policy, or
            ``backend`` to use another engine; keys of the engine that is left are then dropped.
            Sections are merged: ``vllm_cfg={"python": ...}`` keeps what was translated.

    Raises:
        CapabilityError: Tokens would be sampled otherwise than the section says: it has
            ``bad_words``, or values for validation that differ from those for training.
    """
    for key in _SAMPLING:
        if given.get(f"val_{key}", given.get(key)) != given.get(key):
            refuse(f"val_{key}", f"validation samples with {key}, as training does")
    backend = str(more.get("backend", given.get("backend")))
    translated = _translate(given, {**_GENERATION, **_ENGINES.get(backend, {})})
    _merge(translated.config, more)
    return translated


def _translate(given: Mapping[str, Any], table: Table) -> Translation:
    result = Translation()

    def visit(section: Mapping[str, Any], inside: str) -> None:
        for key, value in section.items():
            name = f"{inside}{key}"
            if name in table:
                ours, convert = table[name]
                made = convert(value) if convert and value is not None else value
                if ours and made is not None:
                    _put(result.config, ours, made)
            elif isinstance(value, Mapping):
                visit(value, f"{name}.")
            elif value is not False and value not in (None, [], _AS_HERE.get(name)):
                result.dropped[name] = value

    visit(given, "")
    return result


def _put(config: dict[str, Any], name: str, value: Any) -> None:
    *sections, key = name.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[key] = value


def _merge(config: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        inside = config.get(key)
        if isinstance(inside, dict) and isinstance(value, Mapping):
            _merge(inside, value)
        else:
            config[key] = value
