# ruff: noqa: D102
"""Tokens per second of rl-vllm against bare vLLM on the same requests, and what a refit costs.

    python benchmarks/engine_vllm.py [--json FILE]

Needs vLLM. Bare vLLM is its ``LLM`` class as its documentation shows it, in a process of its own
with the same environment: once with its engine in that process, once with its engine in another,
which is its default. All take turns, and the best round of each counts. Log-probs of the sampled
tokens are asked of all. The refit comes from a trainer in this process, next to a plain copy of the
same bytes, and to vLLM's own ``reload_weights``, which reads them from the checkpoint's files.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from bench_generation import PAD, make_model, make_prompts
from rich.console import Console
from rich.table import Table

from rl_core import create_policy
from rl_core.batch import BatchedDataDict
from rl_core.refit import refit
from rl_vllm import VllmGeneration
from rl_vllm.environment import engine_environment

SEED = 1000


def bare(pipe: Any, path: str, engine: dict[str, Any], environment: dict[str, str]) -> None:
    """A process with bare vLLM: answers prompts with seconds and tokens."""
    os.environ.update(environment)
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
        if request == "reload":
            began = time.perf_counter()
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


class Bare:
    """Bare vLLM."""

    def __init__(self, path: Path, engine: dict[str, Any], *, in_process: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        environment = engine_environment("cuda" if torch.cuda.is_available() else "cpu")
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(not in_process))
        arguments = (theirs, str(path), engine, environment)
        began = time.perf_counter()
        self.process = context.Process(target=bare, args=arguments)
        self.process.start()
        assert self.pipe.recv() == "ready"
        self.start_s = time.perf_counter() - began

    def __call__(
        self, data: BatchedDataDict[Any], new_tokens: int, *, greedy: bool, seeded: bool
    ) -> tuple[float, list[list[int]]]:
        rows = zip(data["input_ids"].tolist(), data["input_lengths"].tolist(), strict=True)
        self.pipe.send(([ids[:n] for ids, n in rows], new_tokens, greedy, seeded))
        answer: tuple[float, list[list[int]]] = self.pipe.recv()
        return answer

    def reload(self) -> float:
        """Seconds of vLLM's own way to new weights."""
        self.pipe.send("reload")
        seconds: float = self.pipe.recv()
        return seconds

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join()


class Ours:
    """The plugin, from batch to batch."""

    def __init__(self, path: Path, engine: dict[str, Any], new_tokens: int) -> None:
        began = time.perf_counter()
        self.backend = VllmGeneration(
            None,
            {
                "model_name": str(path),
                "max_new_tokens": new_tokens,
                "eos_token_id": [],
                "pad_token_id": PAD,
                "vllm_cfg": engine,
            },
        )
        self.backend.prepare_for_generation()
        self.start_s = time.perf_counter() - began

    def __call__(
        self, data: BatchedDataDict[Any], new_tokens: int, *, greedy: bool, seeded: bool
    ) -> tuple[float, list[list[int]]]:
        del new_tokens
        batch = data.copy()
        if seeded:
            batch["seed"] = torch.arange(data.size) + SEED
        began = time.perf_counter()
        output = self.backend.generate(batch, greedy=greedy)
        seconds = time.perf_counter() - began
        ends = output["unpadded_sequence_lengths"].tolist()
        starts = data["input_lengths"].tolist()
        ids = output["output_ids"].tolist()
        return seconds, [row[a:b] for row, a, b in zip(ids, starts, ends, strict=True)]

    def close(self) -> None:
        self.backend.shutdown()


def generation(
    path: Path, engine: dict[str, Any], data: BatchedDataDict[Any], new_tokens: int, rounds: int
) -> dict[str, Any]:
    contenders: dict[str, Bare | Ours] = {
        "vLLM": Bare(path, engine, in_process=True),
        "vLLM, two processes": Bare(path, engine, in_process=False),
        "rl-vllm": Ours(path, engine, new_tokens),
    }
    found: dict[str, Any] = {
        "start_seconds": {name: one.start_s for name, one in contenders.items()}
    }
    modes = {"greedy": (True, False), "sampled, seeded": (False, True), "sampled": (False, False)}
    for mode, (greedy, seeded) in modes.items():
        rates = dict.fromkeys(contenders, 0.0)
        tokens: dict[str, list[list[int]]] = {}
        for _ in range(rounds + 1):
            for name, generate in contenders.items():
                seconds, tokens[name] = generate(data, new_tokens, greedy=greedy, seeded=seeded)
                rates[name] = max(rates[name], sum(map(len, tokens[name])) / seconds)
        if mode != "sampled":
            assert tokens["rl-vllm"] == tokens["vLLM"], f"{mode}: the tokens differ"
        best = max(rate for name, rate in rates.items() if name != "rl-vllm")
        found[mode] = {**rates, "ratio": rates["rl-vllm"] / best}
    for one in contenders.values():
        one.close()
    return found


def refits(path: Path, engine: dict[str, Any], rounds: int) -> dict[str, Any]:
    policy = create_policy({"backend": "hf", "model_name": str(path), "torch_dtype": "float32"})
    ours = Ours(path, {**engine, "dtype": "float32"}, 8)
    found = {}
    for verify in ("none", "wire", "installed"):
        reports = [
            refit(policy, ours.backend, verify=verify, deadline_s=120.0) for _ in range(rounds + 1)
        ]
        best = min(reports[1:], key=lambda report: report.seconds)
        found[verify] = best.as_dict()
    copy = {"seconds": plain_copy(found["wire"]["bytes"], rounds)}
    for report in found.values():
        report["of_plain_copy"] = copy["seconds"] / report["seconds"]
    found["plain copy"] = copy
    ours.close()
    policy.shutdown()
    plain = Bare(path, {**engine, "dtype": "float32"}, in_process=True)
    found["vLLM's reload_weights"] = {"seconds": min(plain.reload() for _ in range(rounds + 1))}
    plain.close()
    return found


def plain_copy(nbytes: int, rounds: int) -> float:
    """Seconds of one where the weights are, by the threads that torch uses here."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target, seconds = torch.zeros_like(source), []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def show(results: dict[str, Any]) -> None:
    console = Console()
    table = Table(title=f"tokens per second, {results['rows']} rows of {results['new_tokens']}")
    names = list(results["generation"]["start_seconds"])
    for column in ("", *names, "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for mode, row in results["generation"].items():
        if mode != "start_seconds":
            table.add_row(mode, *(f"{row[name]:.0f}" for name in names), f"{row['ratio']:.3f}")
    starts = results["generation"]["start_seconds"]
    table.add_row("start, s", *(f"{starts[name]:.1f}" for name in names), "")
    console.print(table)
    table = Table(
        title=f"refits of {results['refits']['none']['bytes'] / 1e6:.0f} MB, milliseconds"
    )
    for column in ("", "whole", "transfer", "finish", "GB/s", "of a copy"):
        table.add_column(column, justify="left" if not column else "right")
    for verify, report in results["refits"].items():
        cells = [f"{report['seconds'] * 1e3:.0f}"]
        if "phases" in report:
            cells += [f"{report['phases'][phase] * 1e3:.1f}" for phase in ("TRANSFER", "SEAL")]
            cells += [f"{report['gb_per_s']:.2f}", f"{report['of_plain_copy']:.2f}"]
        table.add_row(verify, *cells)
    console.print(table)


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
    engine = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 30}
    if not torch.cuda.is_available():
        engine["enforce_eager"] = True
    data = make_prompts(rows, longest, ragged=True)
    with TemporaryDirectory() as folder:
        path = make_model(Path(folder), hidden, layers)
        results = {
            "rows": rows,
            "new_tokens": new_tokens,
            "generation": generation(path, engine, data, new_tokens, rounds),
            "refits": refits(path, engine, rounds),
        }
    show(results)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
