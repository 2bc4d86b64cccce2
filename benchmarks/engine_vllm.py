"""Tokens per second of rl-vllm against bare vLLM on the same requests, and what a refit costs.

    python benchmarks/engine_vllm.py [--json FILE]

Needs vLLM. Bare vLLM is its ``LLM`` class as its documentation shows it: once with its engine in
the process that calls it, once with its engine in another, which is its default. The refit is also
next to vLLM's own ``reload_weights``, which reads them from the checkpoint's files.
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
from engine_pair import SEED, Bare, Ours, generation, refits, show

from rl_vllm.environment import engine_environment


def serve(
    pipe: Any, path: str, engine: dict[str, Any], environment: dict[str, str], in_process: bool
) -> None:
    """Bare vLLM: answers prompts with seconds and tokens."""
    os.environ.update(environment, VLLM_ENABLE_V1_MULTIPROCESSING=str(int(not in_process)))
    from vllm import LLM, SamplingParams

    llm = LLM(
        path,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **engine,
    )
    pipe.send("ready")
    while (request := pipe.recv()) is not None:
        began = time.perf_counter()
        if request == "reload":
            llm.collective_rpc("reload_weights")
            pipe.send(time.perf_counter() - began)
            continue
        prompts, new_tokens, greedy, seeded = request
        params = [
            SamplingParams(
                temperature=0.0 if greedy else 1.0,
                max_tokens=new_tokens,
                seed=SEED + row if seeded and not greedy else None,
                logprobs=0,
                detokenize=False,
                ignore_eos=True,
            )
            for row in range(len(prompts))
        ]
        began = time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        seconds = time.perf_counter() - began
        pipe.send((seconds, [list(output.outputs[0].token_ids) for output in outputs]))
    llm.llm_engine.engine_core.shutdown()
    os._exit(0)  # a process with an engine does not end by itself


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
    engine = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 30}
    if not cuda:
        engine["enforce_eager"] = True
    environment = engine_environment("cuda" if cuda else "cpu")
    data = make_prompts(rows, longest, ragged=True)
    with TemporaryDirectory() as folder:
        path = make_model(Path(folder), hidden, layers)
        contenders = {
            "vLLM": partial(Bare, serve, str(path), engine, environment, True),
            "vLLM, two processes": partial(Bare, serve, str(path), engine, environment, False),
            "rl-vllm": partial(Ours, "vllm", path, engine, new_tokens),
        }
        same = {"greedy": "vLLM", "sampled, seeded": "vLLM"}
        results = {
            "rows": rows,
            "new_tokens": new_tokens,
            "generation": generation(contenders, "rl-vllm", data, new_tokens, rounds, same),
            "refits": refits(Ours("vllm", path, engine, 8), path, rounds),
        }
        plain = Bare(serve, str(path), engine, environment, True)
        seconds = min(plain.ask("reload") for _ in range(rounds + 1))
        results["refits"]["vLLM's reload_weights"] = {"seconds": seconds}
        plain.close()
    show(results, json_path)


if __name__ == "__main__":
    typer.run(main)
