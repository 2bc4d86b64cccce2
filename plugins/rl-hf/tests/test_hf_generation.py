"""The generation backend: outputs, limits, refits and life cycle."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rl_conformance.oracle import Oracle
from rl_core import create_generation
from rl_core.batch import BatchedDataDict
from rl_core.errors import ConfigError, DataError, LifecycleError, WeightsTornError
from rl_core.weights import RefitSender
from rl_core.weights.tensors import NamedTensorSource, module_tensors
from rl_hf.generation import HuggingFaceGeneration

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def batch(*lengths: int, width: int = 0, seed: int = 0) -> BatchedDataDict[Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 269, (len(lengths), max(*lengths, width, 1)), generator=generator)
    sizes = torch.tensor(lengths, dtype=torch.int64)
    ids[torch.arange(ids.shape[1]) >= sizes[:, None]] = 0
    return BatchedDataDict({"input_ids": ids, "input_lengths": sizes})


def awake(path: Path, **config: Any) -> HuggingFaceGeneration:
    backend = HuggingFaceGeneration(str(path), **{"max_new_tokens": 6, **config})
    backend.prepare_for_generation()
    return backend


def test_the_factory_builds_it_by_name(tiny: Callable[..., Path]):
    backend = create_generation({"backend": "hf", "model_name": str(tiny()), "max_new_tokens": 3})
    assert isinstance(backend, HuggingFaceGeneration)
    backend.prepare_for_generation()
    assert backend.generate(batch(4), greedy=True)["generation_lengths"].tolist() == [3]


def test_outputs_are_prompts_then_tokens_then_padding(tiny: Callable[..., Path]):
    data = batch(9, 2, 30)
    output = awake(tiny(), seed=1).generate(data)
    totals = data["input_lengths"] + output["generation_lengths"]
    assert torch.equal(output["unpadded_sequence_lengths"], totals)
    assert output["output_ids"].shape == output["logprobs"].shape == (3, int(totals.max()))
    for row, (start, end) in enumerate(zip(data["input_lengths"], totals, strict=True)):
        assert torch.equal(output["output_ids"][row, :start], data["input_ids"][row, :start])
        assert not output["output_ids"][row, end:].any()
        scores = output["logprobs"][row]
        assert (scores[start:end] <= 0).all()
        assert not scores[:start].any()
        assert not scores[end:].any()


def test_two_hundred_and_fifty_six_rows_of_very_different_lengths(tiny: Callable[..., Path]):
    path, lengths = tiny(), [1 + (37 * i) % 200 for i in range(256)]
    data, oracle = batch(*lengths), Oracle(path)
    output = awake(path, max_batch_size=48).generate(data, greedy=True)
    for row in range(0, 256, 51):
        prompt = data["input_ids"][row, : lengths[row]].tolist()
        expected = oracle.greedy(prompt, 6)
        end = int(output["unpadded_sequence_lengths"][row])
        assert output["output_ids"][row, lengths[row] : end].tolist() == expected


def test_an_empty_batch_gives_the_keys_of_a_full_one(tiny: Callable[..., Path]):
    backend = awake(tiny())
    full, empty = backend.generate(batch(3)), backend.generate(batch(width=4))
    assert set(empty) == set(full)
    assert empty["output_ids"].shape == (0, 0)


def test_rows_without_room_generate_nothing_and_are_truncated(tiny: Callable[..., Path]):
    output = awake(tiny(), max_model_len=20).generate(batch(20, 17, 4), greedy=True)
    assert output["generation_lengths"].tolist() == [0, 3, 6]
    assert output["truncated"].tolist() == [True, True, True]


def test_the_context_may_not_be_widened(tiny: Callable[..., Path]):
    with pytest.raises(ConfigError, match="max_model_len 257 is above the model's context of 256"):
        HuggingFaceGeneration(str(tiny()), max_model_len=257)


def test_the_models_own_end_token_ends_a_row(tiny: Callable[..., Path]):
    path = tiny()
    free = awake(path).generate(batch(8), greedy=True)
    end = int(free["output_ids"][0, 10])
    stopped = awake(path, eos_token_id=end).generate(batch(8), greedy=True)
    first = free["output_ids"][0, 8:].tolist().index(end) + 1
    assert stopped["generation_lengths"].tolist() == [first]
    assert stopped["truncated"].tolist() == [False]


def test_seeds_reproduce_and_no_seed_does_not(tiny: Callable[..., Path]):
    path, data = tiny(), batch(5, 9)
    seeded = [awake(path, seed=4).generate(data)["output_ids"] for _ in range(2)]
    assert torch.equal(*seeded)
    backend = awake(path, temperature=3.0, max_new_tokens=30)
    free = [backend.generate(data)["output_ids"] for _ in range(2)]
    assert free[0].shape != free[1].shape or not torch.equal(*free)


def test_greedy_is_asked_for_by_call_or_by_configuration(tiny: Callable[..., Path]):
    path, data = tiny(), batch(5, 9)
    by_call = awake(path, temperature=2.0, top_k=3).generate(data, greedy=True)
    by_config = awake(path, temperature=2.0, do_sample=False).generate(data)
    assert torch.equal(by_call["output_ids"], by_config["output_ids"])
    torch.testing.assert_close(by_call["logprobs"], by_config["logprobs"])


def test_several_samples_are_repeat_interleave(tiny: Callable[..., Path]):
    path, data = tiny(), batch(5, 9)
    several = awake(path, num_samples=3, seed=2).generate(data)
    repeated = awake(path, seed=2).generate(data.repeat_interleave(3))
    assert torch.equal(several["output_ids"], repeated["output_ids"])
    assert len(several["output_ids"].unique(dim=0)) > 2


def test_rows_stream_as_they_finish_and_add_up_to_generate(tiny: Callable[..., Path]):
    backend = awake(tiny(), seed=3, max_model_len=40)
    data = batch(38, 5, 40, 34)
    data["tag"] = ["a", "b", "c", "d"]
    data["seed"] = torch.arange(4)

    async def collect() -> list[tuple[int, BatchedDataDict[Any]]]:
        return [item async for item in backend.generate_async(data)]

    rows = asyncio.run(collect())
    assert [row for row, _ in rows] == [0, 1, 3, 2] or [row for row, _ in rows] == [0, 3, 1, 2]
    whole = backend.generate(data)
    for row, output in rows:
        end = int(whole["unpadded_sequence_lengths"][row])
        assert output["tag"] == [data["tag"][row]]
        assert torch.equal(output["output_ids"][0], whole["output_ids"][row, :end])
        torch.testing.assert_close(
            output["logprobs"][0], whole["logprobs"][row, :end], atol=1e-4, rtol=0
        )


def test_stop_strings_of_config_and_row_are_merged(tiny: Callable[..., Path]):
    path, data = tiny(), batch(8, 8, 8)
    decode = Oracle(path).tokenizer.decode
    free = awake(path, max_new_tokens=12).generate(data, greedy=True)
    texts = [[decode(row[8:end]) for end in range(9, 21)] for row in free["output_ids"]]
    shared, own = texts[0][4][-2:], texts[1][5][-2:]
    data["stop_strings"] = [None, [own], ["never to be seen"]]
    output = awake(path, max_new_tokens=12, stop_strings=[shared]).generate(data, greedy=True)
    for row, strings in enumerate([(shared,), (shared, own), (shared,)]):
        ends = [n for n, text in enumerate(texts[row], 1) if any(s in text for s in strings)]
        assert int(output["generation_lengths"][row]) == min([*ends, 12])
        assert bool(output["truncated"][row]) == (not ends)
    assert output["generation_lengths"].tolist()[:2] != [12, 12]
    assert "stop_strings" not in output


def test_a_left_padded_row_is_named(tiny: Callable[..., Path]):
    data = batch(5, 5)
    data["input_ids"] = torch.tensor([[3, 4, 5, 6, 7], [0, 0, 3, 4, 5]])
    data["input_lengths"] = torch.tensor([5, 3])
    with pytest.raises(DataError, match="row 1"):
        awake(tiny()).generate(data)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"max_new_token": 4}, "max_new_token"),
        ({"temperature": 0.0}, "temperature"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"torch_dtype": "float8"}, "torch_dtype"),
    ],
)
def test_a_wrong_key_is_named_before_anything_is_loaded(config: dict[str, Any], key: str):
    with pytest.raises(ConfigError) as caught:
        HuggingFaceGeneration("no/such/model/anywhere", **config)
    assert caught.value.details["key"] == key


def test_configured_stop_strings_need_a_tokenizer(tiny: Callable[..., Path], tmp_path: Path):
    for file in ("config.json", "model.safetensors", "generation_config.json"):
        (tmp_path / file).symlink_to(tiny() / file)
    generation = awake(tmp_path, eos_token_id=[])
    assert generation.generate(batch(3))["generation_lengths"].tolist() == [6]
    with pytest.raises(ConfigError, match="has no tokenizer"):
        HuggingFaceGeneration(str(tmp_path), stop_strings=["x"])
    data = batch(3, 3)
    data["stop_strings"] = [None, ["x"]]
    with pytest.raises(ConfigError, match="row 1 has stop strings"):
        awake(tmp_path).generate(data)


def test_sleep_and_wake_leave_the_output_as_it_was(tiny: Callable[..., Path]):
    backend, data = awake(tiny()), batch(4, 9)
    before = backend.generate(data, greedy=True)
    for _ in range(2):
        assert backend.finish_generation()
    with pytest.raises(LifecycleError, match="prepare_for_generation"):
        backend.generate(data)
    for _ in range(2):
        assert backend.prepare_for_generation(tags=["weights"])
        assert backend.prepare_for_generation(tags=["kv_cache"])
    assert torch.equal(backend.generate(data, greedy=True)["output_ids"], before["output_ids"])


def test_shutdown_lets_go_of_the_model(tiny: Callable[..., Path]):
    backend = awake(tiny())
    backend.generate(batch(4))
    model = weakref.ref(backend._model)
    assert backend.shutdown()
    assert backend.shutdown()
    gc.collect()
    assert model() is None
    with pytest.raises(LifecycleError, match="after shutdown"):
        backend.generate(batch(4))


def test_a_refit_installs_the_weights_and_the_version(tiny: Callable[..., Path]):
    path, other, data = tiny(), tiny(seed=1), batch(4, 9)
    backend, trainer = awake(path), HuggingFaceGeneration(str(other))
    sender = RefitSender(lambda: NamedTensorSource(module_tensors(trainer._model)), name="trainer")
    try:
        info = sender.prepare()
        backend.prepare_refit_info(info)
        futures = [
            sender.send(deadline_s=60),
            *backend.receive_weights(deadline_s=60),
        ]
        for future in futures:
            future.result(timeout=90)
    finally:
        sender.close()
    output = backend.generate(data, greedy=True)
    fresh = awake(other).generate(data, greedy=True)
    assert output["weights_version"].tolist() == [1, 1]
    assert torch.equal(output["output_ids"], fresh["output_ids"])
    assert torch.equal(output["logprobs"], fresh["logprobs"])
    backend.shutdown()


def test_torn_weights_are_not_served(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    backend = awake(tiny())

    def torn() -> None:
        raise WeightsTornError("the last refit failed", phase="TRANSFER")

    monkeypatch.setattr(backend._receiver, "check", torn)
    with pytest.raises(WeightsTornError):
        backend.generate(batch(4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sleep_gives_back_the_weights_memory(
    tiny: Callable[..., Path], allocated: Callable[[], int]
):
    path = tiny(hidden_size=512, num_layers=4)
    backend, data = awake(path, device="cuda"), batch(4, 9)
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
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")
