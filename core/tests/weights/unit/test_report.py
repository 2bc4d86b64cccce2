"""The report of a refit, and the options that it takes."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from simple_pair import BUCKET, Engine, Replicas, Trainer, blank, go

from rl_core.errors import ConfigError, RefitProtocolError
from rl_core.weights import RefitReport, SendOptions
from rl_core.weights.data.plan import DataMode

# -- the report -----------------------------------------------------------------------------------


def test_the_report_counts_what_was_sent(pair):
    trainer, engine = pair
    report = go(trainer, engine, mode="packed")
    sent = [t for t in trainer.source.tensor.values() if t.numel()]
    assert (report.tensors, report.skipped) == (len(sent), 0)
    assert report.bytes == sum(t.numel() * t.element_size() for t in sent)
    assert 0 < report.extra_memory_bytes <= 2 * BUCKET
    assert report.buckets > report.bytes // BUCKET


def test_the_report_says_how_long_every_phase_took_and_how_fast_it_was(pair):
    report = go(*pair)
    assert set(report.phases) == {"DISCOVER", "PREPARE", "TRANSFER", "SEAL", "INSTALL", "COMMIT"}
    assert all(seconds >= 0 for seconds in report.phases.values())
    assert report.seconds == pytest.approx(sum(report.phases.values()))
    assert report.gb_per_s == pytest.approx(report.bytes / report.seconds / 1e9)


def test_the_report_names_what_was_chosen(keep, pair):
    trainer, engine = pair
    other = keep(Engine(blank(trainer.source.tensor)))
    options = {"verify": "installed", "isolation": "staged", "version": 7}
    report = go(trainer, Replicas(engine, other), **options)
    assert (report.version, report.receivers, report.attempts) == (7, 2, 1)
    assert (report.verify, report.isolation) == ("installed", "staged")
    assert (report.transport, report.mode) == ("ipc", "packed")


def test_unchanged_tensors_are_reported_although_they_were_sent(pair):
    trainer, engine = pair
    assert go(trainer, engine).unchanged is None
    trainer.source.tensor["scalar"].add_(1)
    report = go(trainer, engine)
    assert (report.unchanged, report.skipped) == (report.tensors - 1, 0)


def test_what_is_unchanged_is_not_known_without_hashes(pair):
    go(*pair)
    assert go(*pair, verify="none").unchanged is None
    assert go(*pair).unchanged is None


def test_a_delta_reports_what_it_skipped(pair):
    trainer, engine = pair
    go(trainer, engine)
    trainer.source.tensor["scalar"].add_(1)
    report = go(trainer, engine, delta=True)
    assert (report.tensors, report.skipped, report.unchanged) == (1, 7, 7)
    assert "7 held already" in str(report)


def test_the_report_is_one_line_for_people(pair):
    text = str(go(*pair))
    assert text.startswith("refit to version 1: ")
    assert "\n" not in text
    for part in ("8 tensors", "1 receiver,", "GB/s", "ipc packed", "verify=wire"):
        assert part in text


def test_the_report_is_json_for_programs(pair):
    report = go(*pair)
    assert RefitReport(**json.loads(json.dumps(report.as_dict()))) == report


def test_results_without_a_report_are_the_policys_fault():
    with pytest.raises(RefitProtocolError, match="PolicyBackend"):
        RefitReport.of([True, {"version": 1}], 1)


# -- the options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("verfy", "wire"), ("verify", "maybe"), ("receivers", 0), ("bucket_bytes", 63),
        ("deadline_s", float("nan")), ("deadline_s", 1e10), ("deadline_s", True),
        ("version", True), ("receivers", True), ("bucket_bytes", True), ("delta", "yes"),
        ("transport", None), ("number", "7"), ("number", 0), ("number", True),
    ],
)  # fmt: skip
def test_a_bad_option_is_refused_by_name(pair, option, value):
    with pytest.raises(ConfigError, match=option) as caught:
        pair[0].sender.send(**{option: value})
    assert caught.value.details["key"] == option


def test_what_compares_hashes_needs_some():
    with pytest.raises(ConfigError, match="compares hashes"):
        SendOptions.of({"verify": "none", "delta": True})


def test_options_are_kept_as_they_were_given():
    given = {
        "transport": "ipc",
        "receivers": 2,
        "version": 9,
        "verify": "installed",
        "isolation": "staged",
        "mode": "packed",
        "delta": True,
        "check_finite": "warn",
        "kv_scales": {"k": 1.0},
        "bucket_bytes": 128,
        "deadline_s": 1.5,
        "number": 3,
    }
    assert dataclasses.asdict(SendOptions.of(given)) == given


def test_a_bucket_smaller_than_an_element_of_the_largest_dtype_is_no_trouble(keep):
    tensors = {"w": torch.randn(99, dtype=torch.complex128)}
    trainer, engine = keep(Trainer(tensors)), keep(Engine(blank(tensors)))
    go(trainer, engine, bucket_bytes=64, verify="installed")
    assert torch.equal(engine.sink.tensor["w"], tensors["w"])


@pytest.mark.parametrize(
    ("device", "mode", "expected"),
    [
        ("cpu", DataMode.PACKED, 8 << 20),
        ("cpu", DataMode.DIRECT, 64 << 20),
        ("cuda:1", DataMode.PACKED, 256 << 20),
        ("cuda:1", DataMode.DIRECT, 512 << 20),
    ],
)
def test_buckets_are_as_large_as_suits_the_device(device, mode, expected):
    where = torch.device(device)
    assert SendOptions().bucket_for(where, mode) == expected
    assert SendOptions(bucket_bytes=100).bucket_for(where, mode) == 100


@pytest.mark.parametrize(
    "option",
    [
        {"receivers": 1 << 40},
        {"version": 1 << 63},
        {"bucket_bytes": 1 << 64},
        {"number": 1 << 63},
        {"kv_scales": {"layer\ud800": 1.0}},
        {"kv_scales": {"layer": 1 << 2000}},
        {"kv_scales": {5: 1.0}},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_no_message_holds_is_a_config_error(option):
    with pytest.raises(ConfigError, match=next(iter(option))) as caught:
        SendOptions.of(option)
    str(caught.value).encode()
