"""Starts SGLang's engine as the contract needs it, or says why not."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import signal
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rl_backends.engine.checkpoint import cannot_load
from rl_core.errors import ConfigError, PluginError, RLError
from rl_sglang.cpu import stand_in
from rl_sglang.private import engine_version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_sglang.workers import SchedulerFailure

if not torch.cuda.is_available():
    stand_in()

from sglang.srt.entrypoints import engine as sglang_engine
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import kill_process_tree
from sglang.srt.utils.hf_transformers.common import get_rope_config
from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length

from rl_sglang.adapters import lora_arguments
from rl_sglang.scheduler import (
    SAMPLER,
    SchedulerOptions,
    keep_files_private,
    run_scheduler,
)

__all__ = [
    "checkpoint_config",
    "end_processes",
    "generation_config",
    "launch",
    "longest_row",
    "refusal",
    "server_args",
]

#: Keys of ``sglang_cfg`` that are ours.
_OURS = {
    "dtype",
    "engine_args",
    "lora",
    "python",
    "max_model_len",
    "refit",
    "sleep_level",
    "start_timeout_s",
    "verbose",
}
_ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "max_running_requests": 256,
}
#: Bytes of the key/value cache on the CPU, if nobody says otherwise.
_CACHE_ON_CPU = 512 << 20
#: Tokens of its context that SGLang uses for no row: it wants some room beyond every prompt.
_UNUSED = 8
#: Characters of SGLang's own words in an error.
_LONGEST = 800
#: What SGLang raises when it refuses a configuration.
_REFUSALS = {"ValueError", "NotImplementedError", "AssertionError", "KeyError", "TypeError"}


class Forking:
    """multiprocessing for SGLang on the CPU: its schedulers are forked, with all that is imported.

    Spawned ones would import it again, which takes ten seconds.
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("fork")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def set_start_method(self, method: str, *, force: bool = False) -> None:
        """SGLang asks for "spawn"."""


def launch(arguments: dict[str, Any], options: SchedulerOptions) -> Any:
    """Starts SGLang's engine, with schedulers that take refits, and nobody who makes text.

    Args:
        arguments: Of :func:`server_args`.
        options: For the schedulers.
    """

    class Launched(sglang_engine.Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(partial(run_scheduler, options))

        @classmethod
        def _launch_detokenizer_subprocesses(
            cls, *_: Any, **__: Any
        ) -> tuple[list[Any], list[str]]:
            return [], []

    keep_files_private()
    if not torch.cuda.is_available():
        sglang_engine.mp = Forking()
    # By default SGLang kills this process when a scheduler cannot start, before that is told.
    return Launched(**arguments, custom_sigquit_handler=signal.SIG_IGN)


def end_processes(number: int, frame: Any) -> None:
    """A scheduler failed, and said so in the log: the others wait for it for ever."""
    kill_process_tree(os.getpid())


def checkpoint_config(config: Mapping[str, Any]) -> Any:
    """The ``config.json`` of a checkpoint, as transformers reads it.

    Raises:
        ConfigError: It cannot be read.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            config["model_name"], trust_remote_code=config.get("trust_remote_code", False)
        )
    except Exception as error:  # whatever classes of configurations raise
        raise cannot_load("config.json", config, error) from error


def generation_config(name: str) -> dict[str, Any]:
    """The ``generation_config.json`` of a checkpoint, if it has one."""
    from transformers import GenerationConfig

    with suppress(OSError):
        found: dict[str, Any] = GenerationConfig.from_pretrained(name).to_diff_dict()
        return found
    return {}


def longest_row(config: Mapping[str, Any], text: Any) -> int:
    """Tokens of a prompt and its completion together: those asked for, or what the model has.

    Raises:
        ConfigError: More were asked for.
    """
    longest = int(get_context_length(text))
    asked = config.get("max_model_len")
    if asked is not None and asked > longest:
        raise ConfigError(
            f"max_model_len {asked} is above the context of {config['model_name']}, {longest}",
            fix=f"set max_model_len to {longest} or less",
            key="max_model_len",
        )
    return longest if asked is None else int(asked)


def server_args(config: Mapping[str, Any], text: Any, max_model_len: int) -> dict[str, Any]:
    """The arguments of SGLang's ``ServerArgs``.

    Args:
        config: A checked :class:`rl_sglang.config.SglangConfig`.
        text: The text part of the checkpoint's configuration.
        max_model_len: See :func:`longest_row`.

    Raises:
        ConfigError: The installed SGLang lacks one of them.
    """
    given = config.get("sglang_cfg", {})
    dtype = given.get("dtype") or config.get("torch_dtype") or "auto"
    if dtype == "auto":  # SGLang's own "auto" would round float32 checkpoints
        dtype = str(getattr(text, "dtype", None) or "auto").removeprefix("torch.")
    cpu = not torch.cuda.is_available()
    trust = config.get("trust_remote_code", False)
    lora = {}
    if given.get("lora") is not None:
        lora = lora_arguments(config["model_name"], dtype, given["lora"], trust=trust)
    chosen = {
        "model_path": config["model_name"],
        "dtype": dtype,
        "trust_remote_code": trust,
        "context_length": max_model_len + _UNUSED,
        "random_seed": secrets.randbits(31),
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "enable_multimodal": False,  # prompts have text only: image processors are not loaded
        "grammar_backend": "none",
        "sampling_backend": SAMPLER,
        "sleep_on_idle": True,
        "log_level": "info" if given.get("verbose", False) else "warning",
        "enable_memory_saver": not cpu,
        "enable_weights_cpu_backup": not cpu and given.get("sleep_level", 1) == 1,
        **(_ON_CPU if cpu else {}),
        **_positions(config, text),
        **{key: value for key, value in given.items() if key not in _OURS},
        **lora,
        **given.get("engine_args", {}),
    }
    if cpu and "max_total_tokens" not in chosen:
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        token = 2 * text.num_hidden_layers * heads * width * torch.float32.itemsize
        chosen["max_total_tokens"] = max(chosen["context_length"], _CACHE_ON_CPU // token)
    if unknown := sorted(set(chosen) - set(ServerArgs.__struct_fields__)):
        raise ConfigError(
            f"SGLang {engine_version()} has no argument {unknown[0]!r}",
            fix="leave it out",
            key=f"sglang_cfg.engine_args.{unknown[0]}",
        )
    return chosen


def _positions(config: Mapping[str, Any], text: Any) -> dict[str, str]:
    """The checkpoint's positions, for a model of which SGLang has its own class of configuration.

    Such a class knows the keys of published checkpoints, and uses its defaults where transformers 5
    has written a checkpoint anew, with other keys. No error shows that.
    """
    given: dict[str, Any] | None = getattr(text, "rope_parameters", None)
    if not given:
        return {}
    name, trust = config["model_name"], config.get("trust_remote_code", False)
    engine = get_config(name, trust_remote_code=trust).get_text_config()
    # By kind of attention; SGLang gives positions of windows no scaling.
    wanted = given.get("full_attention", given)
    theta, scaling = get_rope_config(engine)
    plain = wanted.get("rope_type", "default") == "default"
    if scaling or (plain and theta == wanted.get("rope_theta", theta)):
        return {}
    overrides = {"rope_theta": wanted["rope_theta"], "rope_parameters": wanted}
    return {"json_model_override_args": json.dumps(overrides)}


def refusal(
    error: Exception, failure: SchedulerFailure | None, config: Mapping[str, Any]
) -> RLError:
    """What it means that SGLang did not start.

    Args:
        error: What it raised here.
        failure: What a scheduler raised before.
        config: The backend's.
    """
    if failure is None and isinstance(error, RLError):
        return error
    kind = type(error).__name__ if failure is None else failure.kind
    name, text = config["model_name"], str(error) if failure is None else failure.text
    said = f"{kind}: {text}"[:_LONGEST]
    if failure is not None and failure.loading:
        return ConfigError(
            f"SGLang cannot load the weights of {name}: {said}",
            fix="if config.json and weights are of different models, write both again with "
            f"save_pretrained; if not, use a model that SGLang {engine_version()} supports",
            key="model_name",
        )
    if "EADDRINUSE" in text:
        return ConfigError(
            f"a port that SGLang needs for its schedulers is in use: {said}",
            fix="leave sglang_cfg.engine_args.nccl_port out, or set it to a free port",
            key="sglang_cfg.engine_args.nccl_port",
        )
    if kind in _REFUSALS:
        model = "architecture" in text
        return ConfigError(
            f"SGLang {engine_version()} refuses {'' if model else 'the configuration of '}{name}: "
            f"{said}",
            fix="use a model that SGLang supports"
            if model
            else "correct the key of sglang_cfg that the text names; if it names none, use a model "
            "that SGLang supports",
            key="model_name" if model else "sglang_cfg",
        )
    return PluginError(
        f"SGLang {engine_version()} did not start with {name}: {said}",
        fix="look at the end of the engine's log; sglang_cfg.verbose=True shows all of it",
    )
