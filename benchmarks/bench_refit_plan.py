"""Plans of refits: how long large ones take, and least seconds next to what others published.

    python benchmarks/bench_refit_plan.py --json plans.json

Nothing is transferred. The second table is that of docs/guide/planning-a-refit.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from rl_cli.planning import Devices, Links, Shape, model_of, predict

PER_HOST, LINKS = 8, Links()

QWEN3: dict[str, Any] = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936}
QWEN3_MOE = QWEN3 | {"model_type": "qwen3_moe", "num_experts": 128, "num_key_value_heads": 4}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
}
MODELS = {
    "Qwen3-4B": QWEN3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B": QWEN3_MOE
    | {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "Qwen3-235B-A22B": QWEN3_MOE
    | {
        "hidden_size": 4096,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
    "DeepSeek-V3": DEEPSEEK,
    "Kimi-K2": DEEPSEEK
    | {
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "n_routed_experts": 384,
        "first_k_dense_replace": 1,
        "vocab_size": 163840,
    },
}


class Published(NamedTuple):
    """A refit that others measured.

    Attributes:
        model: Its name.
        dtype: In which the weights travel.
        trainer: Its shape.
        engine: The engines' shape.
        who: Published it.
        seconds: As published.
    """

    model: str
    dtype: str
    trainer: str
    engine: str
    who: str
    seconds: str


PUBLISHED = [
    Published("Qwen3-4B", "bfloat16", "tp2pp2dp2", "tp4x2", "NeMo RL #2808", "0.13"),
    Published("Qwen3-30B-A3B", "bfloat16", "ep8pp2", "tp8x2", "NeMo RL #2808", "0.50-0.51"),
    Published(
        "Qwen3-235B-A22B", "bfloat16", "tp4pp8ep16etp1", "tp8x16", "NeMo RL #2808", "4.56-4.85"
    ),
    Published(
        "DeepSeek-V3",
        "bfloat16",
        "pp16ep16",
        "tp32x8",
        "NeMo RL #2808",
        "7.65-9.94, later 2.39-2.83",
    ),
    Published(
        "Qwen3-235B-A22B", "bfloat16", "tp4pp4dp4ep16etp1", "tp32ep32x2", "Miles, P2P", "3.16"
    ),
    Published("Kimi-K2", "float8_e4m3fn", "tp8pp8dp4ep32etp1", "tp32ep32x8", "Miles, P2P", "7.23"),
]
#: What a plan of a trillion parameters on 1,024 and 256 ranks is measured with.
LARGE = [
    ("pp16ep64", "tp16x16"),
    ("tp8pp16dp8", "tp16x16"),
    ("fsdp1024", "tp16x16"),
    ("pp16ep64", "tp16ep16x16"),
]


def plan(model: str, trainer: str, engine: str, dtype: str = "bfloat16") -> dict[str, Any]:
    """The figures of a plan, and the seconds and memory that it takes in this process."""
    start = time.perf_counter()
    has = Shape.parse(trainer, "--trainer")
    wants = Shape.parse(engine, "--engine", whole_experts=True)
    first = -(-has.ranks // PER_HOST) * PER_HOST
    devices = Devices(range(has.ranks), range(first, first + wants.ranks), PER_HOST)
    found = predict(model_of(MODELS[model], dtype), has, wants, devices, LINKS)
    return {
        "model": model,
        "trainer": trainer,
        "engine": engine,
        "ranks": [has.ranks, wants.ranks],
        "plan_s": time.perf_counter() - start,
        "plan_cpu_s": time.process_time(),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
        **found.facts(),
    }


def in_process(*arguments: str) -> dict[str, Any]:
    """The same in a process of its own, so that its peak of memory is its own."""
    command = [sys.executable, __file__, "--one", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(plan(*options.one)))
        return
    idle = in_process("Qwen3-4B", "tp1", "tp1")
    large = [in_process("Kimi-K2", *shapes) for shapes in LARGE]
    print(f"An interpreter with the planner alone: {idle['peak_mb']:.0f} MB\n")
    print("| Kimi-K2 on 1,024 and 256 ranks | moves | plan, s | CPU of the process, s | peak, MB |")
    print("|---|---|---|---|---|")
    for each in large:
        print(
            f"| `{each['trainer']}` to `{each['engine']}` | {each['moves']:,} | "
            f"{each['plan_s']:.2f} | {each['plan_cpu_s']:.2f} | {each['peak_mb']:.0f} |"
        )
    print(
        f"\nAssumed: {PER_HOST} GPUs per host, {LINKS.within:g} GB/s within it and "
        f"{LINKS.between:g} GB/s to others, for each GPU in each direction.\n"
    )
    print(
        "| model | trainer | engines | received per rank | predicted, at least | gather and "
        "broadcast, at least | published | by |"
    )
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for each in PUBLISHED:
        facts = plan(each.model, each.trainer, each.engine, each.dtype)
        rows.append(facts | each._asdict())
        received = facts["received_per_engine_rank"]["max"] / 1e9
        print(
            f"| {each.model}, {each.dtype} | `{each.trainer}` | `{each.engine}` | "
            f"{received:.3g} GB | {facts['lower_bound_s']:.2g} s | "
            f"{facts['gather_and_broadcast']['lower_bound_s']:.2g} s | {each.seconds} s | "
            f"{each.who} |"
        )
    if options.json:
        options.json.write_text(json.dumps({"large": large, "published": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
