"""The configuration of a run: what a YAML file and ``key=value`` arguments may contain.

The sections ``policy`` and ``generation`` are those of the backends that they name, ``loss`` has
the options of the method's loss, ``refit`` those of :func:`rl_core.refit`. All of them are checked
before a model is loaded, and an error names the line of the file or the argument.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict, TypeVar

from rl_core.config import check_config
from rl_core.errors import ConfigError, PluginError, RLError
from rl_core.interfaces.constraints import AlsoCalled, Range
from rl_losses import DPOLossFn, GRPOLossFn, NLLLossFn
from rl_train.encoding import DataConfig
from rl_train.log import LogConfig
from rl_train.rewards import RewardConfig

if TYPE_CHECKING:
    from rl_core.plugins.manifest import Kind

__all__ = [
    "LOSSES",
    "CheckpointConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "GrpoConfig",
    "PlaceConfig",
    "PlacementConfig",
    "RunConfig",
    "check_backend",
    "check_run",
    "read_config",
]

#: The loss of each method.
LOSSES: dict[str, Any] = {"grpo": GRPOLossFn, "dpo": DPOLossFn, "sft": NLLLossFn}
_STEPS = AlsoCalled("max_steps max_num_steps total_training_steps")
_EPOCHS = AlsoCalled("num_train_epochs total_epochs max_num_epochs")
_PROMPTS = AlsoCalled("num_prompts_per_step train_batch_size")
_PASSES = AlsoCalled("gradient_accumulation_steps", "prompts of all passes")
_MINI = AlsoCalled("ppo_mini_batch_size", "completions of a step / those of a mini-batch")


#: What other libraries call the completions per prompt.
_SAMPLES = "num_samples n num_return_sequences num_generations_per_prompt group_size"


class GrpoConfig(TypedDict, total=False):
    """How a step of GRPO generates and trains.

    Attributes:
        num_generations: Completions per prompt. Default 8.
        updates: Optimizer steps that the completions of a step are split into; must divide their
            number. With 1, no log-probs from before the training are needed. Default 1.
        advantages: ``name`` (``grpo``, ``opo``, ``pass_at_k``, ``reinforce_plus_plus`` or ``gdpo``)
            and options of :func:`rl_losses.grpo_advantages` or another function of that name.
            Default: those of ``grpo``.
        equal_rewards: What happens to a prompt if all its completions have the same reward, and so
            advantages of 0: ``"keep"`` trains on it, ``"redraw"`` takes another prompt instead.
            Default ``"keep"``.
        max_redraws: How many times a step may take other prompts. If all of these have equal
            rewards, the run ends. Default 4.
        truncated: ``"keep"`` completions that reached ``max_new_tokens``, or ``"mask"`` them out of
            the loss. Default ``"keep"``.
    """

    num_generations: Annotated[int, Range(ge=2), AlsoCalled(_SAMPLES)]
    updates: Annotated[int, Range(ge=1), _MINI]
    advantages: Annotated[
        dict[str, Any], AlsoCalled("scale_rewards normalize_rewards", "{normalize_std: ...}")
    ]
    equal_rewards: Annotated[
        Literal["keep", "redraw"], AlsoCalled("use_dynamic_sampling filter_groups", "redraw")
    ]
    max_redraws: Annotated[int, Range(ge=1)]
    truncated: Annotated[
        Literal["keep", "mask"], AlsoCalled("mask_truncated_completions overlong_filtering", "mask")
    ]


class RewardsConfig(TypedDict):
    """The reward functions, and how they are called.

    Attributes:
        functions: Names of functions, or mappings, see :class:`RewardConfig`. The reward of a
            completion is their weighted sum.
        deadline_s: Seconds that one call of a function may take. Default 30.
        workers: Processes in which functions are called. 0 calls them in threads of this process,
            which a deadline cannot end. Default: one for each CPU core, at most 8; 0 for functions
            that are passed as objects.
    """

    functions: NotRequired[list[str | RewardConfig]]
    deadline_s: NotRequired[Annotated[float, Range(gt=0)]]
    workers: NotRequired[Annotated[int, Range(ge=0)]]


class EnvironmentConfig(TypedDict):
    """What answers the model, turn by turn; see :class:`rl_train.episodes.Environment`.

    Attributes:
        function: ``module:Class`` or ``file.py:Class``.
        options: Keyword arguments of the class.
        max_turns: Turns of the model in an episode. Default 8.
        workers: Episodes that run at the same time. Default: all of a step.
        deadline_s: Seconds that the environment may take for an answer; the episode then ends.
            Default 300.
    """

    function: str
    options: NotRequired[dict[str, Any]]
    max_turns: NotRequired[Annotated[int, Range(ge=1)]]
    workers: NotRequired[Annotated[int, Range(ge=1)]]
    deadline_s: NotRequired[Annotated[float, Range(gt=0)]]


class PlaceConfig(TypedDict, total=False):
    """Where a backend runs.

    Attributes:
        where: ``"here"``: in this process (vLLM and SGLang start processes for their engines);
            ``"local"``: in worker processes of this host; ``"ray"``: in Ray actors.
            Default ``"here"``.
        workers: Number of workers; with Ray also a list, with the number on each node. Default 1.
        devices: With ``"local"``, the GPU of each worker, or several GPUs, such as ``"0,1"``.
    """

    where: Literal["here", "local", "ray"]
    workers: Annotated[int, Range(ge=1)] | list[int]
    devices: list[int | str]


class PlacementConfig(TypedDict, total=False):
    """Where the two backends run.

    Attributes:
        policy: See :class:`PlaceConfig`.
        generation: See :class:`PlaceConfig`.
    """

    policy: PlaceConfig
    generation: PlaceConfig


class EvaluationConfig(TypedDict, total=False):
    """Evaluation while training.

    Attributes:
        data: Keys of the section ``data``; missing keys are taken from the run's section ``data``.
            If it is missing, there is no evaluation.
        every: Steps between evaluations; there is also one before the first step and one after the
            last. Default 0: only these two.
        samples: Completions per prompt; with k completions, ``pass@k`` is reported. Default 1.
        correct: A completion with at least this reward is correct. Default 1.0.
        greedy: Take the most likely tokens instead of sampling. Default False.
    """

    data: Annotated[DataConfig, AlsoCalled("eval_dataset val_files val_data", "{path: ...}")]
    every: Annotated[int, Range(ge=0), AlsoCalled("eval_steps val_period test_freq")]
    samples: Annotated[int, Range(ge=1)]
    correct: float
    greedy: bool


class CheckpointConfig(TypedDict, total=False):
    """When checkpoints are saved, and which one a run resumes.

    Attributes:
        every: Steps between checkpoints; 0: none in between. One is also saved at the end, on
            Ctrl-C, and if a step fails before it trains. Default 100.
        keep: How many of the newest checkpoints are kept. Default 2.
        resume: ``"auto"``: resume the newest checkpoint in ``output``, or start if there is none;
            ``"never"``: an error if there is one; or the path of a checkpoint.
            Default ``"never"``.
    """

    every: Annotated[int, Range(ge=0), AlsoCalled("save_steps save_period save_freq")]
    keep: Annotated[int, Range(ge=1), AlsoCalled("save_total_limit keep_top_k")]
    resume: Annotated[
        Literal["auto", "never"] | str,  # noqa: PYI051 - an error shows these words
        AlsoCalled("resume_from_checkpoint resume_mode"),
    ]


class RunConfig(TypedDict):
    """The configuration of a run.

    Attributes:
        model: Directory or hub name of a checkpoint in Hugging Face layout.
        method: ``"grpo"``, ``"dpo"`` or ``"sft"``. Default ``"grpo"``.
        output: Directory for metrics, checkpoints and the plot. Default ``"runs/METHOD"``.
        seed: Seed of the data's order, of sampling and of the policy. Default 0.
        steps: Number of steps. Default: as many as ``epochs`` passes over the data have.
        epochs: Passes over the data, if ``steps`` is not set. Default 1.
        batch_size: Prompts (GRPO), examples (SFT) or pairs (DPO) per step. Default 8.
        restarts: How many times an engine that died is started again. Default 3.
        data: See :class:`DataConfig`.
        rewards: See :class:`RewardsConfig`; or only the list of functions.
        grpo: See :class:`GrpoConfig`.
        loss: Options of :class:`rl_losses.GRPOLossFn`, :class:`rl_losses.DPOLossFn` or
            :class:`rl_losses.NLLLossFn`. GRPO's KL penalty is 0 unless set here.
        policy: Configuration of the policy, see :class:`rl_core.interfaces.PolicyConfig`.
            Default: the backend ``hf``.
        generation: Configuration of the engine, see :class:`rl_core.interfaces.GenerationConfig`.
            Default: the backend ``hf``.
        environment: For several turns, see :class:`EnvironmentConfig`.
        refit: See :class:`rl_core.weights.options.SendOptions`.
        placement: See :class:`PlacementConfig`.
        evaluation: See :class:`EvaluationConfig`.
        checkpoint: See :class:`CheckpointConfig`.
        log: See :class:`LogConfig`.
    """

    model: Annotated[str, AlsoCalled("model_name_or_path model_name model_path")]
    method: NotRequired[Literal["grpo", "dpo", "sft"]]
    output: NotRequired[Annotated[str, AlsoCalled("output_dir log_dir checkpoint_dir")]]
    seed: NotRequired[Annotated[int, Range(ge=0)]]
    steps: NotRequired[Annotated[int | None, Range(ge=1), _STEPS]]
    epochs: NotRequired[Annotated[float, Range(gt=0), _EPOCHS]]
    batch_size: NotRequired[Annotated[int, Range(ge=1), _PROMPTS, _PASSES]]
    restarts: NotRequired[Annotated[int, Range(ge=0)]]
    data: NotRequired[DataConfig]
    rewards: NotRequired[
        Annotated[
            RewardsConfig | list[str | RewardConfig],
            AlsoCalled("reward_funcs reward_fn"),
            AlsoCalled("weights reward_weights", "[{function: ..., weight: ...}]"),
        ]
    ]
    grpo: NotRequired[GrpoConfig]
    loss: NotRequired[dict[str, Any]]
    policy: NotRequired[dict[str, Any]]
    generation: NotRequired[Annotated[dict[str, Any], AlsoCalled("use_vllm", "{backend: vllm}")]]
    environment: NotRequired[EnvironmentConfig | None]
    refit: NotRequired[dict[str, Any]]
    placement: NotRequired[PlacementConfig]
    evaluation: NotRequired[EvaluationConfig]
    checkpoint: NotRequired[CheckpointConfig]
    log: NotRequired[LogConfig]


_Error = TypeVar("_Error", bound=RLError)
#: A setting in the fix of an error, as a file has it, such as ```grpo: {updates: ...}```.
_SETTING = re.compile(r"`((?:\w+: \{)*)(\w+): ([^`]*?)(\}*)`")


@dataclass(frozen=True)
class Origins:
    """Where each key of a configuration was written.

    Attributes:
        places: By dotted path of a key, such as ``"run.yaml, line 12"``.
    """

    places: Mapping[str, str] = field(default_factory=dict)

    def explain(self, error: _Error) -> _Error:
        """The error, with where its keys, or the sections around them, were written."""
        keys = error.details.get("keys") or [error.details.get("key", "")]
        at_arguments = True
        for key in map(str, keys):
            section = key
            while section and section not in self.places:
                section = section.rpartition(".")[0]
            place = self.places.get(section, "")
            at_arguments = at_arguments and place.startswith("argument ")
            if section and f"\n  {key}: {place}" not in error.message:
                error.message += f"\n  {key}: {place}"
        if at_arguments:
            section = error.details.get("section", "")
            # The sections of a setting, its key and value, and what closes more than the sections.
            error.fix = _SETTING.sub(
                lambda at: (
                    f"`{section}{at[1].replace(': {', '.')}{at[2]}={at[3]}"
                    f"{at[4][at[1].count('{') :]}`"
                ),
                error.fix or "",
            )
        error.args = (error.message,)
        return error


def read_config(
    path: str | Path | None, arguments: Sequence[str] = ()
) -> tuple[dict[str, Any], Origins]:
    """Reads a YAML (or JSON) file, and puts ``key=value`` arguments over it.

    Args:
        path: The file; None if there are only arguments.
        arguments: Such as ``"policy.optimizer.lr=1e-6"``; values are YAML.

    Returns:
        Plain values, with ``${other.key}`` replaced, and where each key was written.

    Raises:
        ConfigError: The file cannot be read or is not YAML, or an argument is no ``key=value``.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

    places: dict[str, str] = {}
    given: Any = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if not key or key == argument or value.startswith("="):
            raise ConfigError(
                f"the argument {argument!r} is not a key=value pair",
                fix="write the file first, then each key=value as one word: steps=100, or in "
                "quotes if it has spaces: 'rewards=[exact, format]'",
                key=argument,
            )
    where = "the arguments" if path is None else str(path)
    try:
        if path is not None:
            text = Path(path).read_text(encoding="utf-8")
            for key, line in _lines_of(yaml.compose(text, Loader=yaml.SafeLoader)):
                places[key] = f"{path}, line {line}"
            given = OmegaConf.load(path)
        typed = OmegaConf.from_dotlist(list(arguments))
        # A list of reward functions is short for a key of the section, which has others, too.
        sides = (given, typed) if OmegaConf.is_dict(given) else ()
        rewards = [side.get("rewards") for side in sides]
        if any(map(OmegaConf.is_list, rewards)) and any(
            OmegaConf.is_dict(each) and not all(str(key).isdigit() for key in each)
            for each in rewards
        ):
            for side, each in zip(sides, rewards, strict=True):
                if OmegaConf.is_list(each):
                    side["rewards"] = {"functions": each}
        merged = OmegaConf.merge(given, typed)
        config = OmegaConf.to_container(merged, resolve=True)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}",
            fix="give the path of a YAML file, before any key=value",
            key=where,
        ) from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
        fixes = {
            UnicodeDecodeError: "save it in the encoding UTF-8",
            InterpolationResolutionError: r"write ${oc.env:NAME} for a variable of the environment "
            r"that is set, ${section.key} for another key, or \${ where no variable is meant",
            TypeError: "set a list as a whole: key=[a, b]",
            Exception: "correct the YAML there",
        }
        fix = next(fix for kind, fix in fixes.items() if isinstance(error, kind))
        where = "the arguments" if isinstance(error, TypeError) else where
        raise ConfigError(f"{where} cannot be read: {error}", fix=fix, key=where) from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"{path} contains a {type(config).__name__}, not keys with values",
            fix="write it as in the examples: model: ..., data: ...",
            key=where,
        )
    for argument in arguments:
        key = argument.partition("=")[0]
        places[key] = f"argument {argument}"
        while key := key.rpartition(".")[0]:  # a section that only an argument has
            places.setdefault(key, f"argument {argument}")
    return {str(key): value for key, value in config.items()}, Origins(places)


def _lines_of(node: Any, section: str = "") -> Iterator[tuple[str, int]]:
    for key, value in node.value if getattr(node, "id", "") == "mapping" else ():
        yield f"{section}{key.value}", key.start_mark.line + 1
        yield from _lines_of(value, f"{section}{key.value}.")


def check_run(config: Mapping[str, Any], origins: Origins | None = None) -> RunConfig:
    """Checks every key of a run and fills in what follows from others.

    Raises:
        ConfigError: Names every key that is wrong, and where it was written.
        PluginError: A backend is not installed.
    """
    config = _with_home(config)
    try:
        sections = _sections(config)
        checked: Any = check_config(RunConfig, config, what="the run", sections=sections)
        _complete(checked)
        _check_refit(checked["refit"])
        for kind in ("generation", "policy"):  # the policy takes the temperature of the engine
            if kind == "policy" or checked["method"] == "grpo":
                check_backend(kind, checked[kind], prefix=f"{kind}.")
    except ConfigError as error:
        raise (origins or Origins()).explain(error) from None
    return checked  # type: ignore[no-any-return]


def check_backend(kind: Kind, config: Mapping[str, Any], *, prefix: str = "") -> None:
    """Checks one backend's section; its engine need not be installed here.

    Args:
        kind: ``"policy"`` or ``"generation"``.
        config: With ``backend``.
        prefix: Of the keys in ``details`` of an error.

    Raises:
        ConfigError: As :func:`rl_core.config.check_config`.
        PluginError: No installed plugin provides the backend.
    """
    name = config.get("backend")
    if not isinstance(name, str):
        raise ConfigError(
            f"the section {kind} names no backend",
            fix="set backend to a name that `rl backends list` shows",
            key=f"{prefix}backend",
        )
    try:
        check_config(_spec(kind, name), config, what=f"{kind} backend {name!r}")
    except ConfigError as error:
        error.details["key"] = f"{prefix}{error.details.get('key', '')}"
        error.details["keys"] = [f"{prefix}{key}" for key in error.details.get("keys", [])]
        error.details["section"] = prefix
        raise


def _spec(kind: Kind, name: str) -> type:
    """The TypedDict of a backend's configuration."""
    from rl_core.plugins.discovery import load_object
    from rl_core.plugins.registry import find_provider, resolve

    spec: type = load_object(resolve(name, kind).configs[kind], find_provider(name))
    return spec


def _sections(config: Any) -> dict[str, type]:
    """What the sections may contain that are checked on their own, as far as that is known."""
    sections: dict[str, type] = {}
    # What is wrong there is reported where it is checked.
    with suppress(AttributeError, LookupError, TypeError, PluginError):
        sections["loss"] = LOSSES[config.get("method", "grpo")]
        for kind in ("policy", "generation"):
            sections[kind] = _spec(kind, config.get(kind, {}).get("backend", "hf"))
    return sections


def _check_refit(given: Mapping[str, Any]) -> None:
    from rl_core.weights.options import SendOptions

    own = ("address", "rename", "retries")  # of the call itself
    try:
        SendOptions.of({key: value for key, value in given.items() if key not in own})
    except ConfigError as error:
        error.details["key"] = f"refit.{error.details.get('key', '')}"
        raise


def _with_home(value: Any) -> Any:
    """The value with ``~/`` at the beginning of texts replaced, as shells do for most paths."""
    if isinstance(value, Mapping):
        return {key: _with_home(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_home(one) for one in value]
    at_home = isinstance(value, str) and value.startswith("~/")
    return os.path.expanduser(value) if at_home else value


#: Keys of backends that are not the user's in a run, and what is.
_BY_RUN = {
    "policy.generation": "the keys of the section generation",
    "policy.resume_from": "checkpoint.resume",
    "policy.train_global_batch_size": "batch_size and grpo.updates",
    **{
        f"{section}.{name}": "grpo.num_generations"
        for section in ("policy", "generation")
        for name in ("num_generations", *_SAMPLES.split())
    },
}


def _complete(config: dict[str, Any]) -> None:
    """Fills in what other keys imply."""
    method = config.setdefault("method", "grpo")
    sections = ("data", "grpo", "loss", "policy", "generation", "refit", "placement")
    plain = {"output": f"runs/{method}", "seed": 0, "batch_size": 8, "steps": None}
    plain |= {"epochs": 1.0, "restarts": 3}
    for key in (*plain, *sections, "evaluation", "checkpoint", "log"):
        config.setdefault(key, plain.get(key, {}))
    if isinstance(config.get("rewards"), list):
        config["rewards"] = {"functions": config["rewards"]}
    policy, generation, grpo = config["policy"], config["generation"], config["grpo"]
    for section in (policy, generation):
        section.setdefault("backend", "hf")
        section.setdefault("model_name", config["model"])
    policy.setdefault("seed", config["seed"])
    for key, instead in _BY_RUN.items():
        section, _, name = key.partition(".")
        if config[section].get(name):
            raise ConfigError(
                f"{key} is {config[section][name]!r}, but a run sets it itself",
                fix=f"set {instead} instead of {key}",
                key=key,
            )
    grpo.setdefault("num_generations", 8)
    grpo.setdefault("updates", 1)
    if "temperature" in generation:
        policy.setdefault("temperature", generation["temperature"])
    if method != "grpo":
        return
    rows, updates = config["batch_size"] * grpo["num_generations"], grpo["updates"]
    if rows % updates:
        raise ConfigError(
            f"a step has {rows} completions (batch_size {config['batch_size']} x num_generations "
            f"{grpo['num_generations']}), which {updates} updates do not divide",
            fix=f"set grpo.updates to a divisor of {rows}",
            key="grpo.updates",
        )
    policy.setdefault("train_global_batch_size", rows // updates)
