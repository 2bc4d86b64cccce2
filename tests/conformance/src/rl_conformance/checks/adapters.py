"""R1, P9: low-rank adapters, which neither an engine nor a model of transformers has."""

from __future__ import annotations

import copy
import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import generated_mask
from rl_conformance.expect import NotRun, require, same_tensor
from rl_conformance.quiet import no_progress_bars
from rl_conformance.refits import agree, equal, fresh_engine, run_refit
from rl_conformance.registry import check
from rl_conformance.served import certain_prompts
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_core.config import config_keys
from rl_core.plugins.discovery import load_object

if TYPE_CHECKING:
    from rl_conformance.context import Context
    from rl_core.interfaces import ColocatablePolicyInterface


def _needs(*modules: str) -> None:
    if absent := [name for name in modules if not importlib.util.find_spec(name)]:
        raise NotRun(f"adapters need {absent[0]}, which is not installed", excused=True)


def _adapted_module(path: Any, seed: int) -> Any:
    """A model with adapters that are more than rounding."""
    import peft
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), no_progress_bars():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        settings = peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False
        )
        return peft.get_peft_model(model, settings)


@check("R1", needs=("generation",))
def adapters_of_a_module_arrive_merged_once(ctx: Context) -> None:
    """An engine has what peft's own merge gives, refit after refit, and the module is as it was."""
    _needs("peft", "rl_hf")
    model, generation = _adapted_module(ctx.model("qwen2", seed=1), 1), fresh_engine(ctx)
    data = certain_prompts(ctx, seed=0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        run_refit(model, generation)
        for name, tensor in model.state_dict().items():
            same_tensor(tensor, before[name], name)
        path = ctx.directory()
        with no_progress_bars():
            copy.deepcopy(model).merge_and_unload().save_pretrained(path)
        output = generation.generate(data, greedy=True)
        inside = generated_mask(data, output)
        lengths = output["unpadded_sequence_lengths"]
        expected = ctx.oracle(path).batch_logprobs(output["output_ids"], lengths)
        ctx.measure_error(output["logprobs"][inside], expected[inside])


def _adapted_policy(ctx: Context, **config: Any) -> ColocatablePolicyInterface:
    if "lora" not in config_keys(load_object(ctx.manifest.configs["policy"])):
        raise NotRun("the policy has no adapters: no key lora", excused=True)
    _needs("peft")
    return ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)), lora={"r": 4}, **config)


def _train(policy: Any) -> None:
    policy.prepare_for_training()
    for _ in range(5):  # so that what was learned is more than rounding
        policy.train(training_batch((7, 4, 9)), NegativeLogLikelihood())
    policy.finish_training()


@check("R1", needs=("policy",))
def adapters_of_a_policy_arrive_merged_once(ctx: Context) -> None:
    """Train, refit, train, refit: the engine computes what the policy does with its adapters."""
    policy, generation = _adapted_policy(ctx), fresh_engine(ctx)
    for _ in range(2):
        _train(policy)
        run_refit(policy, generation)
        equal(policy, generation)
        agree(ctx, policy, generation, ctx.prompts(5, 9, 3))


@check("P9")
def adapters_are_merged_in_an_export_and_resumed_by_a_checkpoint(ctx: Context) -> None:
    """The model beside a checkpoint has them merged; who loads it has the policy's log-probs."""
    policy, data, path = _adapted_policy(ctx), training_batch((7, 4, 9)), ctx.directory() / "saved"
    _train(policy)
    policy.save_checkpoint(str(path))
    exported = next((file.parent for file in sorted(path.rglob("config.json"))), None)
    require(exported, f"there is no config.json in {path}")
    policy.prepare_for_lp_inference()
    logprobs = policy.get_logprobs(data)["logprobs"]
    oracle = ctx.oracle(exported)
    ctx.measure_error(logprobs, oracle.batch_logprobs(data["input_ids"], data["input_lengths"]))
    resumed = _adapted_policy(ctx, resume_from=str(path))
    resumed.prepare_for_lp_inference()
    same_tensor(resumed.get_logprobs(data)["logprobs"], logprobs, "log-probs after loading")
    base = ctx.oracle(ctx.model("qwen2", seed=1))
    reference = resumed.get_reference_policy_logprobs(data)["reference_logprobs"]
    plain = base.batch_logprobs(data["input_ids"], data["input_lengths"])
    ctx.measure_error(reference, plain)
