"""The configuration of a run: what a YAML file and ``key=value`` arguments may contain.

The sections ``policy`` and ``generation`` are those of the backends that they name, ``loss`` has
the options of the method's loss, ``refit`` those of :func:`rl_core.refit`. All of them are checked
before a model is loaded, and an error names the line of the file or the argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict, TypeVar

from rl_core.config import check_config
from rl_core.errors import ConfigError, RLError
from rl_core.interfaces.constraints import Range
from rl_train.encoding import DataConfig
from rl_train.log import LogConfig
from rl_train.rewards import RewardConfig

if TYPE_CHECKING:
    from rl_core.plugins.manifest import Kind

__all__ = [
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


class GrpoConfig(TypedDict, total=False):
    """How a step of GRPO generates and trains.

    Attributes:
        num_generations: Completions per prompt. Default 8.
        updates: Optimizer steps that the completions of a step are split into; must divide their
            number. With 1, no log-probs from before the training are needed. Default 1.
        advantages: Options of :func:`rl_losses.grpo_advantages`.
        equal_rewards: What happens to a prompt if all its completions have the same reward, and so
            advantages of 0: ``"keep"`` trains on it, ``"redraw"`` takes another prompt instead.
            Default ``"keep"``.
        max_redraws: How many times a step may take other prompts. Default 4.
        truncated: ``"keep"`` completions that reached ``max_new_tokens``, or ``"mask"`` them out of
            the loss. Default ``"keep"``.
    """

    num_generations: Annotated[int, Range(ge=2)]
    updates: Annotated[int, Range(ge=1)]
    advantages: dict[str, Any]
    equal_rewards: Literal["keep", "redraw"]
    max_redraws: Annotated[int, Range(ge=1)]
    truncated: Literal["keep", "mask"]


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
    """

    function: str
    options: NotRequired[dict[str, Any]]
    max_turns: NotRequired[Annotated[int, Range(ge=1)]]
    workers: NotRequired[Annotated[int, Range(ge=1)]]


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

    data: DataConfig
    every: Annotated[int, Range(ge=0)]
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

    every: Annotated[int, Range(ge=0)]
    keep: Annotated[int, Range(ge=1)]
    resume: str


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

    model: str
    method: NotRequired[Literal["grpo", "dpo", "sft"]]
    output: NotRequired[str]
    seed: NotRequired[Annotated[int, Range(ge=0)]]
    steps: NotRequired[Annotated[int | None, Range(ge=1)]]
    epochs: NotRequired[Annotated[float, Range(gt=0)]]
    batch_size: NotRequired[Annotated[int, Range(ge=1)]]
    restarts: NotRequired[Annotated[int, Range(ge=0)]]
    data: NotRequired[DataConfig]
    rewards: NotRequired[RewardsConfig | list[str | RewardConfig]]
    grpo: NotRequired[GrpoConfig]
    loss: NotRequired[dict[str, Any]]
    policy: NotRequired[dict[str, Any]]
    generation: NotRequired[dict[str, Any]]
    environment: NotRequired[EnvironmentConfig | None]
    refit: NotRequired[dict[str, Any]]
    placement: NotRequired[PlacementConfig]
    evaluation: NotRequired[EvaluationConfig]
    checkpoint: NotRequired[CheckpointConfig]
    log: NotRequired[LogConfig]


_Error = TypeVar("_Error", bound=RLError)


@dataclass(frozen=True)
class Origins:
    """Where each key of a configuration was written.

    Attributes:
        file: The YAML file; None if there is none.
        lines: By dotted path of a key, its line in the file.
        arguments: By dotted path of a key, the ``key=value`` argument.
    """

    file: Path | None = None
    lines: Mapping[str, int] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """Such as ``"run.yaml, line 12"``; the nearest section that was written, or ``""``."""
        while key:
            if key in self.arguments:
                return f"argument {self.arguments[key]}"
            if key in self.lines:
                return f"{self.file}, line {self.lines[key]}"
            key = key.rpartition(".")[0]
        return ""

    def explain(self, error: _Error) -> _Error:
        """The error, with where its keys were written."""
        keys = error.details.get("keys") or [error.details.get("key", "")]
        written = dict.fromkeys(f"{key}: {at}" for key in keys if (at := self.where(str(key))))
        error.message += "".join(f"\n  {line}" for line in written)
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
    from omegaconf.errors import OmegaConfBaseException

    lines: dict[str, int] = {}
    given: Any = {}
    file = None if path is None else Path(path)
    for argument in arguments:
        if "=" not in argument or argument.startswith("="):
            raise ConfigError(
                f"the argument {argument!r} is no key=value pair",
                fix="write it as steps=100 or policy.optimizer.lr=1e-6",
                key=argument,
            )
    try:
        if file is not None:
            text = file.read_text(encoding="utf-8")
            _lines_of(yaml.compose(text, Loader=yaml.SafeLoader), "", lines)
            given = OmegaConf.load(file)
        merged = OmegaConf.merge(given, OmegaConf.from_dotlist(list(arguments)))
        config = OmegaConf.to_container(merged, resolve=True)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}", fix="give the path of a YAML file", key=str(path)
        ) from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        where = str(file) if file is not None else "the arguments"
        raise ConfigError(
            f"{where} cannot be read: {error}", fix="correct the YAML there", key=where
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"{path} contains a {type(config).__name__}, not keys with values",
            fix="write it as in the examples: model: ..., data: ...",
            key=str(path),
        )
    by_key = {argument.partition("=")[0]: argument for argument in arguments}
    return {str(key): value for key, value in config.items()}, Origins(file, lines, by_key)


def _lines_of(node: Any, path: str, lines: dict[str, int]) -> None:
    import yaml

    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            at = f"{path}{key.value}"
            lines[at] = key.start_mark.line + 1
            _lines_of(value, f"{at}.", lines)


def check_run(config: Mapping[str, Any], origins: Origins | None = None) -> RunConfig:
    """Checks every key of a run and fills in what follows from others.

    Raises:
        ConfigError: Names every key that is wrong, and where it was written.
        PluginError: A backend is not installed.
    """
    origins = origins or Origins()
    try:
        checked: Any = check_config(RunConfig, config, what="the run")
        _complete(checked)
        for kind in ("policy", "generation"):
            if kind == "policy" or checked["method"] == "grpo":
                check_backend(kind, checked[kind], prefix=f"{kind}.")
    except ConfigError as error:
        raise origins.explain(error) from None
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
    from rl_core.plugins.discovery import load_object
    from rl_core.plugins.registry import find_provider, resolve

    name = config.get("backend")
    if not isinstance(name, str):
        raise ConfigError(
            f"the section {kind} names no backend",
            fix="set backend to a name that `rl backends list` shows",
            key=f"{prefix}backend",
        )
    manifest = resolve(name, kind)
    spec = load_object(manifest.configs[kind], find_provider(name))
    try:
        check_config(spec, config, what=f"{kind} backend {name!r}")
    except ConfigError as error:
        keys = error.details.get("keys", [])
        error.details |= {
            "key": f"{prefix}{error.details.get('key', '')}",
            "keys": [f"{prefix}{key}" for key in keys],
        }
        raise


def _complete(config: dict[str, Any]) -> None:
    """Fills in what other keys imply."""
    config.setdefault("method", "grpo")
    for key, value in {"output": f"runs/{config['method']}", "seed": 0, "batch_size": 8}.items():
        config.setdefault(key, value)
    for key, value in {"steps": None, "epochs": 1.0, "restarts": 3}.items():
        config.setdefault(key, value)
    sections = ("data", "grpo", "loss", "policy", "generation", "refit", "placement")
    for section in (*sections, "evaluation", "checkpoint", "log"):
        config.setdefault(section, {})
    if isinstance(config.get("rewards"), list):
        config["rewards"] = {"functions": config["rewards"]}
    policy, generation, grpo = config["policy"], config["generation"], config["grpo"]
    for section in (policy, generation):
        section.setdefault("backend", "hf")
        section.setdefault("model_name", config["model"])
    policy.setdefault("seed", config["seed"])
    grpo.setdefault("num_generations", 8)
    grpo.setdefault("updates", 1)
    if "temperature" in generation:
        policy.setdefault("temperature", generation["temperature"])
    if config["method"] != "grpo":
        return
    rows, updates = config["batch_size"] * grpo["num_generations"], grpo["updates"]
    if rows % updates:
        raise ConfigError(
            f"a step has {rows} completions (batch_size {config['batch_size']} x num_generations "
            f"{grpo['num_generations']}), which {updates} updates do not divide",
            fix="choose grpo.updates so that it divides them",
            key="grpo.updates",
        )
    policy.setdefault("train_global_batch_size", rows // updates)
