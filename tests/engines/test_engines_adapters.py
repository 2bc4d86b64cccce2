"""Real engines that serve adapters: a refit brings one beside the one that serves."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engines.kinds import KINDS, Kind
from real_engines import difference, hf_policy, prompts

from rl_core.errors import CapabilityError, ConfigError, ManifestMismatchError, RefitError
from rl_core.weights import refit
from rl_hosting import LocalCluster

if TYPE_CHECKING:
    from rl_core.batch import BatchedDataDict

pytestmark = [pytest.mark.engine, pytest.mark.slow]

#: The scale is no power of two.
LORA = {"r": 4, "alpha": 6.0, "target_modules": "all-linear"}
SERVED = {"lora": {"r": 4, "target_modules": "all-linear"}}
EXACT = {"torch_dtype": "float32"}


@pytest.fixture(scope="session", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    """The engine."""
    return KINDS[request.param]


@pytest.fixture
def adapted(tiny) -> Any:
    """``adapted(family, seed)`` is a policy whose adapters a refit sends alone; all are closed."""
    made = []

    def make(family: str = "qwen2", seed: int | None = 1, **lora: Any) -> Any:
        policy = hf_policy(tiny(family), lora={**LORA, "refit": "adapter", **lora})
        made.append(policy)
        if seed is not None:
            change(policy, seed)
        return policy

    yield make
    for policy in made:
        policy.shutdown()


def change(policy: Any, seed: int, names: str = "") -> None:
    """Other adapters, as after training: all of them, or those of modules with such a name."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_" in name and names in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def greedy(engine: Any) -> BatchedDataDict[Any]:
    found: BatchedDataDict[Any] = engine.generate(prompts(), greedy=True)
    return found


def same_rows(one: BatchedDataDict[Any], other: BatchedDataDict[Any]) -> bool:
    """The same tokens, and log-probs but for the rounding of a prompt that is in the cache."""
    close = torch.allclose(one["logprobs"], other["logprobs"], rtol=0.0, atol=2e-5)
    return close and torch.equal(one["output_ids"], other["output_ids"])


#: A fresh engine without any of our code that generates with an adapter in a directory.
FRESH = {
    "vllm": """
        from rl_vllm import cpu_torch
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest
        llm = LLM(model, dtype="float32", enable_lora=True, max_lora_rank=8, enforce_eager=True,
                  kv_cache_memory_bytes=64 << 20, max_num_seqs=16)
        how = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, detokenize=False)
        rows = [{"prompt_token_ids": row} for row in rows]
        found = [row.outputs[0] for row in llm.generate(rows, how, lora_request=LoRARequest(
            "saved", 1, saved), use_tqdm=False)]
        tokens = [list(one.token_ids) for one in found]
        logprobs = [[step[t].logprob for step, t in zip(one.logprobs, one.token_ids)]
                    for one in found]
    """,
    # With rl-sglang's scheduler, as SGLang's own does not run on a CPU; it reads the files itself.
    "sglang": """
        import tempfile
        from pathlib import Path
        from rl_sglang import launch
        from rl_sglang.scheduler import GREEDY, SchedulerOptions
        from rl_sglang.workers import Workers
        lora = {"r": 4, "target_modules": "all-linear"}
        small = {"max_total_tokens": 4096, "max_running_requests": 16, "lora": lora}
        config = {"model_name": model, "torch_dtype": "float32", "sglang_cfg": small}
        text = launch.checkpoint_config(config).get_text_config()
        given = launch.server_args(config, text, 512) | {"lora_paths": {"saved": saved}}
        workers = Workers(Path(tempfile.mkdtemp()), 1)
        options = SchedulerOptions(address=workers.address, raw=False, tokenizer=None,
                                   trust=False, takes_refits=False, lora=lora)
        llm = launch.launch(given, options)
        workers.accept()
        how = {"temperature": 0.0, "max_new_tokens": 12, "sampling_seed": GREEDY}
        found = llm.generate(input_ids=rows, sampling_params=how, return_logprob=True,
                             lora_path=["saved"] * len(rows))
        tokens = [one["output_ids"] for one in found]
        logprobs = [[x[0] for x in one["meta_info"]["output_token_logprobs"]] for one in found]
        llm.shutdown()
    """,
}


@pytest.mark.full
@pytest.mark.parametrize("kind", list(FRESH), indirect=True)
def test_a_fresh_engine_with_the_saved_adapter_generates_the_same(
    kind, start, adapted, tiny, tmp_path
):
    engine, policy = start("qwen2", SERVED, **EXACT), adapted("qwen2")
    refit(policy, engine, deadline_s=60.0)
    change(policy, 2)
    refit(policy, engine, deadline_s=60.0)
    policy.model.save_pretrained(tmp_path)
    data, output = prompts(), greedy(engine)
    rows = [row[:n].tolist() for row, n in zip(*data.values(), strict=True)]
    script = "import json, sys\nmodel, saved, rows = json.loads(sys.argv[1])\n"
    script += textwrap.dedent(FRESH[kind.name]) + "\nprint(json.dumps([tokens, logprobs]))"
    given = json.dumps([str(tiny("qwen2")), str(tmp_path), rows])
    environment = kind.module("environment").engine_environment("cpu")
    done = subprocess.run(
        [sys.executable, "-c", script, given],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tokens, logprobs = json.loads(done.stdout.splitlines()[-1])
    for i, row in enumerate(rows):
        made = slice(len(row), int(output["unpadded_sequence_lengths"][i]))
        ids = output["output_ids"][i, made].tolist()
        assert tokens[i][: len(ids)] == ids  # the saved model has no stop tokens
        # Float32: which rows an engine computes together decides how it rounds.
        known = output["logprobs"][i, made].tolist()
        assert logprobs[i][: len(ids)] == pytest.approx(known, abs=2e-5)


@pytest.mark.full
def test_an_engine_that_comes_late_gets_the_adapter_of_the_others(start, adapted):
    engine, policy = start("qwen2", SERVED, **EXACT), adapted("qwen2")
    refit(policy, engine, deadline_s=60.0)
    late = start("qwen2", SERVED, **EXACT)
    refit(policy, late, version=policy.weights_version, deadline_s=60.0)
    assert late.weights_version == 1
    assert same_rows(greedy(late), greedy(engine))


def test_adapters_of_another_base_are_refused_by_name(start, adapted):
    engine, policy = start("qwen2", SERVED, **EXACT), adapted("qwen2")
    refit(policy, engine, deadline_s=60.0)
    before = greedy(engine)
    weights = dict(policy.model.named_parameters())
    base = weights["base_model.model.model.layers.1.mlp.gate_proj.base_layer.weight"]
    with torch.no_grad():
        base[1, 1] += 0.1
    change(policy, 2)
    with pytest.raises(ManifestMismatchError, match=r"first is model\.layers\.1\.mlp\.gate_proj"):
        refit(policy, engine, deadline_s=60.0)
    assert engine.weights_version == 1
    assert same_rows(greedy(engine), before)


#: A trainer that is killed before its sixth tensor.
TRAINER = """
    import json, os, signal, sys
    from rl_core import create_policy
    from rl_hf.lora import AdapterWeightSource
    policy = create_policy(json.loads(sys.argv[1]))
    print(json.dumps(policy.prepare_refit_info()), flush=True)
    whole = AdapterWeightSource.tensors
    def tensors(self, names):
        for count, item in enumerate(whole(self, names)):
            if count == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item
    AdapterWeightSource.tensors = tensors
    sys.stdin.readline()
    for future in policy.send_weights(deadline_s=60.0, bucket_bytes=2000):
        future.result()
"""


@pytest.mark.full
def test_the_old_adapter_serves_on_after_its_trainer_is_killed(start, adapted, tiny):
    engine, policy = start("qwen2", SERVED, **EXACT), adapted("qwen2")
    refit(policy, engine, deadline_s=60.0)
    before = greedy(engine)
    config = {"backend": "hf", "model_name": str(tiny("qwen2")), "lora": {**LORA}}
    config["lora"]["refit"] = "adapter"
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAINER), json.dumps(config)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as trainer:
        engine.prepare_refit_info(json.loads(trainer.stdout.readline()))
        [receiving] = engine.receive_weights(deadline_s=60.0)
        trainer.stdin.write("go\n")
        trainer.stdin.flush()
        with pytest.raises(RefitError):
            receiving.result(60.0)
    assert engine.weights_version == 1
    assert same_rows(greedy(engine), before)
    refit(policy, engine, deadline_s=60.0)
    assert same_rows(greedy(engine), before)


@pytest.mark.parametrize("kind", ["vllm"], indirect=True)
def test_a_rank_for_which_vllm_has_no_kernel_is_refused(start):
    with pytest.raises(ConfigError) as caught:
        start("qwen2", {"lora": {"r": 1024}})
    assert caught.value.details["key"] == "vllm_cfg.lora.r"


@pytest.mark.parametrize(
    ("given", "error", "key"),
    [
        ({"sleep_level": 2}, ConfigError, "sleep_level"),
        ({"load_format": "dummy"}, ConfigError, "load_format"),
        ({"refit": False}, ConfigError, "refit"),
        ({"lora": {"target_modules": ["no_proj"]}}, ConfigError, "lora.target_modules"),
        ({"lora": {"target_modules": ["embed_tokens"]}}, CapabilityError, ""),
    ],
)
def test_what_adapters_rule_out_is_refused_when_the_engine_is_built(kind, given, error, key, start):
    with pytest.raises(error) as caught:
        start("llama", SERVED | given, **EXACT)
    if key:
        assert caught.value.details["key"] == f"{kind.section}.{key}"


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", [pytest.param("vllm", marks=pytest.mark.full), "sglang"], indirect=True
)
def test_replicas_on_a_cluster_commit_one_adapter(kind, adapted, tiny):
    config = {"model_name": str(tiny("qwen2")), "max_new_tokens": 6, **EXACT}
    policy = adapted("qwen2")
    with LocalCluster(2) as cluster:
        engine = kind.build({**config, "num_generations": 2}, SERVED, cluster)
        engine.prepare_for_generation()
        for seed in (2, 3):
            change(policy, seed)
            assert refit(policy, engine, deadline_s=60.0).receivers == 2
            output = engine.generate(prompts(5))
            assert output.size == 10
            assert difference(policy, output) < 1e-4
        engine.shutdown()
