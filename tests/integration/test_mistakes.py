"""Mistakes of people who come from other libraries: each ends at once, and in the fix."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import pickle
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from examples.additions import make_model

import rl_core
from rl_cli import main
from rl_core import (
    BatchedDataDict,
    CapabilityError,
    CheckpointError,
    ConfigError,
    DataError,
    LifecycleError,
    LoopWarning,
    MissingEngineError,
    create_generation,
    create_policy,
    refit,
)
from rl_core.config import check_config
from rl_losses import (
    DPOLossFn,
    GRPOLossFn,
    NLLLossFn,
    completions,
    grpo_advantages,
    training_batch,
)
from rl_megatron.architectures import Architecture
from rl_megatron.config import MegatronPolicyConfig
from rl_megatron.sizes import Sizes
from rl_sglang.config import SglangConfig
from rl_train import GRPOTrainer
from rl_vllm.config import VllmConfig

# -- configurations --------------------------------------------------------------------------------

POLICY = {"backend": "hf", "model_name": "nowhere"}
MANY = 10**9


@dataclasses.dataclass
class Config:
    backend: str = "hf"


def checked(spec: type, **keys: Any) -> Any:
    return lambda: check_config(spec, {"model_name": "m", "backend": "x", **keys}, what="x")


def policy(**keys: Any) -> Any:
    return lambda: create_policy(POLICY | keys)


def engine(**keys: Any) -> Any:
    return lambda: create_generation(POLICY | keys)


def megatron(world: int, **keys: Any) -> Any:
    heads: Any = SimpleNamespace(heads=4, groups=4, hidden=8, ffn=8, layers=4, experts=0)
    model: Architecture = heads
    return lambda: Sizes.of(keys, world, model)


def grpo(**keys: Any) -> Any:
    return lambda: GRPOTrainer("m", len, [{"prompt": "1+2="}], **keys)


#: What is called, and words of the fix.
CONFIGURATIONS: dict[str, tuple[Any, str]] = {
    "lr at the top": (policy(lr=1e-3), "write `optimizer: {lr: ...}` instead of 'lr'"),
    "TRL: learning_rate at the top": (policy(learning_rate=1e-3), "`optimizer: {lr: ...}`"),
    "learning_rate": (policy(optimizer={"learning_rate": 1e-3}), "write 'lr' instead of"),
    "NeMo RL: kwargs": (policy(optimizer={"kwargs": {"lr": 1.0}}), "move lr out of"),
    "torch: AdamW": (policy(optimizer={"name": "AdamW"}), "set 'optimizer.name' to 'adamw'"),
    "TRL: weight_decay": (policy(weight_decay=0.1), "`optimizer: {weight_decay: ...}`"),
    "TRL: adam_beta1": (policy(adam_beta1=0.9), "`optimizer: {betas: [beta1, beta2]}`"),
    "TRL: lr_scheduler_type": (policy(lr_scheduler_type="cosine"), "`scheduler: {name: ...}`"),
    "TRL: warmup_ratio": (policy(warmup_ratio=0.1), "{warmup_steps: ratio x all steps}"),
    "TRL: max_steps": (policy(max_steps=9), "`scheduler: {total_steps: ...}`"),
    "TRL: per_device_train_batch_size": (
        policy(per_device_train_batch_size=8),
        "write 'train_micro_batch_size' instead",
    ),
    "TRL: gradient_accumulation_steps": (
        policy(gradient_accumulation_steps=4),
        "`train_global_batch_size: rows per pass x these steps x workers`",
    ),
    "TRL: bf16": (policy(bf16=True), "write `torch_dtype: bfloat16` instead of 'bf16'"),
    "TRL: peft_config": (policy(peft_config={"r": 8}), "write 'lora' instead"),
    "peft: lora_alpha": (policy(lora={"lora_alpha": 8}), "write 'alpha' instead"),
    "TRL: beta of the policy": (policy(beta=0.1), "reference_policy_kl_penalty=..."),
    "TRL: num_generations of the policy": (
        policy(num_generations=8),
        "set `num_generations: ...` in the configuration of create_generation",
    ),
    "NeMo RL: precision": (policy(precision="bfloat16"), "write 'torch_dtype' instead"),
    "verl: ppo_mini_batch_size": (policy(ppo_mini_batch_size=8), "prompts x completions of each"),
    "verl: grad_clip": (policy(grad_clip=1.0), "write 'max_grad_norm' instead"),
    "max_grad_norm of the optimizer": (
        policy(optimizer={"max_grad_norm": 1.0}),
        "write `max_grad_norm: ...` instead of 'optimizer.max_grad_norm'",
    ),
    "verl: the whole file": (
        lambda: create_policy({"policy": {**POLICY}}),
        "pass the section: config['policy']",
    ),
    "TRL: model_name_or_path": (
        lambda: create_policy({"backend": "hf", "model_name_or_path": "m"}),
        "write 'model_name' instead of 'model_name_or_path'",
    ),
    "num_samples": (engine(num_samples=8), "write 'num_generations' instead"),
    "TRL: max_completion_length": (engine(max_completion_length=8), "write 'max_new_tokens'"),
    "vLLM: max_tokens": (engine(max_tokens=8), "write 'max_new_tokens' instead"),
    "vLLM: n": (engine(n=8), "write 'num_generations' instead"),
    "vLLM: stop": (engine(stop=["x"]), "write 'stop_strings' instead"),
    "vLLM: logprobs": (engine(logprobs=1), "remove 'logprobs'"),
    "vLLM: temperature 0": (engine(temperature=0), "set 'do_sample' to False"),
    "transformers: dtype": (engine(dtype="bfloat16"), "write 'torch_dtype' instead"),
    "optimizer of an engine": (engine(optimizer={}), "in the configuration of create_policy"),
    "vLLM: flat gpu_memory_utilization": (
        checked(VllmConfig, gpu_memory_utilization=0.8),
        "write `vllm_cfg: {gpu_memory_utilization: ...}`",
    ),
    "vLLM: flat tensor_parallel_size": (
        checked(VllmConfig, tensor_parallel_size=2),
        "write `vllm_cfg: {tensor_parallel_size: ...}`",
    ),
    "SGLang: tensor_parallel_size": (
        checked(SglangConfig, tensor_parallel_size=2),
        "write `sglang_cfg: {tp_size: ...}`",
    ),
    "Megatron: tp": (checked(MegatronPolicyConfig, tp=2), "'tensor_model_parallel_size'"),
    "Megatron: use_flash_attention": (
        checked(MegatronPolicyConfig, use_flash_attention=True),
        "remove 'use_flash_attention'",
    ),
    "Megatron: ranks": (
        megatron(1, tensor_model_parallel_size=2, pipeline_model_parallel_size=4),
        "start 8 workers: create_policy(config, LocalCluster(8))",
    ),
    "a number as YAML's text": (policy(optimizer={"lr": "1e-3"}), "reads 1e-3 as text: write 1.0e"),
    "betas at the top": (policy(betas=[0.9, 0.9]), "`optimizer: {betas: ...}`"),
    "beta of the optimizer": (policy(optimizer={"beta": (0.9, 0.9)}), "write 'betas' instead"),
    "TRL: ref_model": (policy(ref_model="m"), "remove 'ref_model'"),
    "TRL: kl_coef of the policy": (policy(kl_coef=0.1), "reference_policy_kl_penalty=..."),
    "peft: lora_r at the top": (policy(lora_r=8), "`lora: {r: ...}`"),
    "gradient_clip": (policy(gradient_clip=1.0), "write 'max_grad_norm' instead"),
    "transformers: max_length": (engine(max_length=8), "write 'max_model_len' instead"),
    "transformers: num_return_sequences": (engine(num_return_sequences=2), "'num_generations'"),
    "vLLM: sampling_params": (engine(sampling_params={"top_p": 0.9}), "move top_p out of"),
    "OpenAI: presence_penalty": (engine(presence_penalty=1.0), "remove 'presence_penalty'"),
    "greedy of an engine": (engine(greedy=True), "`do_sample: the opposite of greedy`"),
    "a quoted bool": (engine(do_sample="false"), "write false without quotes"),
    "one stop string": (engine(stop_strings="x"), "set 'stop_strings' to ['x']"),
    "a token for its id": (engine(eos_token_id="</s>"), "set 'eos_token_id' to int, list[int]"),
    "no backend": (policy(backend=None), "rl backends list"),
    "a loss type as text": (lambda: GRPOLossFn(loss_type="dapo"), "LossType.TOKEN_LEVEL"),  # type: ignore[arg-type]
    "a quoted number": (engine(max_new_tokens="8"), "write 8 without quotes"),
    "a dtype's short name": (policy(torch_dtype="bf16"), "set 'torch_dtype' to 'bfloat16'"),
    "a negative seed": (engine(seed=-1), "set 'seed' to a value >= 0"),
    "the backend's name alone": (lambda: create_generation("hf", "m"), "pass a dict such as"),  # type: ignore[arg-type]
    "a dataclass": (lambda: create_policy(Config()), "dataclasses.asdict"),  # type: ignore[arg-type]
    "a number of workers": (lambda: create_policy(POLICY, 4), "LocalCluster(4)"),  # type: ignore[arg-type]
    "GPUs as a list": (lambda: create_generation(POLICY, [4]), "LocalCluster(4)"),  # type: ignore[arg-type]
    "TRL: processing_class": (grpo(processing_class=None), "remove 'processing_class'"),
    "TRL: peft_config of the trainer": (grpo(peft_config={"r": 8}), "write `policy: {lora: ...}`"),
    "TRL: GRPOConfig": (grpo(args=Config()), 'such as {"steps": 100'),
    "clip_eps": (
        lambda: GRPOLossFn(clip_eps=0.2),  # type: ignore[call-arg]
        "write 'ratio_clip_min' and 'ratio_clip_max' instead of 'clip_eps'",
    ),
    "TRL: beta of the loss": (
        lambda: GRPOLossFn(beta=0.1),  # type: ignore[call-arg]
        "write 'reference_policy_kl_penalty' instead of 'beta'",
    ),
}


@pytest.mark.parametrize("mistake", CONFIGURATIONS)
def test_a_configuration_ends_in_the_fix(mistake: str) -> None:
    call, fix = CONFIGURATIONS[mistake]
    with pytest.raises(ConfigError) as caught:
        call()
    assert fix in str(caught.value.fix)


def test_paths_dtypes_and_numpys_numbers_are_taken(tiny: Any) -> None:
    made = create_policy(
        {
            "backend": "hf",
            "model_name": Path(tiny()),
            "torch_dtype": torch.bfloat16,
            "seed": np.int64(3),
            "optimizer": {"lr": np.float32(0.5)},
        }
    )
    assert made.config["seed"] == 3  # type: ignore[attr-defined]
    assert re.match(r"HuggingFacePolicy\('hf', model '.*', bfloat16, cpu, step 0", repr(made))
    made.shutdown()
    assert "shut down" in repr(made)


# -- batches and calls -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def at(tiny: Any) -> Any:
    """A policy, an engine, prompts and what came of them."""
    config = {"backend": "hf", "model_name": str(tiny())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = SimpleNamespace(
            p=create_policy(config),
            g=create_generation({**config, "max_new_tokens": 4, "num_generations": 2}),
            path=str(tiny()),
        )
    made.g.prepare_for_generation()
    made.ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    made.lengths = torch.tensor([3, 2])
    made.prompts = BatchedDataDict({"input_ids": made.ids, "input_lengths": made.lengths})
    made.out = made.g.generate(made.prompts)
    made.batch = training_batch(made.out, [1.0, 0.0, 1.0, 0.0], advantages=[1.0, -1.0, 1.0, -1.0])
    yield made
    made.p.shutdown()
    made.g.shutdown()


async def awaited(at: Any) -> None:
    await at.g.generate_async(at.prompts)


def with_column(batch: Any, key: str, value: Any) -> Any:
    return BatchedDataDict({**batch, key: value})


#: What is called with the fixture, the error, and words of its text and fix.
CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "numpy's ids": (
        lambda at: at.g.generate({"input_ids": at.ids.numpy(), "input_lengths": at.lengths}),
        DataError,
        "torch.as_tensor(batch['input_ids'])",
    ),
    "numpy's lengths": (
        lambda at: at.g.generate({"input_ids": at.ids, "input_lengths": at.lengths.numpy()}),
        DataError,
        "torch.as_tensor(batch['input_lengths'])",
    ),
    "lists of ids": (
        lambda at: at.p.get_logprobs({"input_ids": at.ids.tolist(), "input_lengths": at.lengths}),
        DataError,
        "torch.as_tensor(batch['input_ids'])",
    ),
    "prompts as texts": (lambda at: at.g.generate(["hello"]), DataError, "tokenizer(texts"),
    "a misspelt column": (
        lambda at: at.g.generate({"input_id": at.ids, "input_lengths": at.lengths}),
        DataError,
        "rename 'input_id' to 'input_ids'",
    ),
    "a misspelt column, read": (lambda at: at.batch["reward"], KeyError, "write 'rewards'"),
    "another row": (lambda at: at.batch[9], DataError, "there is no row 9: the number of rows is"),
    "ids without lengths": (
        lambda at: at.g.generate(at.ids), DataError, '"input_lengths": the number of tokens'
    ),
    "a list of batches": (
        lambda at: at.p.train([at.batch], NLLLossFn()), DataError, "BatchedDataDict.from_batches"
    ),
    "a name for a loss": (lambda at: at.p.train(at.batch, "grpo"), ConfigError, "an instance"),
    "a path that is a number": (
        lambda at: at.p.save_checkpoint(3), ConfigError, "give a directory"
    ),
    "no path": (lambda at: at.p.save_checkpoint(""), ConfigError, "give a directory"),
    "a checkpoint's path to refit": (lambda at: refit(at.path, at.g), ConfigError, "the trainer"),
    "verify as a bool": (lambda at: refit(at.p, at.g, verify=True), ConfigError, "'installed'"),
    "rewards as texts": (
        lambda at: training_batch(at.out, ["a"] * 4), DataError, "a number for each row"
    ),
    "one reward": (lambda at: training_batch(at.out, 1.0), DataError, "each of the 4 rows"),
    "no samples": (
        lambda at: completions(at.out, at.p.tokenizer, num_generations=0), ConfigError, "1 or more"
    ),
    "a row between two": (lambda at: at.batch[1.5], DataError, "integers"),
    "a batch as a column": (
        lambda at: at.p.train(
            with_column(at.batch, "prev_logprobs", at.p.get_logprobs(at.batch)), GRPOLossFn()
        ),
        DataError,
        "['logprobs']",
    ),
    "greedy as text": (lambda at: at.g.generate(at.prompts, greedy="no"), DataError, "False to"),
    "a temperature for a call": (
        lambda at: at.g.generate(at.prompts, temperature=0.5), TypeError, "temperature"
    ),
    "samples beyond memory": (
        lambda at: create(at, num_generations=MANY).generate(at.prompts),
        DataError,
        "set a smaller num_generations",
    ),
    "awaiting a stream": (lambda at: asyncio.run(awaited(at)), LifecycleError, "async for row"),
    "swapped arguments of train": (
        lambda at: at.p.train(NLLLossFn(), at.batch),
        ConfigError,
        "call train(batch, loss)",
    ),
    "the class of a loss": (lambda at: at.p.train(at.batch, NLLLossFn), ConfigError, "NLLLossFn()"),
    "pairs: one row": (
        lambda at: at.p.train(at.batch[:1], DPOLossFn()),
        DataError,
        "chosen, rejected, chosen",
    ),
    "pairs: generated rows": (
        lambda at: at.p.train(at.out, DPOLossFn()),
        DataError,
        "rl_losses.training_batch(output[rows])",
    ),
    "generated rows": (lambda at: at.p.train(at.out, GRPOLossFn()), DataError, "training_batch("),
    "a state_dict to refit": (
        lambda at: refit(at.p.model.state_dict(), at.g),
        ConfigError,
        "pass the module itself",
    ),
    "swapped arguments of refit": (lambda at: refit(at.g, at.p), ConfigError, "comes first"),
    "nccl as a transport": (
        lambda at: refit(at.p, at.g, transport="nccl"),
        rl_core.PluginError,
        "write 'collective'",
    ),
    "an option of refit": (
        lambda at: refit(at.p, at.g, timeout=5), ConfigError, "unknown key 'timeout'"
    ),
    "a checkpoint below a file": (
        lambda at: at.p.save_checkpoint(f"{at.path}/config.json/ck"),
        CheckpointError,
        "/config.json/ck was not written",
    ),
    "a checkpoint over a model": (
        lambda at: at.p.save_checkpoint(at.path), CheckpointError, "save to another path"
    ),
    "a full disk": (
        lambda at: at.p.save_checkpoint("/proc/ck"), CheckpointError, "/proc/ck was not written"
    ),
    "a model as a checkpoint": (
        lambda at: at.p.load_checkpoint(at.path), CheckpointError, "that save_checkpoint wrote"
    ),
    "copying a policy": (lambda at: copy.deepcopy(at.p), CapabilityError, "LocalCluster(1)"),
    "pickling an engine": (lambda at: pickle.dumps(at.g), CapabilityError, "create_generation("),
    "rewards of prompts": (
        lambda at: training_batch(at.out, [1.0, 0.0]), DataError, "a prompt has n rows"
    ),
    "rewards for prompts": (lambda at: training_batch(at.prompts, [1.0]), DataError, "generate("),
    "texts of prompts": (lambda at: completions(at.prompts, None), DataError, "generate("),
    "a group that is not whole": (
        lambda at: grpo_advantages([1.0, 0.0, 1.0], group_size=2), DataError, "prompt_ids"
    ),
    "generating while asleep": (
        lambda at: create(at, awake=False).generate(at.prompts),
        LifecycleError,
        "prepare_for_generation",
    ),
    "an odd microbatch size": (
        lambda at: at.p.train(at.batch, NLLLossFn(), gbs=3), DataError, "another gbs"
    ),
}  # fmt: skip


def create(at: Any, awake: bool = True, **keys: Any) -> Any:
    made = create_generation({"backend": "hf", "model_name": at.path, **keys})
    if awake:
        made.prepare_for_generation()
    return made


@pytest.mark.parametrize("mistake", CALLS)
def test_a_call_ends_in_the_fix(mistake: str, at: Any) -> None:
    call, error, words = CALLS[mistake]
    with pytest.raises(error) as caught:
        call(at)
    assert words in str(caught.value)


def test_equal_rewards_are_counted_and_warned_of_once(at: Any) -> None:
    loss = GRPOLossFn(on_policy=True, reference_policy_kl_penalty=0)
    equal = training_batch(at.out, [1.0] * 4, advantages=[0.0] * 4)
    with pytest.warns(LoopWarning, match="completions are equal"):
        assert at.p.train(equal, loss)["frac_reward_zero_std"] == 1
    half = training_batch(at.out, [1.0, 1.0, 1.0, 0.0], advantages=[0.0, 0.0, 1.0, -1.0])
    assert at.p.train(half, loss, eval_mode=True)["frac_reward_zero_std"] == 0.5
    assert at.p.train(equal, loss, eval_mode=True)["frac_reward_zero_std"] == 1


def test_rows_of_a_batch_are_batches(at: Any) -> None:
    assert at.batch[0].size == at.batch[-1].size == 1
    assert at.batch[1:3]["rewards"].tolist() == [0.0, 1.0]
    assert at.batch[at.batch["rewards"] > 0].size == 2
    assert at.batch[::2]["rewards"].tolist() == [1.0, 1.0]
    assert repr(at.prompts).startswith("BatchedDataDict(rows 2, columns 2: input_ids: int64[2, 3]")


def test_texts_come_with_their_prompts(at: Any) -> None:
    rows = completions(at.out, at.p.tokenizer, num_generations=2)
    assert [each.row for each in rows] == [0, 0, 1, 1]
    assert all(
        len(each.ids) == n for each, n in zip(rows, at.out["generation_lengths"], strict=True)
    )
    assert rows[2].prompt == at.p.tokenizer.decode([8, 9], skip_special_tokens=True)


def test_an_engine_shows_its_model(at: Any) -> None:
    assert re.search(r"Generation\('hf', model '.*', float32, cpu, awake, weights", repr(at.g))


# -- runs of `rl train` ----------------------------------------------------------------------------

RUN = """
model: model
output: out
steps: 1
batch_size: 4
data: {path: rows.jsonl}
rewards: [exact]
grpo: {num_generations: 4}
generation: {max_new_tokens: 4}
"""
ROW = '{"prompt": "1+2=", "answer": "3"}\n'
SCORE = "def score(completions, **columns):\n    return [1.0] * len(completions)\n"
UTF_16 = ROW.encode("utf-16")
STEPS = "class Steps:\n    def step(self, completion):\n        pass\n"

#: Arguments of a run without other mistakes, and words of the error.
ARGUMENTS: dict[str, tuple[list[str], str]] = {
    "a misspelt section": (["policy.optimiser.lr=1e-3"], "argument policy.optimiser.lr=1e-3"),
    "blanks around =": (["steps", "=", "3"], "each key=value as one word"),
    "blanks in a list": (["rewards=[exact,", "format]"], "in quotes if it has spaces"),
    "==": (["steps==3"], "each key=value as one word"),
    "a colon": (["steps:3"], "each key=value as one word"),
    "two files": (["more.yaml"], "write the file first"),
    "--steps 3": (["--steps", "3"], "write FILE KEY=VALUE without dashes"),
    "--policy.optimizer.lr=1": (["--policy.optimizer.lr=1"], "FILE KEY=VALUE without dashes"),
    "Hydra's slashes": (["policy/optimizer/lr=1"], "write `policy.optimizer.lr=...`"),
    "an entry of a list": (["rewards.0=math"], "set a list as a whole"),
    "None for null": (["steps=None"], "YAML reads None as text: set 'steps' to null"),
    "one reward": (["rewards=exact"], "set 'rewards' to ['exact']"),
    "one device": (["placement.policy.devices=0"], "devices' to [0]"),
    "TRL: learning_rate": (["learning_rate=1"], "write `policy.optimizer.lr=...`"),
    "TRL: max_completion_length": (
        ["max_completion_length=8"],
        "write `generation.max_new_tokens=...`",
    ),
    "TRL: beta": (["beta=0.1"], "write `loss.reference_policy_kl_penalty=...`"),
    "TRL: epsilon": (["epsilon=0.2"], "`loss.ratio_clip_min=...` and `loss.ratio_"),
    "TRL: bf16": (["bf16=true"], "`policy.torch_dtype=bfloat16` and `generation."),
    "TRL: use_vllm": (["use_vllm=true"], "write `generation.backend=vllm`"),
    "TRL: max_steps": (["max_steps=9"], "write 'steps' instead"),
    "TRL: output_dir": (["output_dir=x"], "write 'output' instead"),
    "TRL: save_steps": (["save_steps=9"], "write `checkpoint.every=...`"),
    "TRL: report_to": (["report_to=wandb"], "write `log.to=...`"),
    "TRL: reward_weights": (["reward_weights=[1]"], "`rewards=[{function: ..., weight: ...}]`"),
    "TRL: train_dataset": (["train_dataset=x"], "write `data.path=...`"),
    "TRL: gradient_accumulation_steps": (
        ["gradient_accumulation_steps=2"],
        "write `batch_size=prompts of all passes`",
    ),
    "NeMo RL: num_prompts_per_step": (["grpo.num_prompts_per_step=8"], "`batch_size=...`"),
    "NeMo RL: policy.generation": (
        ["policy.generation={backend: vllm}"],
        "set the keys of the section generation instead of policy.generation",
    ),
    "verl: actor_rollout_ref": (
        ["actor_rollout_ref.actor.optim.lr=1", "actor_rollout_ref.rollout.n=8"],
        "'actor_rollout_ref.actor.optim.lr'; write `grpo.num_generations=...`",
    ),
    "the optimizer at the top": (["optimizer.lr=1"], "write `policy.optimizer=...`"),
    "completions of the engine": (
        ["generation.num_generations=8"],
        "set grpo.num_generations instead of generation.num_generations",
    ),
    "a global batch": (["policy.train_global_batch_size=5"], "set batch_size and grpo.updates"),
    "temperature 0": (["generation.temperature=0"], "set 'do_sample' to False"),
    "a mode of refits": (["refit.mode=fast"], "set 'mode' to 'auto', 'direct' or 'packed'"),
    "${HOME}": (["output=${HOME}/out"], "${oc.env:NAME}"),
    "resume: true": (["checkpoint.resume=true"], "'auto' or 'never'"),
    "an output that is a file": (["output=rows.jsonl"], "choose another output"),
    "a home that is empty": (["data.path=~/nowhere.jsonl"], "there is no file '/"),
    "the split of a file": (["data.split=test"], "a file with the rows of the split"),
    "all prompts too long": (["data.max_prompt_tokens=1"], "set data.long_prompts to cut"),
    "a reward with dots": (["rewards=[r.score]"], "write one of these, module:name or file.py"),
    "a file that is not there": (["rewards=[q.py:score]"], "write module:function"),
    "a temperature": (["generation.temperature=-1"], "argument generation.temperature=-1"),
    "a key of the policy": (["policy.lr=1"], "write `policy.optimizer.lr=...`"),
    "a model's misspelt directory": (["model=mode1"], "write 'model', or a name on the hub"),
    "a model's path": (["model=./mode1"], "the model directory ./mode1 does not exist in /"),
    "an interpreter that is not there": (
        ["generation={backend: vllm, vllm_cfg: {python: venv/bin/python}}"],
        "set generation.vllm_cfg.python to the Python of an environment",
    ),
}

#: Arguments, files besides those of a run without mistakes, and words of the error.
RUNS: dict[str, tuple[list[str], dict[str, str | bytes], str]] = {
    **{name: (given, {}, words) for name, (given, words) in ARGUMENTS.items()},
    "keys with dots in YAML": (
        [],
        {"run.yaml": RUN + "policy.optimizer.lr: 1.0\n"},
        "write `policy: {optimizer: {lr: ...}}` instead of 'policy.optimizer.lr'",
    ),
    "a configuration in UTF-16": ([], {"run.yaml": RUN.encode("utf-16")}, "in the encoding UTF-8"),
    "data in UTF-16": ([], {"rows.jsonl": UTF_16}, "save the file in the encoding UTF-8"),
    "ShareGPT's messages": (
        [],
        {"rows.jsonl": '{"prompt": [{"from": "human", "value": "1+2="}]}'},
        "messages like {role: user, content: ...}",
    ),
    "messages without a template": (
        [],
        {"rows.jsonl": '{"prompt": [{"role": "user", "content": "1+2="}], "answer": "3"}'},
        "set data.chat_template",
    ),
    "a prompt without tokens": (
        ["data.chat_template='{{ messages[0].content }}'"],
        {"rows.jsonl": '{"prompt": [{"role": "user", "content": null}], "answer": "3"}'},
        "give it a text that the tokenizer knows",
    ),
    "other columns in the evaluation": (
        ["evaluation.data.path=test.jsonl"],
        {"test.jsonl": '{"question": "1+2=", "solution": "3"}'},
        "give these rows a column 'answer', as the rows of data have",
    ),
    "a column that rewards need": (
        ["rewards=[r.py:score]"],
        {"r.py": SCORE.replace("**columns", "ground_truth")},
        "[{function: r.py:score, columns: {ground_truth: COLUMN}}]",
    ),
    "a class as a reward": (
        ["rewards=[r.py:Score]"],
        {"r.py": "class Score:\n    def __call__(self, completions):\n        return [1.0]\n"},
        "make an instance, such as score = Score(...)",
    ),
    "a reward without parameters": (
        ["rewards=[r.py:score]"],
        {"r.py": "def score():\n    return [1.0]\n"},
        "give it a parameter 'completions'",
    ),
    "a reward that does not parse": (
        ["rewards=[r.py:score]"],
        {"r.py": SCORE.replace(":\n", "\n")},
        "r.py; what it imports must be installed",
    ),
    "an environment's step": (
        ["environment.function=e.py:Steps"],
        {"e.py": STEPS},
        "name a class with step(self, completion, row)",
    ),
    "an environment that is a function": (
        ["environment.function=e.py:step"],
        {"e.py": "def step(completion, row):\n    pass\n"},
        "name a class with step(self, completion, row)",
    ),
    "a file without its function": (
        ["rewards=[r.py]"],
        {"r.py": SCORE},
        "write r.py:score",
    ),
    "no data": ([], {"run.yaml": RUN.replace("path: rows.jsonl", "")}, "set data.path to a file"),
    "rows without the answer": (
        [],
        {"rows.jsonl": ROW + '{"prompt": "2+2="}\n' * 3},
        "rows.jsonl, line 2: there is no 'answer', the column of answers; 3 of 4 rows have none",
    ),
}


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("runs") / "model", 0, layers=1)


@pytest.fixture
def folder(with_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory, with the model of :data:`RUN`."""
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(with_tokenizer)


def test_a_missing_engine_is_noticed_before_the_policy_is_loaded(
    with_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_train.run.Backends", None)
    monkeypatch.setattr("rl_core.plugins.discovery.engine_version", lambda engine: None)
    trainer = GRPOTrainer(str(with_tokenizer), len, [{"prompt": "1+2="}])
    with pytest.raises(MissingEngineError, match="pip install"):
        trainer.train()


@pytest.mark.parametrize("rows", [[], "rows.jsonl", ["1+2="], pd.DataFrame({"prompt": ["1+2="]})])
def test_rows_that_are_none_end_in_the_fix(with_tokenizer: Path, rows: Any) -> None:
    trainer = GRPOTrainer(str(with_tokenizer), len, rows)
    with pytest.raises(ConfigError, match="give a list of dicts"):
        trainer.train()


@pytest.mark.parametrize("mistake", RUNS)
def test_a_run_ends_in_the_fix_before_a_model_is_loaded(
    mistake: str,
    folder: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments, files, words = RUNS[mistake]
    monkeypatch.setattr("rl_train.run.Backends", None)
    for name, text in {"run.yaml": RUN, "rows.jsonl": ROW * 4, **files}.items():
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        code = main(["train", "run.yaml", *arguments])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    assert code in (1, 2)
    assert words in capsys.readouterr().err
    assert not Path("out/metrics.jsonl").exists()


@pytest.mark.parametrize(
    "mistake",
    [
        "no data",
        "a model's misspelt directory",
        "an interpreter that is not there",
        "a file that is not there",
    ],
)
def test_a_check_finds_what_is_not_there(
    mistake: str, folder: None, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, files, words = RUNS[mistake]
    for name, text in {"run.yaml": RUN, "rows.jsonl": ROW, **files}.items():
        Path(name).write_text(str(text))
    assert main(["config", "check", "run.yaml", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_an_answer_of_another_name_reaches_the_reward(
    folder: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run.yaml").write_text(RUN)
    Path("rows.jsonl").write_text(ROW.replace("answer", "solution"))
    reached = RuntimeError("the model is loaded next")

    def load(*_: Any, **__: Any) -> None:
        raise reached

    monkeypatch.setattr("rl_train.run.Backends", load)
    with pytest.raises(RuntimeError, match="loaded next"):
        main(["train", "run.yaml", "data.answer=solution"])


def test_a_run_without_its_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train"])
    assert "required: FILE\n" in capsys.readouterr().err
