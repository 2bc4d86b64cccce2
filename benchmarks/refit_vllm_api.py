"""Updates through vLLM's weight-transfer API by ``rl-guests``, against vLLM's own reload.

    python benchmarks/refit_vllm_api.py [--layers 12] [--rounds 7] [--json out.json]

in an environment with vLLM. One process has trainer and engine; all ways take turns, and of each
the least and the median seconds of a round count. ``reload`` gives vLLM's ``reload_weights`` the
tensors of this process, which no transport brings and nothing verifies: what loading alone costs
vLLM. ``file`` writes a checkpoint into memory (``/dev/shm``) first, and has vLLM read that.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

from rl_vllm.environment import engine_environment

os.environ |= {**engine_environment("cpu"), "VLLM_PLUGINS": "rl_core"}

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from vllm import LLM
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

from rl_conformance.models import make_tiny_model
from rl_guests.vllm import TrainerInitInfo

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
}


class Client:
    """vLLM's API for an engine in this process."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """The trainer introduces itself."""
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """An update begins."""
        self.llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Weights are written."""
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The engine goes on."""
        self.llm.finish_weight_update(weight_version)


def main(
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 12,
    rounds: Annotated[int, typer.Option(help="Rounds, the first of which does not count.")] = 7,
    as_json: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Measures and prints."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        path = str(
            make_tiny_model(Path(memory, "model"), "qwen2", num_hidden_layers=layers, **SIZES)
        )
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        llm = LLM(
            path,
            dtype="float32",
            weight_transfer_config={"backend": "rl_core"},
            enforce_eager=True,
            max_model_len=64,
            kv_cache_memory_bytes=32 << 20,
            disable_log_stats=True,
        )
        tensors = dict(model.named_parameters())

        def send(**options: Any) -> Any:
            return WeightTransferTrainerFactory.trainer_init(
                TrainerInitInfo(rank=0, receivers=1, options=options),
                client=Client(llm),
                source=ModuleSource(model),
            ).send_weights

        def reload() -> None:
            llm.collective_rpc(
                lambda worker: worker.reload_weights(weights_iterator=iter(tensors.items()))
            )

        def file() -> None:
            folder = Path(memory, "file")
            if not folder.exists():
                shutil.copytree(path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
            save_file({n: t.detach() for n, t in tensors.items()}, folder / "model.safetensors")
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})

        ways = {
            "reload": reload,
            "file": file,
            "none": send(verify="none"),
            "wire": send(verify="wire"),
            "installed": send(verify="installed"),
            "packed, wire": send(verify="wire", mode="packed"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            for name, way in ways.items():
                with torch.no_grad():
                    for tensor in tensors.values():
                        tensor.add_(1e-4)
                start = time.perf_counter()
                way()
                if number:
                    seconds[name].append(time.perf_counter() - start)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
    table = Table(title=f"{nbytes / 1e6:.0f} MB in {len(tensors)} tensors, rounds: {rounds - 1}")
    for column in ("way", "least s", "median s", "of reload", "of file"):
        table.add_column(column)
    least = {name: min(found) for name, found in seconds.items()}
    for name, found in seconds.items():
        ratios = [f"{least[name] / least[peer]:.2f}" for peer in ("reload", "file")]
        table.add_row(name, f"{least[name]:.3f}", f"{statistics.median(found):.3f}", *ratios)
    Console().print(table)
    if as_json:
        as_json.write_text(json.dumps({"bytes": nbytes, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    typer.run(main)
