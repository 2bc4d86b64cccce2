"""A running server, of which a double plays the part: who it is, what is refused, how rows end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from engines.calls import prompts, tokens, until

from rl_core.errors import (
    CapabilityError,
    ConfigError,
    DeadlineError,
    IncompatiblePluginError,
    PluginError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fake_sglang_server import FakeSglangServer

KEY = "sk-very-secret-indeed"
SAMPLING = "preferred_sampling_params"


# -- who the server is ----------------------------------------------------------------------------


def test_url_without_a_server_is_a_config_error(connect: Any, fake: FakeSglangServer) -> None:
    fake.stop()
    with pytest.raises(ConfigError, match=fake.url) as caught:
        connect()
    assert caught.value.details["key"] == "url"


@pytest.mark.parametrize(
    "url", ["10.0.0.1:30000", "ftp://host", "http:///x", "http://user:pass@host:1", "http://h:x"]
)
def test_what_is_no_address_is_refused_unseen(connect: Any, url: str) -> None:
    with pytest.raises(ConfigError, match="url is not the address") as caught:
        connect(url=url)
    assert url not in str(caught.value)


def test_unknown_key_is_refused_with_the_nearest(connect: Any) -> None:
    with pytest.raises(ConfigError, match="did you mean 'request_timeout_s'"):
        connect(request_timeouts=3)


def test_server_of_another_model_is_refused(
    connect: Any, fake: FakeSglangServer, tiny: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=r"serves .*Qwen2ForCausalLM.*LlamaForCausalLM"):
        connect(model_name=str(tiny("llama")))


def test_server_whose_rows_have_two_kinds_of_positions_is_refused(
    fake: FakeSglangServer, connect: Any, tiny: Callable[..., Path]
) -> None:
    server = type(fake)(tiny("phi3")).start()
    server.server_info = {"max_req_input_len": 13}  # the longest row has 4 more
    with pytest.raises(ConfigError, match=r"the context of .* is 17, .*longrope"):
        connect(url=server.url, model_name=str(server.model))
    server.stop()


def test_server_elsewhere_of_the_same_architecture_is_taken(
    connect: Any, fake: FakeSglangServer
) -> None:
    fake.server_info["model_path"] = fake.weight_path = "/elsewhere/model"
    connect().generate(prompts([5]))


def test_wrong_key_is_refused_and_no_key_is_shown(connect: Any, fake: FakeSglangServer) -> None:
    fake.key = KEY
    unseen: tuple[Any, ...] = (b"sk-another-secret", "sk-another-secret\n", "sk-another-s\xe9cret")
    for given in (*unseen, "sk-another-secret", None):
        assert given not in unseen or not fake.headers
        with pytest.raises(ConfigError) as caught:
            connect(api_key=given)
        assert caught.value.details["key"] == "api_key"
        assert "sk-another" not in str(caught.value)
        assert KEY not in str(caught.value)


def test_address_that_is_not_one_server_is_refused(connect: Any, fake: FakeSglangServer) -> None:
    fake.turns = True
    with pytest.raises(ConfigError, match="several servers of SGLang answer") as caught:
        connect()
    assert caught.value.details["key"] == "url"
    fake.moved = "http://elsewhere/"
    with pytest.raises(ConfigError, match="to 'http://elsewhere/'") as caught:
        connect()
    assert caught.value.details["key"] == "url"


def test_key_is_sent_and_not_kept_in_what_is_shown(connect: Any, fake: FakeSglangServer) -> None:
    fake.key = KEY
    generation = connect(api_key=KEY)
    generation.generate(prompts([5]))
    fake.fault = "500"
    with pytest.raises(PluginError) as caught:
        generation.generate(prompts([5]))
    assert KEY not in f"{caught.value!r} {generation!r} {generation.config}"


@pytest.mark.parametrize(
    ("error", "where", "key", "value", "said"),
    [
        # releases that were not tested
        (IncompatiblePluginError, "server_info", "version", "0.4.9", "0.4.9"),
        (IncompatiblePluginError, "server_info", "version", "0.6.0", "0.6.0"),
        # no SGLang
        (PluginError, "server_info", "version", None, "its version of SGLang"),
        (PluginError, "server_info", "max_req_input_len", "many", "max_req_input_len"),
        (PluginError, "model_info", "model_path", None, "model_path"),
        # servers whose answers mean something else
        (CapabilityError, "model_info", "is_generation", False, "does not generate"),
        (CapabilityError, "model_info", SAMPLING, {"logit_bias": {}}, "logit_bias"),
        (CapabilityError, "model_info", SAMPLING, '{"regex": "a"}', "regex"),
        (CapabilityError, "server_info", "disaggregation_mode", "prefill", "prefill"),
        (CapabilityError, "server_info", "speculative_algorithm", "EAGLE", "EAGLE"),
        (CapabilityError, "server_info", "watermark_enforce_all", True, "watermark"),
    ],
)
def test_server_that_is_of_no_use_is_refused(
    connect: Any, fake: FakeSglangServer, error: Any, where: str, key: str, value: Any, said: str
) -> None:
    getattr(fake, where)[key] = value
    with pytest.raises(error, match=said):
        connect()


def test_server_that_never_answers_is_given_up(connect: Any, fake: FakeSglangServer) -> None:
    fake.deaf = True
    with pytest.raises(DeadlineError, match=fake.url):
        connect(connect_timeout_s=0.3)


def test_cluster_is_refused() -> None:
    from rl_sglang import SglangServerGeneration

    config = {"model_name": "m", "url": "http://127.0.0.1:1"}
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


def test_temperature_0_is_greedy(connect: Any, fake: FakeSglangServer) -> None:
    connect(temperature=0.0).generate(prompts([5]))
    assert fake.requests[0]["sampling_params"]["temperature"] == 0.0
    with pytest.raises(ConfigError, match="temperature"):
        connect(temperature=-0.5)


def test_repetition_penalty_is_refused(connect: Any) -> None:
    with pytest.raises(ConfigError, match="repetition_penalty"):
        connect(repetition_penalty=1.1)


# -- how rows end ---------------------------------------------------------------------------------


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
    with pytest.raises(PluginError, match="is not a stop token of this call"):
        connect(max_new_tokens=20).generate(prompts([5]))


def test_events_with_new_tokens_alone_are_understood(connect: Any, fake: FakeSglangServer) -> None:
    fake.server_info["incremental_streaming_output"] = True
    generation = connect(max_new_tokens=40, stop_strings=["never there"])
    assert generation.generate(prompts([5]))["output_ids"][0].tolist() == [5, *tokens([5], 40)]
