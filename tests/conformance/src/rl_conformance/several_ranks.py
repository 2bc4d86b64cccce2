"""A policy of which one copy is spread over several ranks, beside the same policy on one."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_conformance.batches import generated_mask
from rl_conformance.expect import CheckFailed, require, same
from rl_conformance.reference import make_reference
from rl_conformance.refits import run_refit
from rl_conformance.training import training_config
from rl_conformance.training_oracle import update_error
from rl_conformance.weights import checkpoint_weights, engine_weights
from rl_core.batch import BatchedDataDict
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

    import torch

    from rl_conformance.context import Context
    from rl_core.interfaces import ColocatablePolicyInterface, LossFunction
    from rl_hosting.cluster.launcher import Workers

__all__ = [
    "OF_AN_UPDATE",
    "Beside",
    "Layout",
    "beside",
    "exported",
    "layouts_of",
    "moved_alike",
    "named_layouts",
    "offered",
    "policy_on",
    "ranks_of",
    "same_step",
    "scores_fit",
    "settings_of",
]

#: Of an update: what the order of sums may change in AdamW's, which divides small gradients.
OF_AN_UPDATE = 3e-2

_OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 5.0}
_SCHEDULE: dict[str, Any] = {"name": "linear", "warmup_steps": 2, "total_steps": 60}
#: Rows of which some share a microbatch.
_PACKING: dict[str, Any] = {"sequence_packing": {"enabled": True, "train_mb_tokens": 64}}
_DYNAMIC: dict[str, Any] = {
    "dynamic_batching": {"enabled": True, "train_mb_tokens": 64, "sequence_length_round": 8}
}
#: Architecture, its keys, settings, and how rows are put together where a layout takes that. No
#: number of ranks divides the vocabulary.
_KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "untied": (
        "llama",
        {"vocab_size": 269, "num_layers": 4},
        {"max_grad_norm": 1.0, "temperature": 0.8},
        _PACKING,
    ),
    "dropping": (
        "qwen2",
        {"vocab_size": 269, "attention_dropout": 0.5},
        {"max_grad_norm": None, "seed": 3},
        _DYNAMIC,
    ),
}
#: So many pairs are kept, or one for each layout.
_KEPT = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """How a backend spreads a copy of a tiny model.

    Attributes:
        name: What the plugin calls it.
        ranks: How many there are, of all copies.
        config: The keys that select it.
        own_rows: Each rank has other rows, and yet only a part of the weights.
    """

    name: str
    ranks: int
    config: Mapping[str, Any]
    own_rows: bool = False


def named_layouts(ctx: Context) -> Mapping[str, Any]:
    """What the plugin names for the device of the run."""
    return ctx.target.tiny.get(ctx.settings.device, {}).get("sharded", {})


def layouts_of(ctx: Context) -> list[Layout]:
    """The layouts that the run tries."""
    device, name = ctx.settings.device, ctx.target.name
    if not ctx.target.installed:
        ctx.not_run("the backend is not installed, or not under this name", excused=True)
    named = named_layouts(ctx)
    require(
        named,
        f"entry point {name!r} of the group rl_core.conformance, as sharded is declared",
        f'{{"{device}": {{"sharded": {{"tp2": {{"ranks": 2, "config": {{...}}}}}}}}}}',
        "no layout",
    )
    layouts = ctx.target.layouts(ctx.settings)
    if not layouts:
        ctx.not_run("every layout has more ranks than there are GPUs here", excused=True)
    return [Layout(name, **each) for name, each in layouts.items()]


def policy_on(
    ctx: Context, ranks: int, config: Mapping[str, Any], dtype: str
) -> ColocatablePolicyInterface:
    """The policy under test on so many ranks of this host."""
    from rl_core.create import create_policy
    from rl_hosting import LocalCluster

    ctx.workshop.built["policy"] += 1
    base = ctx.target.base_config("policy", ctx.settings, dtype)
    return create_policy({**base, **config}, LocalCluster(ranks))


def ranks_of(policy: Any) -> Workers:
    """The workers of a :func:`policy_on` several ranks, to call each alone."""
    workers: Workers = policy._group
    return workers


def offered(ctx: Context, capability: str) -> bool:
    """Whether the policy offers a capability here."""
    found = ctx.manifest.capabilities["policy"][capability]
    return found.level == "full" and ctx.settings.device in found.devices


def settings_of(ctx: Context, kind: str) -> tuple[Path, dict[str, Any]]:
    """The checkpoint of a kind, and how a policy of it is configured on any number of ranks."""
    family, keys, settings, _ = _KINDS[kind]
    path = ctx.model(family, **keys)
    return path, training_config() | {
        "model_name": str(path),
        "optimizer": _OPTIMIZER,
        "scheduler": _SCHEDULE,
        **settings,
    }


class Beside:
    """Two policies of one configuration, to which the same is done.

    Args:
        ctx: Of the check that builds them.
        layout: Of the second.
        kind: ``"untied"``, which clips and packs, or ``"dropping"``, with tied embeddings.
        dtype: Of the weights.

    Attributes:
        path: The checkpoint of both.
        config: Of both.
        one: On one rank.
        many: On those of the layout.
        steps: How many times they were trained.
    """

    def __init__(self, ctx: Context, layout: Layout, kind: str, dtype: str) -> None:
        self.path, self.config = settings_of(ctx, kind)
        self.dtype = dtype
        self.steps = 0
        if offered(ctx, "policy_generate"):
            sampling = {"max_new_tokens": 6, "temperature": self.config.get("temperature", 1.0)}
            self.config["generation"] = sampling
        self.one: Any = None
        plain = self.config
        self.config = {**plain, **_KINDS[kind][3]}
        try:
            self.many = policy_on(ctx, layout.ranks, {**self.config, **layout.config}, dtype)
        except ConfigError:  # a layout may refuse packing and dynamic batching
            self.config = plain
            self.many = policy_on(ctx, layout.ranks, {**plain, **layout.config}, dtype)
        try:
            # Copies have other rows, and so drop other things; the ranks of a copy do not.
            copies: int = self.many.data_parallel_size
            if kind == "dropping" and copies > 1:
                self.one = policy_on(ctx, copies, self.config, dtype)
                whole = self.one.data_parallel_size
                same(whole, copies, f"data_parallel_size without {layout.config}")
            else:
                self.one = ctx.workshop.build("policy", dtype, self.config)
        except BaseException:
            self.shutdown()
            raise

    def train(
        self, data: BatchedDataDict[Any], loss_fn: LossFunction, **sizes: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Trains both on the same rows; both results."""
        self.steps += 1
        for policy in (self.one, self.many):
            policy.prepare_for_training()
        return (
            self.one.train(data, loss_fn, **sizes),
            self.many.train(data, loss_fn, **sizes),
        )

    def scores(self, data: BatchedDataDict[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of both."""
        both = []
        for policy in (self.one, self.many):
            policy.prepare_for_lp_inference()
            both.append(policy.get_logprobs(data)["logprobs"])
        return both[0], both[1]

    def shutdown(self) -> None:
        """Ends both."""
        try:
            self.many.shutdown()
        finally:
            if self.one is not None:
                self.one.shutdown()


@contextmanager
def beside(
    ctx: Context,
    layout: Layout,
    kind: str = "untied",
    dtype: str | None = None,
    *,
    untrained: bool = False,
) -> Generator[Beside]:
    """The policies of a layout, which checks share; what fails in the body names the layout.

    Args:
        ctx: Of the check.
        layout: One of :func:`layouts_of`.
        kind: See :class:`Beside`.
        dtype: Of the weights, if not that of the run.
        untrained: Both have the weights of the checkpoint.
    """
    dtype = dtype or ctx.settings.dtype

    most = max(_KEPT, len(ctx.target.layouts(ctx.settings)))

    def build() -> Beside:
        return Beside(ctx, layout, kind, dtype)

    try:
        pair: Beside = ctx.workshop.keep("ranks", f"{layout} {kind} {dtype}", build, most=most)
        yield ctx.closing(build()) if untrained and pair.steps else pair
    except CheckFailed as failure:
        failure.what = f"{layout.name}: {failure.what}"
        raise
    except Exception as error:
        error.add_note(f"in the layout {layout.name}")
        raise


def same_step(ctx: Context, one: Mapping[str, Any], many: Mapping[str, Any]) -> None:
    """Fails unless two results of ``train`` are alike, each step of a call and each metric."""
    mean, largest = ctx.tolerance_of("float32")
    history, other = one.get("step_metrics", {}), many.get("step_metrics", {})
    for key in history.keys() | one.keys() - {"step_metrics", "all_mb_metrics"}:
        require(key in many, "the result of train", f"a value of {key}", sorted(many))
        counts = (len(other.get(key, [])), len(history.get(key, [])))
        same(*counts, f"values of {key} in step_metrics, as on one rank")
        ours = [many[key], *other.get(key, [])]
        for got, expected in zip(ours, [one[key], *history.get(key, [])], strict=True):
            off = abs(float(got) - float(expected))
            if key == "grad_norm":
                of, most = max(float(expected), 1e-6), max(mean, 1e-3)
                ctx.measure_near("grad_norm_relative_error", got, expected, most, of)
            elif key == "loss":
                ctx.measure_near("loss_error", got, expected, largest)
            else:
                allowed = largest * max(1.0, abs(float(expected)))
                require(off <= allowed, f"{key}, as on one rank", expected, got)


def moved_alike(ctx: Context, pair: Beside) -> None:
    """Fails unless each tensor changed alike on several ranks and on one."""
    start = checkpoint_weights(pair.path)
    config: dict[str, Any] = {"model_name": str(pair.path), "torch_dtype": pair.dtype}
    config["temperature"] = pair.config.get("temperature", 1.0)
    both = []
    for policy in (pair.one, pair.many):
        engine = ctx.closing(make_reference("generation", config))
        run_refit(policy, engine)
        both.append(engine_weights(engine))
    one, many = both
    error, name = update_error(many, {key: one[key] for key in start}, start)
    ctx.measure(f"update_relative_error of {name}", error, OF_AN_UPDATE)


def exported(ctx: Context, policy: Any, path: Path | None = None) -> dict[str, torch.Tensor]:
    """The tensors in the checkpoint that a policy saves, in a directory of its own or that one."""
    path = path or ctx.directory() / "checkpoint"
    policy.save_checkpoint(str(path))
    return checkpoint_weights(next(file.parent for file in sorted(path.rglob("config.json"))))


def scores_fit(
    ctx: Context,
    policy: Any,
    prompts: BatchedDataDict[Any],
    output: BatchedDataDict[Any],
    dtype: str | None = None,
    scale: float = 1.0,
) -> None:
    """Fails unless the log-probs of what was drawn are those with which the policy scores it.

    Args:
        ctx: Of the check.
        policy: Whose weights and temperature it was drawn with.
        prompts: What was given.
        output: What was generated.
        dtype: Of the weights, if not that of the run.
        scale: The reciprocal of the temperature.
    """
    sequences = {"input_ids": "output_ids", "input_lengths": "unpadded_sequence_lengths"}
    rows = BatchedDataDict[Any]({key: output[column] for key, column in sequences.items()})
    policy.prepare_for_lp_inference()
    inside = generated_mask(prompts, output)
    require(inside.any(), "the output of generate", "some tokens", "none")
    scores = policy.get_logprobs(rows)["logprobs"]
    ctx.measure_error(output["logprobs"][inside], scores[inside], dtype, scale=2 * scale)
