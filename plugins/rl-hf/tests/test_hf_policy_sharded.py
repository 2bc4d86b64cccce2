"""Ranks that share one model by FSDP2 do what one rank does, and each keeps a part of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_ranks import run_ranks
from safetensors.torch import load_file

from rl_backends.pieces import index_of
from rl_conformance.models import make_reward_model
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_core import create_policy
from rl_core.batch import BatchedDataDict
from rl_core.errors import ConfigError
from rl_core.interfaces import WorkerContext
from rl_hf.lora import MergedWeightSource, merged_state
from rl_hf.policy import HuggingFacePolicy
from rl_hf.sharding import check_sharding
from rl_hosting import LocalCluster

SHARDED: dict[str, Any] = {"dtensor_cfg": {"enabled": True}}
#: A large eps: some biases have no gradient but rounding, which Adam would blow up to its rate.
OPTIONS: dict[str, Any] = {
    "backend": "hf",
    "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-3},
    "max_grad_norm": 1.0,
    "temperature": 0.9,
    "generation": {"max_new_tokens": 4},
}
LENGTHS = (12, 3, 30, 1, 17, 8, 21)
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
LORA = {"r": 4, "target_modules": "all-linear"}


@dataclass
class Case:
    """How many ranks, what the model is, and how the policy is configured besides."""

    ranks: int
    family: str
    model: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


@contextmanager
def ranks_of(case: Case, path: Path, **config: Any) -> Iterator[Any]:
    given = OPTIONS | case.config | SHARDED | config | {"model_name": str(path)}
    with LocalCluster(case.ranks) as cluster:
        policy: Any = create_policy(given, cluster)
        yield policy
        policy.shutdown()


@pytest.mark.full
def test_bfloat16_has_float32_masters(tiny, tmp_path):
    """Ranks saved it, and one rank goes on from the same masters."""
    path = tiny("llama")
    half = {"torch_dtype": "bfloat16"}
    with ranks_of(Case(2, "llama"), path, **half) as many:
        many.train(training_batch(LENGTHS), NegativeLogLikelihood())
        many.save_checkpoint(str(tmp_path / "saved"))
        expected = float(many.train(training_batch(LENGTHS), NegativeLogLikelihood())["loss"])
    masters: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "saved" / "rl_training").glob("state*.safetensors"):
        masters.update(load_file(file))
    given = OPTIONS | half | {"model_name": str(path), "resume_from": str(tmp_path / "saved")}
    alone: Any = create_policy(given)
    for name, parameter in alone.model.named_parameters():
        master = masters[f"master.{name}"]
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), parameter)
        assert not torch.equal(master, parameter.float())
    again = float(alone.train(training_batch(LENGTHS), NegativeLogLikelihood())["loss"])
    assert again == pytest.approx(expected, rel=1e-2)
    alone.shutdown()


# -- what one rank has -----------------------------------------------------------------------------

WORKER = """
    import json, os, signal, sys, time, torch
    from unittest import mock
    from torch.distributed.tensor import DTensor
    from rl_backends.pieces import local_part
    from rl_core.errors import RLError
    from rl_core.interfaces import WorkerContext
    from rl_conformance.training import NegativeLogLikelihood, training_batch
    from rl_hf import hidden, saving
    from rl_hf.policy import HuggingFacePolicy

    model, directory, what, rank, size, port = sys.argv[1:4] + [int(a) for a in sys.argv[4:]]
    hidden.CHUNK_ELEMENTS = 1 << 10  # logits of a few tokens at a time
    worker = WorkerContext(rank, size, rank, "127.0.0.1", port)
    policy = HuggingFacePolicy(
        model, worker=worker, dtensor_cfg={"enabled": True}, max_grad_norm=1.0,
        optimizer={"lr": 1e-3, "eps": 1e-3}, sequence_packing={"train_mb_tokens": 24},
    )
    # Of other lengths on each rank: microbatches differ in number.
    mine = training_batch((24, 20, 16, 24, 18, 22) if rank else (3, 4, 5, 6, 2, 4), seed=rank)

    class Kills(NegativeLogLikelihood):
        def __call__(self, *args, **kwargs):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(*args, **kwargs)

    class Full(Exception):
        pass

    result = {}
    if what == "dies":
        begun = time.monotonic()
        try:
            policy.train(mine, Kills())
        except RLError as error:
            result = {"error": type(error).__name__, "rank": error.details.get("rank")}
            result["seconds"] = time.monotonic() - begun
    elif what == "writes":
        def full(*args, **kwargs):
            raise Full("no space")
        # Before the optimizer is made; all ranks score the same rows.
        policy.calibrate_qkv_fp8_scales(training_batch((3, 4, 5)))
        result["norm"] = float(policy.train(mine, NegativeLogLikelihood())["grad_norm"])
        result["sharded"] = all(isinstance(p, DTensor) for p in policy.model.parameters())
        result["errors"] = []
        begun = time.monotonic()
        for place, name in ((type(policy.model), "save_pretrained"), (saving, "save_file"),
                            (saving, "revert_weight_conversion")):
            with mock.patch.object(place, name, full):
                try:
                    policy.export_hf(f"{directory}/{name}")
                except RLError as error:
                    result["errors"].append(type(error).__name__)
        result["seconds"] = time.monotonic() - begun
        policy.export_hf(f"{directory}/exported")
        policy.shutdown()
    elif what == "fails":
        def fail(*args):
            raise Full("no memory")
        if rank == 1:
            policy._forward.model.get_decoder().layers[1].register_forward_pre_hook(fail)
            errors = []
            for _ in range(2):
                try:
                    policy.train(mine, NegativeLogLikelihood())
                except Exception as error:
                    errors.append([type(error).__name__, str(error)])
            result["errors"] = errors
            print(json.dumps(result), flush=True)
            os._exit(0)
        try:
            policy.train(mine, NegativeLogLikelihood())
        except RLError as error:
            result["errors"] = [[type(error).__name__, str(error)]]
    else:
        steps = [policy.train(mine, NegativeLogLikelihood()) for _ in range(2)]
        result["losses"] = [float(step["loss"]) for step in steps]
        result["norms"] = [float(step["grad_norm"]) for step in steps]
        state = policy._optimizer.state().values()
        result["parameters"] = sum(local_part(p).nbytes for p in policy.model.parameters())
        result["optimizer"] = sum(local_part(t).nbytes for t in state)
        policy.export_hf(f"{directory}/exported")
        policy.shutdown()
        result["groups left"] = torch.distributed.is_initialized()
    print(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)
"""


def test_each_rank_has_its_part_and_logits_are_made_in_parts(tiny, tmp_path):
    path = tiny("qwen3", vocab_size=269, **EXPERTS)
    first, second = run_ranks(WORKER, 2, path, tmp_path, "trains")
    assert first["losses"] == second["losses"]
    assert not first["groups left"]
    batches = [training_batch((3, 4, 5, 6, 2, 4)), training_batch((24, 20, 16, 24, 18, 22), seed=1)]
    joined = BatchedDataDict.from_batches(batches)
    alone: Any = create_policy(OPTIONS | {"model_name": str(path), "temperature": 1.0}
                               | {"optimizer": {"lr": 1e-3, "eps": 1e-3}})  # fmt: skip
    steps = [alone.train(joined, NegativeLogLikelihood()) for _ in range(2)]
    for key, name in (("losses", "loss"), ("norms", "grad_norm")):
        assert first[key] == pytest.approx([float(step[name]) for step in steps], rel=2e-5)
    for what, whole in (
        ("parameters", sum(p.nbytes for p in alone.model.parameters())),
        ("optimizer", sum(t.nbytes for t in alone._optimizer.state().values())),
    ):
        assert first[what] + second[what] == pytest.approx(whole, rel=1e-2)
        assert first[what] < 0.52 * whole
    alone.export_hf(tmp_path / "alone")
    published: list[dict[str, torch.Tensor]] = [{}, {}]
    for tensors, name in zip(published, ("exported", "alone"), strict=True):
        for file in (tmp_path / name).glob("*.safetensors"):
            tensors.update(load_file(file))
    assert published[0].keys() == published[1].keys()
    assert any("experts.0." in name for name in published[0])
    for name, tensor in published[1].items():
        assert torch.allclose(published[0][name], tensor, atol=2e-5), name
    assert json.loads((tmp_path / "exported/config.json").read_text())["architectures"] == [
        "Qwen3MoeForCausalLM"
    ]
    alone.shutdown()


#: What is read when the groups have ended was read without a collective.
ADAPTERS = """
    import json, sys, torch
    from safetensors.torch import save_file
    from torch.distributed.tensor import DTensor
    from rl_core.interfaces import WorkerContext
    from rl_conformance.training import NegativeLogLikelihood, training_batch
    from rl_hf import saving
    from rl_hf.lora import AdapterWeightSource, MergedWeightSource
    from rl_hf.policy import HuggingFacePolicy

    model, directory, config, rank, size, port = sys.argv[1:4] + [int(a) for a in sys.argv[4:]]
    worker = WorkerContext(rank, size, rank, "127.0.0.1", port)
    policy = HuggingFacePolicy(
        model, worker=worker, dtensor_cfg={"enabled": True}, **json.loads(config)
    )
    mine = training_batch((24, 20, 16) if rank else (3, 4, 5), seed=rank)
    steps = [policy.train(mine, NegativeLogLikelihood()) for _ in range(3)]
    if rank:  # rank 0 has the adapters whole, too, and writes alone
        saving.save_file = None
    policy.save_checkpoint(f"{directory}/saved")
    parameters = dict(policy.model.named_parameters())
    source = MergedWeightSource(policy.model, sharded=True)
    policy._shards.leave()
    alone = AdapterWeightSource(policy.model)
    pieces = source.pieces()
    names = dict.fromkeys(piece.name for piece in pieces)
    made = [*source.tensors(list(names))]
    assert [name for name, _ in made] == [piece.name for piece in pieces]
    for piece, (_, tensor) in zip(pieces, made, strict=True):
        assert piece.tensor is None or torch.equal(piece.tensor, tensor)
    save_file({str(n): t.contiguous() for n, (_, t) in enumerate(made)}, f"{directory}/{rank}.st")
    state = policy._optimizer.state() | dict(alone.tensors([s.name for s in alone.specs()]))
    save_file({n: t.contiguous() for n, t in state.items()}, f"{directory}/adapters{rank}.st")
    print(json.dumps({
        "norms": [float(step["grad_norm"]) for step in steps],
        "sharded": [n for n, p in parameters.items() if isinstance(p, DTensor)],
        "whole": [n for n, p in parameters.items() if not isinstance(p, DTensor)],
        "specs": [[s.name, s.shape, s.dtype, s.alias_of, s.trainable] for s in source.specs()],
        "pieces": [[p.name, p.box, p.tensor is None] for p in pieces],
    }))
    policy.shutdown()
"""


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, "bfloat16"), pytest.param(3, "float32", marks=pytest.mark.full)]
)
def test_each_rank_has_all_adapters_and_merges_its_boxes_alone(tiny, tmp_path, size, dtype):
    # Of the four rows of k_proj and v_proj the last of three ranks has none.
    path = tiny("llama", vocab_size=269, head_dim=4, num_key_value_heads=1)
    config = {
        "torch_dtype": dtype,
        "lora": LORA | {"target_modules": ["q_proj", "k_proj", "down_proj"]},
        "optimizer": {"lr": 1e-2},
        "max_grad_norm": 0.1,
    }
    found = run_ranks(ADAPTERS, size, path, tmp_path, json.dumps(config))
    first = found[0]
    assert all("lora_" in name for name in first["whole"])
    assert not any("lora_" in name for name in first["sharded"])
    adapters = [load_file(tmp_path / f"adapters{rank}.st") for rank in range(size)]
    for other, theirs in zip(found, adapters, strict=True):
        for key in ("norms", "specs", "whole"):
            assert other[key] == first[key]
        assert theirs.keys() == adapters[0].keys()
        assert all(torch.equal(tensor, adapters[0][name]) for name, tensor in theirs.items())

    batches = [training_batch((24, 20, 16) if r else (3, 4, 5), seed=r) for r in range(size)]
    one = HuggingFacePolicy(str(path), **config)
    joined = BatchedDataDict.from_batches(batches)
    norms = [float(one.train(joined, NegativeLogLikelihood())["grad_norm"]) for _ in range(3)]
    assert first["norms"] == pytest.approx(norms, rel=2e-5 if dtype == "float32" else 2e-2)

    resumed = HuggingFacePolicy(str(path), resume_from=str(tmp_path / "saved"), **config)
    expected = merged_state(resumed.model)
    source = MergedWeightSource(resumed.model)
    specs = [[s.name, list(s.shape), s.dtype, s.alias_of, s.trainable] for s in source.specs()]
    assert first["specs"] == specs
    assert source.pieces() is None
    put = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    updated = set()
    for rank, result in enumerate(found):
        made = load_file(tmp_path / f"{rank}.st")
        for number, (name, box, on_demand) in enumerate(result["pieces"]):
            assert put[name][index_of(box)].shape == made[str(number)].shape
            put[name][index_of(box)] = made[str(number)]
            updated |= {name} if on_demand else set()
    assert updated == {name for name, _, _, _, trainable in specs if trainable}
    for name, tensor in expected.items():
        assert torch.equal(put[name], tensor), name
    held = [sum("k_proj" in name for name, *_ in result["pieces"]) for result in found]
    assert bool(held[-1]) == (size == 2)


def test_a_rank_that_dies_in_a_step_is_named(tiny, tmp_path):
    survivor, _ = run_ranks(WORKER, 2, tiny(), tmp_path, "dies")
    assert survivor["error"] == "WorkerDiedError"
    assert survivor["rank"] == 1
    assert survivor["seconds"] < 30


def test_a_rank_that_fails_amid_layers_says_so_at_once_and_from_then_on(tiny, tmp_path):
    other, failed = run_ranks(WORKER, 2, tiny(), tmp_path, "fails")
    (first, why), (then, again) = failed["errors"]
    assert (first, why) == ("Full", "no memory")
    assert then == "LifecycleError"
    assert "no memory" in again
    assert other["errors"][0][0] == "WorkerDiedError"


def test_all_ranks_raise_what_ends_the_writing_on_rank_0_and_go_on(tiny, tmp_path):
    first, other = run_ranks(WORKER, 2, tiny(), tmp_path, "writes")
    assert first["errors"] == ["CheckpointError"] * 3
    assert other["errors"] == ["TrainingError"] * 3
    assert max(first["seconds"], other["seconds"]) < 30
    assert first["sharded"]
    assert other["sharded"]
    assert first["norm"] == other["norm"]
    assert (tmp_path / "exported" / "config.json").exists()


# -- what is refused -------------------------------------------------------------------------------


def test_one_rank_has_the_whole_model(tiny):
    policy: Any = create_policy(OPTIONS | SHARDED | {"model_name": str(tiny())})
    policy.train(training_batch(LENGTHS), NegativeLogLikelihood())
    assert type(policy.model).__name__ == "Qwen2ForCausalLM"
    policy.shutdown()


def test_a_device_map_is_refused_and_other_names_are_known():
    config = SHARDED | {"device_map": "auto"}
    with pytest.raises(ConfigError, match=r"dtensor_cfg.*device_map"):
        check_sharding(config, WorkerContext(rank=0, world_size=2))
    assert not check_sharding(config, None)
    with pytest.raises(ConfigError, match="dtensor_cfg"):
        create_policy(OPTIONS | {"model_name": "nowhere", "fsdp": True})


def test_a_classifier_is_refused(tmp_path):
    path = make_reward_model(tmp_path / "classifier")
    with pytest.raises(ConfigError, match="dtensor_cfg"):
        HuggingFacePolicy(str(path), worker=WorkerContext(rank=0, world_size=2), **SHARDED)
