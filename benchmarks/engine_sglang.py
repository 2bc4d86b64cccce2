"""Tokens per second of rl-sglang against bare SGLang on the same requests, and what a refit costs.

    python benchmarks/engine_sglang.py [--json FILE]

Needs SGLang. Bare SGLang is its ``Engine`` class, with its scheduler in a process of its own as the
plugin's; without tokenizers, as the plugin. It has no seeds for rows, so that its two ways of
sampling are one.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from bench_generation import make_model, make_prompts
from engine_pair import Bare, Ours, generation, refits, show

from rl_sglang.environment import engine_environment


def serve(pipe: Any, path: str, engine: dict[str, Any], environment: dict[str, str]) -> None:
    """Bare SGLang: answers prompts with seconds and tokens."""
    os.environ.update(environment)
    from rl_sglang import launch

    if not torch.cuda.is_available():  # a spawned scheduler would lack what stands in
        launch.sglang_engine.mp = launch.Forking()
    llm = launch.sglang_engine.Engine(
        model_path=path,
        skip_tokenizer_init=True,
        skip_server_warmup=True,
        grammar_backend="none",
        sleep_on_idle=True,
        **engine,
    )
    pipe.send("ready")
    while (request := pipe.recv()) is not None:
        prompts, new_tokens, greedy, _ = request
        params = {
            "temperature": 0.0 if greedy else 1.0,
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
        }
        began = time.perf_counter()
        outputs = llm.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        pipe.send((time.perf_counter() - began, [list(one["output_ids"]) for one in outputs]))
    llm.shutdown()
    os._exit(0)


def main(
    rows: Annotated[int, typer.Option(help="Prompts in the batch.")] = 64,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 512,
    layers: Annotated[int, typer.Option(help="Depth of the model.")] = 6,
    longest: Annotated[int, typer.Option(help="Longest prompt, in tokens.")] = 256,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated per row.")] = 128,
    rounds: Annotated[int, typer.Option(help="The best round counts.")] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where to write JSON.")] = None,
) -> None:
    """Prints the tables and writes them as JSON."""
    cuda = torch.cuda.is_available()
    shared = {"dtype": "float32", "max_total_tokens": 1 << 16, "disable_radix_cache": True}
    on_cpu = {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}
    bare = {**shared, "max_running_requests": 256, **({} if cuda else on_cpu)}
    environment = engine_environment("cuda" if cuda else "cpu")
    data = make_prompts(rows, longest, ragged=True)
    with TemporaryDirectory() as folder:
        path = make_model(Path(folder), hidden, layers)
        contenders = {
            "SGLang": partial(Bare, serve, str(path), bare, environment),
            "rl-sglang": partial(Ours, "sglang", path, shared, new_tokens),
        }
        same = {"greedy": "SGLang"}
        results = {
            "rows": rows,
            "new_tokens": new_tokens,
            "generation": generation(contenders, "rl-sglang", data, new_tokens, rounds, same),
            "refits": refits(Ours("sglang", path, shared, 8), path, rounds),
        }
    show(results, json_path)


if __name__ == "__main__":
    typer.run(main)
