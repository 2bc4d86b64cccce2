"""A running server, of which a double plays the part: no SGLang is needed."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("aiohttp")

from fake_sglang_server import FakeSglangServer

from rl_conformance.models import make_tiny_model
from rl_core import create_generation, create_policy, refit
from rl_core.batch import BatchedDataDict
from rl_core.errors import (
    CapabilityError,
    ConfigError,
    DeadlineError,
    IncompatiblePluginError,
    LifecycleError,
    ManifestMismatchError,
    PluginError,
    RefitError,
    WeightsTornError,
    WorkerDiedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rl_sglang import SglangServerGeneration

KEY = "sk-very-secret-indeed"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @cache
    def make(family: str = "qwen2", **overrides: Any) -> Path:
        return make_tiny_model(tmp_path_factory.mktemp("models") / family, family, **overrides)

    return make


@pytest.fixture
def fake(tiny: Callable[..., Path]) -> Iterator[FakeSglangServer]:
    server = FakeSglangServer(tiny()).start()
    yield server
    server.stop()


@pytest.fixture
def connect(fake: FakeSglangServer) -> Iterator[Callable[..., SglangServerGeneration]]:
    made: list[SglangServerGeneration] = []

    def connected(**config: Any) -> SglangServerGeneration:
        base = {"backend": "sglang-server", "model_name": str(fake.model), "server_url": fake.url}
        generation = create_generation(base | {"connect_timeout_s": 5.0} | config)
        made.append(generation)
        generation.prepare_for_generation()
        return generation

    yield connected
    for one in made:
        one.shutdown()


def prompts(*rows: list[int], **more: Any) -> BatchedDataDict[Any]:
    width = max(map(len, rows))
    return BatchedDataDict(
        {
            "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
            "input_lengths": torch.tensor([len(row) for row in rows]),
        }
        | more
    )


def tokens(prompt: list[int], count: int) -> list[int]:
    return [(sum(prompt) + place) % 200 + 10 for place in range(count)]


def in_background(call: Callable[[], Any]) -> Callable[[], Any]:
    """Starts a call; what is returned waits for it, and gives what it returned or raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> Any:
        thread.join(30)
        assert found
        return found[0]

    return wait


def until(true: Callable[[], Any], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


# -- who the server is ----------------------------------------------------------------------------


def test_rows_come_back_as_tokens(connect: Any) -> None:
    output = connect(max_new_tokens=5).generate(prompts([5, 6, 7], [9]))
    assert output["output_ids"][0].tolist() == [5, 6, 7, *tokens([5, 6, 7], 5)]
    assert output["output_ids"][1, :6].tolist() == [9, *tokens([9], 5)]
    assert output["truncated"].tolist() == [True, True]


def test_url_without_a_server_is_a_config_error(connect: Any, fake: FakeSglangServer) -> None:
    fake.stop()
    with pytest.raises(ConfigError, match=fake.url) as caught:
        connect()
    assert caught.value.details["key"] == "server_url"


@pytest.mark.parametrize(
    "url", ["10.0.0.1:30000", "ftp://host", "http:///x", "http://user:pass@host:1", "http://h:x"]
)
def test_what_is_no_address_is_refused_unseen(connect: Any, url: str) -> None:
    with pytest.raises(ConfigError, match="server_url") as caught:
        connect(server_url=url)
    assert url not in str(caught.value)


def test_unknown_key_is_refused_with_the_nearest(connect: Any) -> None:
    with pytest.raises(ConfigError, match="did you mean 'request_timeout_s'"):
        connect(request_timeouts=3)


def test_server_of_another_model_is_refused(
    connect: Any, fake: FakeSglangServer, tiny: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=r"serves .*Qwen2ForCausalLM.*LlamaForCausalLM"):
        connect(model_name=str(tiny("llama")))


def test_server_elsewhere_of_the_same_architecture_is_taken(
    connect: Any, fake: FakeSglangServer
) -> None:
    fake.server_info["model_path"] = fake.weight_path = "/elsewhere/model"
    connect().generate(prompts([5]))


def test_wrong_key_is_refused_and_no_key_is_shown(connect: Any, fake: FakeSglangServer) -> None:
    fake.key = KEY
    for given in ("sk-another-secret", None, b"sk-another-secret"):
        with pytest.raises(ConfigError) as caught:
            connect(api_key=given)
        assert caught.value.details["key"] == "api_key"
        assert "sk-another" not in str(caught.value)
        assert KEY not in str(caught.value)


def test_key_is_sent_and_not_kept_in_what_is_shown(connect: Any, fake: FakeSglangServer) -> None:
    fake.key = KEY
    generation = connect(api_key=KEY)
    generation.generate(prompts([5]))
    fake.fault = "500"
    with pytest.raises(PluginError) as caught:
        generation.generate(prompts([5]))
    assert KEY not in f"{caught.value!r} {generation!r} {generation.config}"


@pytest.mark.parametrize("version", ["0.4.9", "0.6.0"])
def test_release_that_was_not_tested_is_refused(
    connect: Any, fake: FakeSglangServer, version: str
) -> None:
    fake.server_info["version"] = version
    with pytest.raises(IncompatiblePluginError, match=version):
        connect()


@pytest.mark.parametrize(
    ("where", "what", "said"),
    [
        ("server_info", {"version": None}, "which SGLang it is"),
        ("server_info", {"max_req_input_len": "many"}, "max_req_input_len"),
        ("model_info", {"model_path": None}, "model_path"),
    ],
)
def test_server_that_is_no_sglang_is_refused(
    connect: Any, fake: FakeSglangServer, where: str, what: dict[str, Any], said: str
) -> None:
    getattr(fake, where).update(what)
    with pytest.raises(PluginError, match=said):
        connect()


@pytest.mark.parametrize(
    ("where", "what", "said"),
    [
        ("model_info", {"is_generation": False}, "does not generate"),
        ("model_info", {"preferred_sampling_params": {"logit_bias": {}}}, "logit_bias"),
        ("model_info", {"preferred_sampling_params": '{"regex": "a"}'}, "regex"),
        ("server_info", {"disaggregation_mode": "prefill"}, "prefill"),
        ("server_info", {"speculative_algorithm": "EAGLE"}, "EAGLE"),
        ("server_info", {"watermark_enforce_all": True}, "watermark"),
    ],
)
def test_server_whose_answers_mean_something_else_is_refused(
    connect: Any, fake: FakeSglangServer, where: str, what: dict[str, Any], said: str
) -> None:
    getattr(fake, where).update(what)
    with pytest.raises(CapabilityError, match=said):
        connect()


def test_server_that_never_answers_is_given_up(connect: Any, fake: FakeSglangServer) -> None:
    fake.deaf = True
    with pytest.raises(DeadlineError, match=fake.url):
        connect(connect_timeout_s=0.3)


def test_cluster_is_refused() -> None:
    from rl_sglang import SglangServerGeneration

    config = {"model_name": "m", "server_url": "http://127.0.0.1:1"}
    with pytest.raises(ConfigError, match="clients of one server"):
        SglangServerGeneration(object(), config)


# -- what is refused rather than wrong ------------------------------------------------------------


def test_seed_without_deterministic_inference_is_refused(
    connect: Any, fake: FakeSglangServer
) -> None:
    with pytest.raises(CapabilityError, match="enable-deterministic-inference"):
        connect(seed=3)
    generation = connect()
    with pytest.raises(CapabilityError, match="seeds"):
        generation.generate(prompts([5], seed=torch.tensor([4])))
    generation.generate(prompts([5], seed=torch.tensor([4])), greedy=True)
    assert len(fake.requests) == 1


def test_seed_is_sent_to_a_deterministic_server(connect: Any, fake: FakeSglangServer) -> None:
    fake.server_info["enable_deterministic_inference"] = True
    generation = connect(seed=3)
    generation.generate(prompts([5], [6]))
    generation.generate(prompts([5], [6]))
    seeds = [one["sampling_params"]["sampling_seed"] for one in fake.requests]
    assert len(set(seeds)) == 4


@pytest.mark.parametrize("truncation", [{"top_k": 5}, {"top_p": 0.9}])
def test_processed_logprobs_of_truncated_distributions_are_refused(
    connect: Any, truncation: dict[str, Any]
) -> None:
    with pytest.raises(CapabilityError, match="processed"):
        connect(**truncation)
    connect(**truncation, logprobs_mode="raw")
    connect(**truncation, do_sample=False)


@pytest.mark.parametrize("raw", [True, False])
def test_what_logprobs_are_of_is_found_out(connect: Any, fake: FakeSglangServer, raw: bool) -> None:
    fake.raw = raw
    right, wrong = ("raw", "processed") if raw else ("processed", "raw")
    connect(temperature=0.5, logprobs_mode=right)
    with pytest.raises(CapabilityError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
        connect(temperature=0.5, logprobs_mode=wrong)
    connect(logprobs_mode=wrong)  # at temperature 1 they are the same


def test_repetition_penalty_is_refused(connect: Any) -> None:
    with pytest.raises(ConfigError, match="repetition_penalty"):
        connect(repetition_penalty=1.1)


# -- how rows end ---------------------------------------------------------------------------------


def test_row_ends_at_its_stop_token_which_is_kept(connect: Any, fake: FakeSglangServer) -> None:
    [_, _, stop, *_] = tokens([5], 3)
    output = connect(stop_token_ids=[stop], max_new_tokens=20).generate(prompts([5]))
    assert output["output_ids"][0].tolist() == [5, *tokens([5], 3)]
    assert output["truncated"].tolist() == [False]
    assert fake.requests[0]["sampling_params"]["ignore_eos"] is False


def test_token_at_which_only_the_server_would_end_does_not_end_a_row(
    connect: Any, fake: FakeSglangServer
) -> None:
    stop = tokens([5], 6)[-1]
    output = connect(eos_token_id=stop, max_new_tokens=20).generate(prompts([5]))
    assert output["generation_lengths"].tolist() == [6]
    assert fake.requests[0]["sampling_params"]["ignore_eos"] is True
    until(lambda: not fake.running)


def test_token_at_which_nobody_should_end_fails_the_row(
    connect: Any, fake: FakeSglangServer
) -> None:
    fake._config["eos_token_id"] = tokens([5], 4)[-1]
    with pytest.raises(PluginError, match="at which none is to end"):
        connect(max_new_tokens=20).generate(prompts([5]))


def test_row_ends_at_a_stop_string_and_the_server_lets_go(
    connect: Any, fake: FakeSglangServer
) -> None:
    generation = connect(max_new_tokens=200)
    tokenizer = generation._server.checkpoint.tokenizer
    string = tokenizer.decode(tokens([60], 5)[3:])
    fake.token_s = 0.01
    output = generation.generate(prompts([60], [60], stop_strings=[[string], None]))
    assert output["generation_lengths"].tolist() == [5, 200]
    assert output["truncated"].tolist() == [False, True]
    until(lambda: len(fake.aborted) == 1)


def test_context_is_what_the_server_has(connect: Any, fake: FakeSglangServer) -> None:
    fake.context = 64
    generation = connect(max_new_tokens=1000)
    output = generation.generate(prompts([5], [7] * 57, [7] * 60))
    assert output["unpadded_sequence_lengths"].tolist() == [62, 62, 60]
    assert output["truncated"].tolist() == [True] * 3
    with pytest.raises(ConfigError, match="max_model_len"):
        connect(max_model_len=100)


def test_events_with_new_tokens_alone_are_understood(tiny: Callable[..., Path]) -> None:
    from rl_core.backends import ModelFacts, SamplingParams
    from rl_core.backends.rows import Row
    from rl_sglang.server.checkpoint import Checkpoint
    from rl_sglang.server.row_stream import RowStream

    checkpoint = Checkpoint.load({"model_name": str(tiny())})
    sampling = SamplingParams.from_config({"stop_token_ids": [8]}, ModelFacts(0, (1,), 272, 256))
    row = Row(3, 0, 0, [5], 9, 0, False, (), sampling)
    stream = RowStream(row, checkpoint, "http://there", incremental=True)

    def event(ids: list[int], reason: dict[str, Any] | None) -> dict[str, Any]:
        logprobs = [[-0.5, token, None] for token in ids]
        meta = {"output_token_logprobs": logprobs, "weight_version": "a", "finish_reason": reason}
        return {"output_ids": ids, "meta_info": meta}

    assert stream.take(event([4], None)) == (None, {"a"})
    done, _ = stream.take(event([6, 8], {"type": "stop", "matched": 8}))
    assert done is not None
    assert (done.token_ids, done.logprobs, done.truncated) == ([4, 6, 8], [-0.5] * 3, False)


# -- many at once, and fewer ----------------------------------------------------------------------


def test_calls_share_the_server(connect: Any, fake: FakeSglangServer) -> None:
    fake.token_s = 0.02
    generation = connect(max_new_tokens=20)
    calls = [
        in_background(lambda n=n: generation.generate(prompts([n], [n, n]))) for n in range(5, 13)
    ]
    until(lambda: len(fake.running) == 16)
    for n, call in zip(range(5, 13), calls, strict=True):
        assert call()["output_ids"][0].tolist()[:21] == [n, *tokens([n], 20)]


def test_server_gets_no_more_rows_than_it_may(connect: Any, fake: FakeSglangServer) -> None:
    fake.token_s = 0.01
    generation = connect(max_new_tokens=3, max_requests=4)
    call = in_background(lambda: generation.generate(prompts(*([n] for n in range(5, 25)))))
    most = 0
    while len(fake.requests) < 20:
        most = max(most, len(fake.running))
    assert call()["generation_lengths"].tolist() == [3] * 20
    assert most <= 4


def test_rows_come_as_they_finish_and_go_if_nobody_reads(
    connect: Any, fake: FakeSglangServer
) -> None:
    stop = tokens([5], 2)[-1]
    fake.token_s = 0.02
    generation = connect(max_new_tokens=200, stop_token_ids=[stop])

    async def first() -> int:
        rows = generation.generate_async(prompts([7], [5]))
        async for row, _ in rows:
            await rows.aclose()
            return row
        return -1

    assert asyncio.run(first()) == 1
    until(lambda: not fake.running)
    assert len(fake.aborted) == 1


def test_names_of_rows_are_no_beginnings_of_others(connect: Any, fake: FakeSglangServer) -> None:
    connect(max_new_tokens=1).generate(prompts(*([n] for n in range(5, 25))))
    names = [one["rid"] for one in fake.requests]
    assert len(set(names)) == 20
    assert len({len(name) for name in names}) == 1


def test_call_that_takes_too_long_frees_its_rows(connect: Any, fake: FakeSglangServer) -> None:
    fake.token_s = 0.05
    generation = connect(max_new_tokens=200, call_deadline_s=0.5)
    with pytest.raises(DeadlineError, match="call_deadline_s"):
        generation.generate(prompts([5], [6]))
    until(lambda: not fake.running, 3)
    fake.token_s = 0.0
    generation.generate(prompts([5]))


def test_generating_before_prepare_and_after_shutdown_is_refused(
    connect: Any, fake: FakeSglangServer
) -> None:
    generation = connect()
    generation.finish_generation()
    with pytest.raises(LifecycleError):
        generation.generate(prompts([5]))
    generation.shutdown()
    generation.shutdown()
    with pytest.raises(LifecycleError):
        generation.prepare_for_generation()
    assert "sglang-server-client" not in {one.name for one in threading.enumerate()}


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("500", PluginError, "500"),
        ("refuse", PluginError, "too long"),
        ("nonsense", PluginError, "no answer of SGLang"),
        ("no event", PluginError, "no part of a row"),
        ("hang up", WorkerDiedError, "is gone"),
        ("nan", PluginError, "not finite"),
        ("short", PluginError, "1 tokens? and|tokens and"),
        ("abort", PluginError, "gave a row up"),
    ],
)
def test_fault_is_a_typed_error_and_the_next_call_works(
    connect: Any, fake: FakeSglangServer, fault: str, error: type[Exception], said: str
) -> None:
    generation = connect(max_new_tokens=6, stop_strings=["never"])
    fake.fault = fault
    with pytest.raises(error, match=said) as caught:
        generation.generate(prompts([5]))
    assert fake.url in str(caught.value)
    fake.fault = ""
    assert generation.generate(prompts([5]))["generation_lengths"].tolist() == [6]


def test_fault_of_a_row_fails_its_call_alone(connect: Any, fake: FakeSglangServer) -> None:
    fake.token_s = 0.05
    generation = connect(max_new_tokens=20)
    other = in_background(lambda: generation.generate(prompts([5])))
    until(lambda: len(fake.running) == 1)
    fake.fault = "500"
    with pytest.raises(PluginError):
        generation.generate(prompts([6]))
    fake.fault = ""
    assert other()["generation_lengths"].tolist() == [20]


def test_server_that_hangs_is_given_up_before_the_call_is(
    connect: Any, fake: FakeSglangServer
) -> None:
    generation = connect(request_timeout_s=1.0, call_deadline_s=60)
    fake.fault = "hang"
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="no sign of life") as caught:
        generation.generate(prompts([5], [6]))
    assert time.monotonic() - began < 10
    assert fake.url in str(caught.value)
    until(lambda: not fake.running)


def test_server_that_is_busy_is_not_given_up(connect: Any, fake: FakeSglangServer) -> None:
    fake.token_s = 2.5  # and nothing comes meanwhile, but it is well
    generation = connect(request_timeout_s=1.0, max_new_tokens=1)
    assert generation.generate(prompts([5]))["generation_lengths"].tolist() == [1]


def test_server_that_goes_away_fails_the_calls_in_flight_and_serves_when_it_is_back(
    connect: Any, fake: FakeSglangServer
) -> None:
    fake.token_s = 0.05
    generation = connect(max_new_tokens=200)
    calls = [in_background(lambda n=n: generation.generate(prompts([n]))) for n in (5, 6)]
    until(lambda: len(fake.running) == 2)
    began = time.monotonic()
    fake.stop()
    for call in calls:
        error = call()
        assert isinstance(error, WorkerDiedError)
        assert fake.url in str(error)
    assert time.monotonic() - began < 10
    with pytest.raises(WorkerDiedError, match=fake.url):
        generation.generate(prompts([5]))
    fake.token_s = 0.0
    fake.start()
    assert generation.generate(prompts([5]))["generation_lengths"].tolist() == [200]


def test_another_model_at_the_same_address_is_refused(connect: Any, fake: FakeSglangServer) -> None:
    generation = connect(max_new_tokens=2)
    generation.generate(prompts([5]))
    fake.stop()
    fake.server_info["model_path"] = "/another"
    fake.model_info = {"architectures": ["OtherForCausalLM"], "model_type": "other"}
    fake.start()
    with pytest.raises(ConfigError, match="OtherForCausalLM"):
        generation.generate(prompts([5]))


# -- refits ---------------------------------------------------------------------------------------


@pytest.fixture
def policy(fake: FakeSglangServer) -> Iterator[Any]:
    made = create_policy({"backend": "hf", "model_name": str(fake.model)})
    yield made
    made.shutdown()


def saved(fake: FakeSglangServer) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(f"{fake.weight_path}/model.safetensors")


def test_refit_ends_in_a_file_that_the_server_loads(
    connect: Any, fake: FakeSglangServer, policy: Any, tmp_path: Path
) -> None:
    generation = connect(weights_dir=str(tmp_path), max_new_tokens=2)
    for version in (1, 2):
        with torch.no_grad():
            for tensor in policy.model.parameters():
                tensor.add_(version)
        refit(policy, generation)
        assert generation.weights_version == version
        assert fake.weight_version.endswith(f"-{version}")
        found, wanted = saved(fake), dict(policy.model.named_parameters())
        assert all(torch.equal(found[name], wanted[name]) for name in found)
        assert generation.generate(prompts([5]))["weights_version"].tolist() == [version]
    [private] = tmp_path.iterdir()
    assert private.stat().st_mode & 0o077 == 0
    assert all(one["flush_cache"] for one in fake.loads)
    generation.shutdown()
    assert not list(tmp_path.iterdir())


def test_delta_sends_less_and_the_server_loads_all(
    connect: Any, fake: FakeSglangServer, policy: Any
) -> None:
    generation = connect()
    refit(policy, generation)
    first = next(policy.model.parameters())
    with torch.no_grad():
        first.add_(1)
    report = refit(policy, generation, delta=True)
    assert report.tensors == 1
    found, wanted = saved(fake), dict(policy.model.named_parameters())
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.parametrize(
    "options",
    [{"verify": "installed"}, {"isolation": "staged"}, {"kv_scales": {"layer_0.k_scale": 1.0}}],
)
def test_what_cannot_be_promised_is_refused_before_anything_is_touched(
    connect: Any, fake: FakeSglangServer, policy: Any, options: dict[str, Any]
) -> None:
    generation = connect(max_new_tokens=2)
    refit(policy, generation)
    with pytest.raises(CapabilityError):
        refit(policy, generation, **options)
    assert generation.generate(prompts([5]))["weights_version"].tolist() == [1]
    assert len(fake.loads) == 1


@pytest.mark.parametrize(
    "info",
    [{"quantization": "fp8"}, {"weight_cache_mode": "shared"}],
    ids=lambda one: next(iter(one)),
)
def test_server_that_takes_no_refits_says_so(
    connect: Any, fake: FakeSglangServer, policy: Any, info: dict[str, Any]
) -> None:
    fake.server_info.update(info)
    generation = connect(max_new_tokens=2)
    with pytest.raises(CapabilityError, match="takes no refit"):
        refit(policy, generation)
    generation.generate(prompts([5]))


def test_tensors_of_another_model_never_reach_the_server(
    connect: Any, fake: FakeSglangServer, tiny: Callable[..., Path]
) -> None:
    generation = connect(max_new_tokens=2)
    other = create_policy({"backend": "hf", "model_name": str(tiny("llama"))})
    with pytest.raises(ManifestMismatchError):
        refit(other, generation)
    assert not fake.loads
    generation.generate(prompts([5]))
    other.shutdown()


@pytest.mark.parametrize("fault", ["refuse", "hang", "hang up", "lie"])
def test_load_that_fails_leaves_the_engine_torn_until_a_full_refit(
    connect: Any, fake: FakeSglangServer, policy: Any, fault: str
) -> None:
    generation = connect(load_timeout_s=1.0, max_new_tokens=2)
    refit(policy, generation)
    fake.load_fault = fault
    with pytest.raises((RefitError, WorkerDiedError, DeadlineError)):
        refit(policy, generation)
    assert generation.weights_version == 1
    with pytest.raises(WeightsTornError):
        generation.generate(prompts([5]))
    fake.load_fault = ""
    refit(policy, generation)
    assert generation.generate(prompts([5]))["weights_version"].tolist() == [2]


def test_restart_loses_the_weights_of_a_refit_until_the_next(
    connect: Any, fake: FakeSglangServer, policy: Any
) -> None:
    generation = connect(max_new_tokens=2)
    refit(policy, generation)
    fake.stop()
    fake.start()
    for _ in range(2):
        with pytest.raises(WeightsTornError):
            generation.generate(prompts([5]))
    assert not fake.requests
    refit(policy, generation)
    assert generation.generate(prompts([5]))["weights_version"].tolist() == [2]


def test_weights_that_somebody_else_changed_in_the_middle_of_a_row_fail_it(
    connect: Any, fake: FakeSglangServer
) -> None:
    fake.token_s = 0.05
    generation = connect(max_new_tokens=40)
    call = in_background(lambda: generation.generate(prompts([5])))
    until(lambda: fake.running)
    fake.weight_version = "of somebody else"
    error = call()
    assert isinstance(error, WeightsTornError)
    assert "of somebody else" in str(error)


def test_server_with_weights_of_an_earlier_refit_generates_only_after_one(
    connect: Any, fake: FakeSglangServer, policy: Any
) -> None:
    fake.weight_version, fake.weight_path = "rl-0123-7", "/tmp/gone"
    generation = connect(max_new_tokens=2)
    with pytest.raises(WeightsTornError):
        generation.generate(prompts([5]))
    refit(policy, generation)
    generation.generate(prompts([5]))


def test_directory_without_room_is_refused_before_the_engine_is_torn(
    connect: Any, fake: FakeSglangServer, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = os.posix_fallocate

    def full(file: int, *rest: int) -> None:
        if "rl-sglang-" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(28, "No space left on device")
        reserve(file, *rest)

    generation = connect(max_new_tokens=2)
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ConfigError, match="No space left"):
        refit(policy, generation)
    assert generation.generate(prompts([5]))["weights_version"].tolist() == [0]


def test_cache_is_flushed_when_asked_for(connect: Any, fake: FakeSglangServer) -> None:
    assert connect().invalidate_kv_cache()
    assert fake.flushes == 1
