"""``rl check logprobs|max-model-len|generation-consistency``: diagnostics of a model."""

from __future__ import annotations

import argparse
import dataclasses
import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from rl_cli.command import Command
from rl_cli.output import chatter_to_stderr, console_for_result

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["app"]


def measure(options: argparse.Namespace) -> int:
    with chatter_to_stderr():
        result, facts = options.measure(options)
    if options.json:
        import msgspec  # writes what is not a number as null, as JSON needs it

        document = {"passed": result.passed, **dataclasses.asdict(result)}
        print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    else:
        _print(result.passed, facts)
    return int(not result.passed)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    raise argparse.ArgumentTypeError(f"not a JSON object: {text}")


def _generation(options: argparse.Namespace) -> dict[str, Any]:
    """The engine's configuration; what the user wrote as JSON has the last word."""
    return {
        "backend": options.generation,
        "model_name": options.model,
        **options.generation_config,
    }


def _logprobs(options: argparse.Namespace) -> tuple[Any, dict[str, str]]:
    from rl_conformance.diagnostics.agreement import measure_log_probability_consistency
    from rl_conformance.diagnostics.engine import random_prompts
    from rl_core.create import create_generation, create_policy

    generation = {"max_new_tokens": options.max_new_tokens, **_generation(options)}
    policy = {"backend": options.policy, "model_name": options.model, **options.policy_config}
    with ExitStack() as stack:
        engine: Any = create_generation(generation)
        stack.callback(engine.shutdown)
        trainer = create_policy(policy)
        stack.callback(trainer.shutdown)
        facts = engine.facts
        lengths = [1 + row % (facts.max_model_len // 2) for row in range(options.rows)]
        prompts = random_prompts(facts.vocab_size, lengths, avoid=facts.pad_token_id)
        result = measure_log_probability_consistency(trainer, engine, prompts, options.threshold)
    lines = {"error": f"{result.error:.6f}, must be below {result.threshold:g}"}
    for mode, agreement in (("greedy", result.greedy), ("sampled", result.sampled)):
        lines[mode] = _describe(agreement) if agreement else "cannot be compared"
    return result, lines


def _max_model_len(options: argparse.Namespace) -> tuple[Any, dict[str, str]]:
    from rl_conformance.diagnostics.engine import test_max_model_len_respected

    config = {"max_model_len": options.max_model_len, **_generation(options)}
    result = test_max_model_len_respected(**config)
    pairs = zip(result.prompt_lengths, result.total_lengths, strict=True)
    rows = ", ".join(f"{length} -> {total}" for length, total in pairs)
    lines = {"limit": f"{result.max_model_len} tokens", "rows": rows}
    return result, lines | {f"problem {i + 1}": text for i, text in enumerate(result.problems)}


def _generation_consistency(options: argparse.Namespace) -> tuple[Any, dict[str, str]]:
    from rl_conformance.diagnostics.engine import test_generation_consistency

    config = {"max_new_tokens": options.max_new_tokens, **_generation(options)}
    result = test_generation_consistency(threshold=options.threshold, **config)
    return result, {
        "error": f"{result.agreement.error:.6f}, must be below {result.threshold:g}",
        "decode against prefill": _describe(result.agreement),
        "same tokens": f"{result.same_tokens:.1%}, must reach {result.min_same_tokens:.0%}",
        "longest output": f"{result.tokens_generated} tokens",
    }


def _describe(agreement: Any) -> str:
    return (
        f"mean exp(|d|) {agreement.error:.6f}, mean |d| {agreement.mean:.2e}, "
        f"max |d| {agreement.max:.2e}, {agreement.tokens} tokens, "
        f"worst row {agreement.worst_row} ({agreement.row_errors[agreement.worst_row]:.6f})"
    )


def _print(passed: bool, facts: Mapping[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for key, value in facts.items():
        table.add_row(Text(key, style="dim"), Text(value))
    console = console_for_result()
    console.print(table)
    console.print(Text("passed", "bold green") if passed else Text("failed", "bold red"))


_JSON: dict[str, Any] = {"type": _object, "default": {}, "metavar": "JSON"}

app = Command(
    "rl check",
    "Measure whether policy and engine agree on a model",
    details="Exits with 1 if a check fails.",
)
_agreement = app.command(
    "logprobs",
    "Compare the log-probs that policy and engine give to the same tokens",
    "rl check logprobs path/to/model --generation vllm",
    run=measure,
)
_agreement.add_argument("--policy", default="hf", metavar="NAME", help="the policy; default: hf")
_agreement.add_argument("--policy-config", **_JSON, help="further keys of the policy")
_agreement.add_argument("--rows", type=int, default=16, metavar="N", help="prompts; default: 16")
_agreement.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: 64")
_context = app.command(
    "max-model-len",
    "Check that the engine never exceeds its context length",
    "rl check max-model-len path/to/model --generation vllm",
    run=measure,
)
_context.add_argument(
    "--max-model-len", type=int, default=32, metavar="N", help="limit to set; default: 32"
)
_decoding = app.command(
    "generation-consistency",
    "Compare decoding with prefill over long outputs",
    "rl check generation-consistency path/to/model --generation vllm",
    run=measure,
)
_decoding.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default: 256")
for _command, _measure in (
    (_agreement, _logprobs),
    (_context, _max_model_len),
    (_decoding, _generation_consistency),
):
    _command.add_argument(
        "model", metavar="MODEL", help="directory (or hub name) of the checkpoint"
    )
    _command.add_argument(
        "--generation", default="hf", metavar="NAME", help="the engine; default: hf"
    )
    _command.add_argument("--generation-config", **_JSON, help="further keys of the engine")
    _command.add_argument("--json", action="store_true", help="print JSON")
    _command.set_defaults(measure=_measure)
for _command in (_agreement, _decoding):
    _command.add_argument(
        "--threshold",
        type=float,
        default=1.05,
        metavar="X",
        help="fails if the mean of exp(|error|) is not below; default: 1.05",
    )
