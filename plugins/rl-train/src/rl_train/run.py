"""The loop of a run, from its configuration to its last checkpoint."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import ConfigError, DeadlineError, RefitError, RLError, WorkerDiedError
from rl_train.backends import Backends
from rl_train.checkpoints import Checkpoints, locked
from rl_train.checks import check_sources
from rl_train.config import check_run
from rl_train.data import Order, load_rows
from rl_train.encoding import Encoder
from rl_train.log import RunLog
from rl_train.methods import METHODS, Study, evaluate, loss_of
from rl_train.rewards import Rewards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rl_train.checkpoints import Found
    from rl_train.config import Origins, RunConfig

__all__ = ["Outcome", "train"]

#: How far log-probs of engine and trainer may be apart: clause A1's bound, as a difference.
TOLERANCE = {"float32": 1e-3, "other": 0.05}
#: What an engine that is started again can cure.
_OF_THE_ENGINE = (WorkerDiedError, DeadlineError, RefitError)


@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        output: Its folder.
        steps: Steps that were done, those before a resume included.
        stopped: The signal that ended it before its last step, such as ``"SIGINT"``.
        checkpoint: Folder of the newest checkpoint.
        metrics: Metrics of the last step.
        evaluations: Metrics of every evaluation, by step.
    """

    output: Path
    steps: int = 0
    stopped: str | None = None
    checkpoint: Path | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)


def train(
    config: Mapping[str, Any],
    *,
    origins: Origins | None = None,
    rows: Sequence[Mapping[str, Any]] | None = None,
    eval_rows: Sequence[Mapping[str, Any]] | None = None,
    rewards: Sequence[str | Callable[..., Any]] | None = None,
    reward_weights: Sequence[float] | None = None,
) -> Outcome:
    """Trains to the last step, or until a signal stops the run.

    SIGINT (Ctrl-C) and SIGTERM end it after the current step, with a checkpoint; a second one ends
    it at once.

    Args:
        config: See :class:`~rl_train.config.RunConfig`.
        origins: Where its keys were written, for messages.
        rows: The data, instead of ``data.path``.
        eval_rows: The data of evaluations, instead of ``evaluation.data``.
        rewards: Functions, instead of those of the configuration. They are called in this process,
            unless ``rewards.workers`` is set.
        reward_weights: A weight for each of them.

    Raises:
        ConfigError: A key is wrong; nothing was loaded.
        RLError: The data, a reward function, a backend or a disk failed; the message says how to
            go on.
    """
    checked = check_run(config, origins)
    method, given = checked["method"], checked["data"]
    loss = loss_of(checked)
    check_sources(checked, origins, rows=rows is not None, rewards=bool(rewards))
    options: Any = checked.get("rewards") or {}
    functions = rewards or options.get("functions", ())
    tokenizer, model = _tokenizer_and_config(checked)
    context = getattr(model.get_text_config(), "max_position_embeddings", None)
    if method == "grpo":
        context = checked["generation"].get("max_model_len") or context
        if context is not None and given.get("long_prompts") == "cut":
            given["max_prompt_tokens"] = min(given.get("max_prompt_tokens") or context, context - 1)
    load: Any = partial(load_rows, tokenizer=tokenizer, context=context, method=method)
    with ExitStack() as stack:
        stack.enter_context(locked(Path(checked["output"])))
        _check_rows("the data", rows)
        data, tested = load(given, rows=rows), None
        if eval_rows is not None and not len(eval_rows):
            eval_rows = None
        _check_rows("the evaluation", eval_rows)
        if eval_rows is not None or "data" in checked["evaluation"]:
            own = checked["evaluation"].get("data", {})
            of_path = ("name", "split") if "path" in own else ()
            inherited = {key: value for key, value in given.items() if key not in of_path}
            tested = load({**inherited, **own}, rows=eval_rows)
        order = Order(len(data), checked["seed"], given.get("shuffle", True))
        steps = checked["steps"] or ceil(checked["epochs"] * len(data) / checked["batch_size"])
        schedule = checked["policy"].get("scheduler", {})
        if schedule.get("name", "constant") != "constant":
            schedule.setdefault("total_steps", max(1, steps * checked["grpo"]["updates"]))
        checkpoints = Checkpoints(checked, data.digest)  # which compares all that was filled in
        found = checkpoints.find()
        graders = None
        if method == "grpo" and functions:
            graders = Rewards(
                functions,
                reward_weights,
                # A process would import the caller's script again to get at its functions.
                workers=options.get("workers", 0 if rewards else None),
                deadline_s=options.get("deadline_s", 30.0),
            )
            stack.enter_context(graders)
        # What can be wrong with all rows is wrong with the first: before a model is loaded.
        encoder = Encoder(tokenizer, given)
        encode = {"grpo": encoder.prompt, "dpo": encoder.pair, "sft": encoder.answered}[method]
        for where, some in (("data", data), ("evaluation.data", tested)):
            if some:
                encode(some[0])
                if graders is not None:
                    graders.check(some.columns, where)
        log = RunLog(
            checked["output"],
            checked["log"],
            total_steps=steps,
            phase=method.upper(),
            settings=checked,
            resume=found is not None,
            tolerance=_tolerance(checked, model) if method == "grpo" else None,
        )
        stack.enter_context(log)
        log.note(
            f"{method.upper()} of {checked['model']}: {steps} steps, policy "
            f"{checked['policy']['backend']}"
            + (f", engine {checked['generation']['backend']}" if method == "grpo" else "")
            + f", {len(data)} rows"
            + (f" ({data.dropped} more are too long and left out)" if data.dropped else "")
            + f"; everything is written to {checked['output']}"
        )
        backends = Backends(checked, resume_from=str(found.path / "policy") if found else None)
        stack.callback(backends.close)
        study = Study(
            checked,
            backends,
            data,
            encoder,
            order,
            torch.Generator().manual_seed(checked["seed"]),
            loss,
            graders,
            context or inf,
        )
        loop = _Loop(study, log, checkpoints, tested, steps)
        if found is not None:
            loop.resume(found)
        outcome = loop.run()
        log.summary()
    return outcome


class _Loop:
    """The steps of a run, with what goes wrong between them."""

    def __init__(
        self,
        study: Study,
        log: RunLog,
        checkpoints: Checkpoints,
        tested: Sequence[Mapping[str, Any]] | None,
        steps: int,
    ) -> None:
        self.study, self.log, self.checkpoints = study, log, checkpoints
        self.tested, self.steps = tested, steps
        self.config = study.config
        self.outcome = Outcome(Path(study.config["output"]))
        self.restarts = study.config["restarts"]
        self.signal: str | None = None
        self.saved: int | None = None

    def resume(self, found: Found) -> None:
        """Goes on from a checkpoint."""
        self._put(found.state)
        self.outcome.steps, self.outcome.checkpoint = found.step, found.path
        self.saved = found.step
        self.log.rewind(found.step)
        self.checkpoints.rewind(found.step)
        self.log.note(f"resuming {found.path}, after step {found.step}")

    def run(self) -> Outcome:
        """Does the steps that are left."""
        outcome, every = self.outcome, self.config["checkpoint"].get("every", 100)
        step_of = METHODS[self.config["method"]]
        with self._signals():
            if outcome.steps < self.steps:
                self._with_engine(self._refit)
            if self.saved is None:
                self._evaluate()
            while outcome.steps < self.steps and self.signal is None:
                seconds: dict[str, float] = {}
                start, before = time.perf_counter(), self._state()
                with self._saved_if_it_fails(before):
                    step = partial(step_of, self.study, seconds)
                    metrics, shown = self._with_engine(step, before)
                outcome.steps += 1
                if self.config["method"] == "grpo":
                    self._with_engine(self._refit)
                    report = self.study.backends.report
                    metrics["refit/seconds"] = report.seconds
                    metrics["refit/gb_per_s"] = report.gb_per_s
                metrics |= {f"time/{phase}": took for phase, took in seconds.items()}
                metrics["step_time"] = time.perf_counter() - start
                outcome.metrics = metrics
                self.log.step(outcome.steps, metrics)
                if late := metrics.get("rewards/timed_out"):
                    self.log.note(
                        f"step {outcome.steps}: {late} completions have no reward, which counts as "
                        "0: a call took longer than rewards.deadline_s; raise that, or make the "
                        "function faster"
                    )
                if shown:
                    self.log.completions(outcome.steps, shown)
                self._evaluate()  # before it is saved, so that a run that resumes does not again
                if every and outcome.steps % every == 0:
                    self._save()
            self._save()
        if self.signal is not None and outcome.steps < self.steps:
            outcome.stopped = self.signal
            self.log.note(
                f"stopped by {self.signal} after step {outcome.steps} of {self.steps}; "
                "to continue, run it again with checkpoint.resume=auto"
            )
        return outcome

    def _refit(self) -> None:
        if self.config["method"] == "grpo":
            # Versions are steps, so that they are the same after a resume.
            self.study.backends.refit(self.outcome.steps + 1)

    def _evaluate(self) -> None:
        step, every = self.outcome.steps, self.config["evaluation"].get("every", 0)
        due = step in (0, self.steps) or (every and step % every == 0)
        if self.tested and due:
            figures = self._with_engine(partial(evaluate, self.study, self.tested))
            self.outcome.evaluations[step] = figures
            self.log.evaluation(step, figures)

    @contextmanager
    def _saved_if_it_fails(self, before: Mapping[str, Any]) -> Iterator[None]:
        """Keeps the steps that were done, if one fails before it trains: in a reward, say."""
        trained = self.study.tokens
        try:
            yield
        except Exception:
            if self.outcome.steps and self.study.tokens == trained:
                self._put(before)
                with suppress(RLError):  # the caller must see why the step failed
                    self._save()
            raise

    def _save(self) -> None:
        if self.saved != self.outcome.steps:
            self.outcome.checkpoint = self.checkpoints.save(
                self.outcome.steps, self.study.backends.policy, self._state()
            )
            self.saved = self.outcome.steps
            self.log.note(f"saved {self.outcome.checkpoint}")

    def _with_engine(self, act: Callable[[], Any], before: dict[str, Any] | None = None) -> Any:
        """Does something; with another engine and the same numbers if the engine died."""
        trained, attempt = self.study.tokens, act
        while True:
            try:
                return attempt()
            except _OF_THE_ENGINE as error:
                # A policy that was trained, or that is at fault itself, cannot do the step again.
                done = before is not None and self.study.tokens != trained
                if self.config["method"] != "grpo" or done or not self.restarts:
                    raise
                self.restarts -= 1
                first = str(error).splitlines()[0]
                self.log.note(
                    f"the engine failed ({first}); starting another one, {self.restarts} more at "
                    "most"
                )
                attempt = partial(self._with_another_engine, act, before)

    def _with_another_engine(self, act: Callable[[], Any], before: dict[str, Any] | None) -> Any:
        if before is not None:
            self._put(before)
        self.study.backends.start_engine()
        self._refit()
        return act()

    def _state(self) -> dict[str, Any]:
        """What the loop's next numbers depend on, as JSON."""
        kind, words, spare = random.getstate()
        return {
            "order": self.study.order.state(),
            "generator": self.study.generator.get_state().tolist(),
            "random": [kind, list(words), spare],
            "tokens": self.study.tokens,
        }

    def _put(self, state: Mapping[str, Any]) -> None:
        self.study.order.load(state["order"])
        self.study.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))
        kind, words, spare = state["random"]
        random.setstate((kind, tuple(words), spare))
        self.study.tokens = state["tokens"]

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM is noted, the second one ends the process's work at once."""

        def note(number: int, _: object) -> None:
            if self.signal is not None:
                raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
            self.signal = signal.Signals(number).name
            self.log.note(
                f"{self.signal}: the run ends after this step; a second signal ends it at once"
            )

        try:
            before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _tokenizer_and_config(config: RunConfig) -> tuple[Any, Any]:
    """The model's tokenizer, and its configuration as transformers has it."""
    from transformers import AutoConfig, AutoTokenizer

    name = config["policy"]["model_name"]
    trust = config["policy"].get("trust_remote_code", False)
    try:
        return (
            AutoTokenizer.from_pretrained(name, trust_remote_code=trust),
            AutoConfig.from_pretrained(name, trust_remote_code=trust),
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the tokenizer of model {name!r} cannot be loaded: {str(error).splitlines()[0]}",
            fix="set model to a directory with a checkpoint and its tokenizer, or to a name on the "
            "hub",
            key="model",
        ) from error


def _check_rows(name: str, rows: Any) -> None:
    """Refuses what a caller passes, if these are not rows."""
    try:
        first = {} if rows is None else rows[0]
    except (LookupError, TypeError):  # empty, a DataFrame, a DatasetDict
        first = None
    if not isinstance(first, Mapping):
        raise ConfigError(
            f"{name}: a {type(rows).__name__} is no list of rows, or it is empty",
            fix="give a list of dicts or a datasets.Dataset: of a DataFrame to_dict('records'), of "
            "a DatasetDict one split; for a file, set data.path",
            key=name,
        )


def _tolerance(config: RunConfig, model: Any) -> float:
    """How far log-probs may be apart, in the coarser of the dtypes of engine and policy."""
    dtypes = {config["policy"].get("torch_dtype", "float32")}
    dtypes.add(config["generation"].get("torch_dtype", "auto"))
    if "auto" in dtypes:
        dtypes = dtypes - {"auto"} | {str(model.dtype or "float32").removeprefix("torch.")}
    return TOLERANCE["float32" if dtypes == {"float32"} else "other"]
