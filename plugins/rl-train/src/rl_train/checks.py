"""Whether what a run needs is there, before anything is loaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_backends.model_files import check_name, config_of
from rl_core.errors import ConfigError, RLError
from rl_core.plugins.registry import resolve
from rl_train.config import Origins
from rl_train.data import files_of, import_function, is_function
from rl_train.methods import environment_of
from rl_train.rewards import Rewards

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_core.plugins.manifest import Kind
    from rl_train.config import RunConfig

__all__ = ["check_part", "check_sources"]


def check_sources(
    config: RunConfig, origins: Origins | None = None, *, rows: bool = False, rewards: bool = False
) -> None:
    """Checks that the model, the data, the reward and the engines of a run are there.

    Names on the hub are not looked up, and no file of data is read.

    Args:
        config: Of the run, checked.
        origins: Where its keys were written, for messages.
        rows: The data is given as objects.
        rewards: The reward functions are given as objects.

    Raises:
        ConfigError: A key that the run needs is not set, or what it names is not there.
        PluginError: An engine is not installed.
    """
    try:
        for kind in ("policy", "generation") if config["method"] == "grpo" else ("policy",):
            check_part(config, kind)
        path = config["data"].get("path")
        if not rows and not path:
            raise ConfigError(
                "the run has no data",
                fix="set data.path to a file, such as data: {path: questions.jsonl}",
                key="data.path",
            )
        for each in (path, config["evaluation"].get("data", {}).get("path")):
            if isinstance(each, str) and is_function(each):
                import_function(each, key="data.path")
            elif each and not rows:
                files_of(each)
        environment_of(config)
        given: Any = config.get("rewards") or {}
        functions = given.get("functions")
        if config["method"] != "grpo" or rewards:
            return
        if not functions and not config.get("environment"):
            raise ConfigError(
                "GRPO needs a reward, and the configuration has none",
                fix="set rewards: [math], or a function of yours: rewards: [my_rewards.py:score]",
                key="rewards",
            )
        if functions:
            Rewards(functions, workers=0).close()
    except RLError as error:
        if error.details.get("key") == "path":
            error.details["key"] = "data.path"
        raise (origins or Origins()).explain(error) from error.__cause__


def check_part(config: RunConfig, kind: Kind) -> None:
    """Checks that the model, the engine and its interpreter of one section are there.

    Raises:
        ConfigError: The model or the interpreter is not there.
        PluginError: The engine is not installed.
    """
    section: Mapping[str, Any] = config[kind]
    name = section["model_name"]
    try:
        check_name(name)
        if Path(name).is_dir():
            config_of(Path(name))
    except ConfigError as error:
        key = "model" if name == config["model"] else f"{kind}.model_name"
        error.details["key"], error.fix = key, (error.fix or "").replace("model_name", key)
        raise
    for part, inner in section.items():
        python = inner.get("python") if isinstance(inner, dict) else None
        if python and not shutil.which(python):
            key = f"{kind}.{part}.python"
            raise ConfigError(
                f"{key}: there is no program {os.path.join(os.getcwd(), python)!r}",
                fix=f"set {key} to the Python of an environment with rl-hosting and the engine",
                key=key,
            )
    if config["placement"].get(kind, {}).get("where", "here") != "ray":
        resolve(section["backend"], kind, config=section)
