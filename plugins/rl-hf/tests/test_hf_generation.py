"""The generation backend: outputs, limits, refits and life cycle."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from prompt_rows import random_prompts

from rl_core.errors import ConfigError, LifecycleError
from rl_hf.generation import HuggingFaceGeneration


def awake(path: Path, **config: Any) -> HuggingFaceGeneration:
    backend = HuggingFaceGeneration(str(path), **{"max_new_tokens": 6, **config})
    backend.prepare_for_generation()
    return backend


def test_the_context_may_not_be_widened(tiny: Callable[..., Path]):
    with pytest.raises(ConfigError, match="max_model_len 257 is above the model's context of 256"):
        HuggingFaceGeneration(str(tiny()), max_model_len=257)


def test_configured_stop_strings_need_a_tokenizer(tiny: Callable[..., Path], tmp_path: Path):
    for file in ("config.json", "model.safetensors", "generation_config.json"):
        (tmp_path / file).symlink_to(tiny() / file)
    generation = awake(tmp_path, eos_token_id=[])
    assert generation.generate(random_prompts(3))["generation_lengths"].tolist() == [6]
    with pytest.raises(ConfigError, match="has no tokenizer"):
        HuggingFaceGeneration(str(tmp_path), stop_strings=["x"])
    data = random_prompts(3, 3)
    data["stop_strings"] = [None, ["x"]]
    with pytest.raises(ConfigError, match="row 1 has stop strings"):
        awake(tmp_path).generate(data)


def test_shutdown_lets_go_of_the_model(tiny: Callable[..., Path]):
    backend = awake(tiny())
    backend.generate(random_prompts(4))
    model = weakref.ref(backend._model)
    assert backend.shutdown()
    assert backend.shutdown()
    gc.collect()
    assert model() is None
    with pytest.raises(LifecycleError, match="after shutdown"):
        backend.generate(random_prompts(4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sleep_gives_back_the_weights_memory(
    tiny: Callable[..., Path], allocated: Callable[[], int]
):
    path = tiny(hidden_size=512, num_layers=4)
    backend, data = awake(path, device="cuda"), random_prompts(4, 9)
    before = backend.generate(data, greedy=True)
    resident = allocated()
    backend.finish_generation()
    assert allocated() < 0.1 * resident
    backend.prepare_for_generation()
    assert torch.equal(backend.generate(data, greedy=True)["output_ids"], before["output_ids"])


def test_a_process_that_ends_while_it_decodes_ends_well(tiny):
    code = f"""
        import threading, time, torch
        from rl_core.batch import BatchedDataDict
        from rl_hf import HuggingFaceGeneration
        config = {{"model_name": {str(tiny())!r}, "max_new_tokens": 200, "eos_token_id": []}}
        engine = HuggingFaceGeneration(**config)
        engine.prepare_for_generation()
        ids = torch.full((4, 3), 5)
        data = BatchedDataDict({{"input_ids": ids, "input_lengths": torch.full((4,), 3)}})
        def calls():
            while True:
                engine.generate(data)
        for _ in range(3):
            threading.Thread(target=calls, daemon=True).start()
        time.sleep(1.0)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=280
    )
    assert (ended.returncode, ended.stderr) == (0, "")
