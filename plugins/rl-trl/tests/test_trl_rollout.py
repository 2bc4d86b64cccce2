"""Runs of TRL's GRPOTrainer whose completions come from an engine of rl-core."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import rl_trl
from rl_backends.modules import end_of
from rl_core.errors import CapabilityError, ConfigError, DataError, LoopWarning
from rl_trl import settings
from rl_trl.agreement import score_tokens, trainer_logprobs

APART = "sampling/sampling_logp_difference/max"


def even(completion_ids, **_):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def logged(trainer, key):
    """What a trainer logged of a metric, step by step."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def tensors(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


class Recording:
    """A rollout, and all that it returned."""

    def __init__(self, rollout: Any) -> None:
        self.rollout, self.outputs, self.prompts = rollout, [], []

    def __call__(self, prompts, trainer):
        self.prompts.append(prompts)
        self.outputs.append(self.rollout(prompts, trainer))
        return self.outputs[-1]


def test_a_run_learns_and_engine_and_trainer_agree_at_every_step(engine, trainer):
    run = trainer(
        rl_trl.rollout(engine()), even, max_steps=30, per_device_train_batch_size=32,
        num_generations=8, lr_scheduler_type="linear",
    )  # fmt: skip
    run.train()
    rewards, apart = logged(run, "reward"), logged(run, APART)
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    assert len(apart) == 30
    assert max(apart) < 1e-4


def test_the_loss_is_the_one_of_trls_own_path_on_the_same_completions(engine, trainer):
    recording = Recording(rl_trl.rollout(engine()))
    how = {"max_steps": 6, "num_iterations": 2, "beta": 0.01}
    bridged = trainer(recording, even, **how)
    bridged.train()
    own = trainer(None, even, **how)
    replies = iter([output["completion_ids"] for output in recording.outputs])
    asked = []

    def replay(prompt_ids, *_):
        asked.append(prompt_ids)
        return next(replies), None

    own._generate_single_turn = replay
    own.train()
    assert asked == [output["prompt_ids"] for output in recording.outputs]
    for key in ("loss", "grad_norm", "reward", "kl", "entropy", "completions/clipped_ratio"):
        assert logged(bridged, key) == logged(own, key), key
    theirs = own.model.state_dict()
    assert all(value.equal(theirs[name]) for name, value in bridged.model.state_dict().items())


@pytest.mark.parametrize(
    ("how", "versions"),
    [
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, [1, 1, 2, 2, 3, 3]),
        ({"num_iterations": 2, "max_steps": 4}, [1, 2]),
    ],
    ids=["two rollouts a step", "two steps a rollout"],
)
def test_the_engine_is_refit_once_for_each_step_that_generates(engine, trainer, how, versions):
    seen, origins = [], set()

    def reward(completion_ids, weights_version, weights_origin, truncated, **_):
        assert [len(ids) == 8 for ids in completion_ids] >= truncated
        seen.append(weights_version)
        origins.update(weights_origin)
        return even(completion_ids)

    run = trainer(rl_trl.rollout(engine()), reward, **{"max_steps": 3, **how})
    run.train()
    assert seen == [[version] * 8 for version in versions]
    assert origins == {end_of(run.model, sends=True).weights_origin}
    assert max(logged(run, APART)) < 1e-4


def test_a_refit_takes_its_options(engine, trainer):
    how = {"transport": "collective", "address": "127.0.0.1", "verify": "installed"}
    run = trainer(rl_trl.rollout(engine(), **how))
    run.train()
    assert max(logged(run, APART)) < 1e-4
    with pytest.raises(ConfigError, match="unknown key 'verfy'"):
        trainer(rl_trl.rollout(engine(), verfy="wire")).train()


def test_a_rollout_that_is_dropped_leaves_nothing_open(engine, trainer):
    def rounds(count):
        for _ in range(count):
            trainer(rl_trl.rollout(generation), max_steps=1).train()
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    generation = engine()
    before = rounds(1)
    with pytest.warns(LoopWarning, match="had version 1 of origin"):  # each run trains a new model
        assert rounds(3) <= before


def test_weights_that_are_loaded_between_steps_are_refit(engine, trainer):
    generation = engine()
    run = trainer(rl_trl.rollout(generation))
    run.train()
    run.evaluate(run.train_dataset.select(range(8)))
    run.evaluate(run.train_dataset.select(range(8)))
    assert generation.weights_version == 3
    run.model.load_state_dict({name: value * 1.1 for name, value in tensors(run).items()})
    run.evaluate(run.train_dataset.select(range(8)))
    assert generation.weights_version == 4
    assert max(logged(run, f"eval_{APART}")) < 1e-4


@pytest.mark.parametrize("template", [{}, {"prefix": "so "}], ids=["template", "with arguments"])
def test_conversations_are_tokenized_as_trl_does(engine, trainer, template):
    recording = Recording(rl_trl.rollout(engine()))
    said = []

    def reward(prompts, completions, completion_ids, **_):
        said.extend(zip(prompts, completions, strict=True))
        return even(completion_ids)

    prompts = [[{"role": "user", "content": f"{number}+1"}] for number in range(16)]
    run = trainer(recording, reward, prompts=prompts, chat_template_kwargs=template)
    run.train()
    texts = run.processing_class.batch_decode(recording.outputs[0]["prompt_ids"])
    asked = [prompt[0]["content"] for prompt in recording.prompts[0]]
    prefix = template.get("prefix", "")
    assert texts == [f"user: {text}\nassistant: {prefix}" for text in asked]
    # TRL repeats the prompts itself, so that each of them is answered once.
    assert asked[:4] == [asked[0]] * 4
    assert asked[4] != asked[0]
    assert len({tuple(ids) for ids in recording.outputs[0]["completion_ids"]}) == 8
    assert [(p[0]["role"], c[0]["role"]) for p, c in said] == [("user", "assistant")] * 16


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 20},
        {"top_p": 0.9},
        {"top_k": 50, "top_p": 0.8},
    ],
    ids=", ".join,
)
@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_log_probs_agree_however_the_engine_samples(engine, trainer, sampling, mode):
    recording = Recording(rl_trl.rollout(engine(logprobs_mode=mode, **sampling)))
    run = trainer(recording, **sampling)
    run.train()
    assert max(logged(run, APART)) < 1e-4
    rows = recording.outputs[0]
    assert [len(each) for each in rows["logprobs"]] == [len(ids) for ids in rows["completion_ids"]]
    assert all(value <= 0 for row in rows["logprobs"] for value in row)


def test_a_token_at_the_edge_of_the_nucleus_has_a_log_prob(engine):
    sampling = engine(top_p=0.5).sampling
    logits = torch.tensor([[0.6, 0.3, 0.1], [0.4, 0.35, 0.25]]).log()
    scores = score_tokens(logits, torch.tensor([1, 1]), sampling).exp()
    assert torch.allclose(scores, torch.tensor([0.3 / 0.6, 0.35 / 0.75]))


class Behind(TrainerCallback):
    """Changes weights in the midst of a step, in a way that torch does not count."""

    def on_substep_end(self, args, state, control, model, **_):
        if state.global_step == 1:
            for parameter in model.parameters():
                parameter.data.mul_(1.5)


def test_weights_of_which_the_engine_knows_nothing_end_the_run(engine, trainer):
    how = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}
    run = trainer(rl_trl.rollout(engine()), callbacks=[Behind()], **how)
    with pytest.raises(rl_trl.DisagreementError, match=r"step 1: .* most in row \d") as caught:
        run.train()
    details = caught.value.details
    assert (details["step"], details["weights_version"]) == (1, 2)
    assert details["difference"] > 0.05
    assert 0 <= details["row"] < 8
    tolerant = trainer(rl_trl.rollout(engine(), threshold=1e9), callbacks=[Behind()], **how)
    tolerant.train()
    assert logged(tolerant, APART)[0] < 1e-4 < logged(tolerant, APART)[1]


def test_scoring_leaves_the_model_in_the_mode_it_was_in(engine, trainer):
    run, sampling = trainer(None), engine().sampling
    for mode in (True, False):
        run.model.train(mode)
        before = torch.get_rng_state()
        trainer_logprobs(run, [[5, 6, 7], [5]], [[8], [9, 10, 11]], sampling)
        assert run.model.training is mode
        assert torch.get_rng_state().equal(before)


CONTRADICTIONS = [
    ({"temperature": 0.7}, {}, "temperature 0.7, the engine has temperature 1.0"),
    ({}, {"top_p": 0.9}, "top_p 1.0, the engine has top_p 0.9"),
    ({"top_k": 5}, {}, "top_k 5, the engine has top_k 0"),
    ({"min_p": 0.1}, {}, "min_p 0.1, the engine has min_p 0.0"),
    ({"repetition_penalty": 1.2}, {}, "repetition_penalty 1.2, the engine has"),
    ({"max_completion_length": 9}, {}, "max_completion_length 9, the engine has max_new_tokens 8"),
    ({"generation_kwargs": {"num_beams": 2}}, {}, "generation_kwargs {'num_beams': 2}"),
    ({}, {"do_sample": False}, "do_sample True, the engine has do_sample False"),
    ({}, {"num_generations": 4}, "the engine has num_generations 4"),
    ({}, {"stop_token_ids": [7]}, r"eos_token_ids [1], the engine has stop_token_ids [1, 7]"),
    ({}, {"stop_strings": ["."]}, "the engine has stop_strings ['.']"),
]


@pytest.mark.parametrize(
    ("ours", "theirs", "words"), CONTRADICTIONS, ids=[str(number) for number in range(11)]
)
def test_settings_that_contradict_each_other_are_named_at_once(
    engine, trainer, ours, theirs, words
):
    generation = engine(**theirs)
    run = trainer(rl_trl.rollout(generation), **ours)
    with pytest.raises(ConfigError) as caught:
        run.train()
    assert words in str(caught.value)
    assert "Fix: " in str(caught.value)
    assert generation.weights_version == 0  # neither refit nor asked


def test_all_contradictions_are_in_one_error(engine, trainer):
    run = trainer(rl_trl.rollout(engine(top_k=3)), temperature=0.5)
    with pytest.raises(ConfigError, match=r"temperature 0\.5.*; .*top_k 3"):
        run.train()


def test_a_penalty_that_both_have_is_refused(engine, trainer):
    run = trainer(rl_trl.rollout(engine(repetition_penalty=1.2)), repetition_penalty=1.2)
    with pytest.raises(CapabilityError, match=r"repetition_penalty 1\.2"):
        run.train()


def test_a_prompt_that_fills_the_context_is_named(engine, trainer):
    prompts = ["1+1=", "2" * 30]
    run = trainer(rl_trl.rollout(engine(max_model_len=30)), prompts=prompts)
    with pytest.raises(
        DataError, match=r"row [04]: the prompt has 30 tokens, which leaves no room"
    ):
        run.train()


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("use_vllm", "use_vllm=True"),
        ("tools", "tools or an environment"),
        ("_is_vlm", "a vision-language model"),
        ("is_fsdp_enabled", "FSDP"),
        ("is_deepspeed_enabled", "DeepSpeed"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(engine, trainer, attribute, words):
    run = trainer(rl_trl.rollout(engine()))
    setattr(run, attribute, True)
    with pytest.raises(CapabilityError, match=words):
        run.rollout_func(["1+1="], run)


def test_a_main_process_without_an_engine_is_told(trainer):
    with pytest.raises(ConfigError, match="no engine in the main process"):
        trainer(rl_trl.rollout(None)).train()


@pytest.mark.parametrize("installed", ["1.15.0", "1.17.0", "2.0"])
def test_another_trl_is_refused_when_the_rollout_is_made(engine, monkeypatch, installed):
    monkeypatch.setattr(settings, "version", lambda name: installed)
    with pytest.raises(CapabilityError, match=r"supports trl .*1\.16") as caught:
        rl_trl.rollout(engine())
    assert "pip install" in caught.value.fix


def test_adapters_are_merged_for_the_engine(engine, trainer):
    from peft import LoraConfig

    adapters = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])
    generation = engine()
    run = trainer(rl_trl.rollout(generation), peft_config=adapters, max_steps=3, learning_rate=0.1)
    run.train()
    assert generation.weights_version == 3
    assert max(logged(run, APART)) < 1e-4
    trained = [p for name, p in run.model.named_parameters() if "lora_B" in name]
    assert all(parameter.abs().max() > 0 for parameter in trained)


def test_adapters_that_cannot_be_merged_are_refused_with_the_reason(engine, trainer):
    from peft import LoraConfig

    dora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], use_dora=True)
    with pytest.raises(CapabilityError, match=r"cannot be merged for an engine: .*q_proj: .*"):
        trainer(rl_trl.rollout(engine()), peft_config=dora).train()
