"""What ``rl refit plan`` prints and draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from rl_cli import main

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "torch_dtype": "float32",
}


class Plan:
    """Calls the command."""

    def __init__(self, model: str, read: pytest.CaptureFixture[str]) -> None:
        self.model, self._read = model, read

    def __call__(
        self, *more: str, trainer: str = "tp2pp2", engine: str = "tp2x2"
    ) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        shapes = ("--trainer", trainer, "--engine", engine)
        code = main(["refit", "plan", "--model", self.model, *shapes, *more])
        return code, *self._read.readouterr()


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Plan:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return Plan(str(tmp_path), capsys)


def test_the_table_has_bytes_seconds_and_assumptions(plan: Plan) -> None:
    code, out, err = plan()
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["received", "over", "kept", "1.00", "1.99"] in lines
    assert "8 GPUs per host; each has 450 GB/s within its host and 50 GB/s to other hosts" in out
    assert "The engines have hosts of their own." in out
    assert "Hottest links: 0 to 0 (" in out
    assert "The lower bound is the time that the link of " in out


def test_json_has_all_figures(plan: Plan) -> None:
    more = ("--json", "--gpus-per-host", "4", "--between", "10", "--dtype", "bfloat16")
    facts = json.loads(plan(*more)[1])
    elements = 2 * 100 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128) + 5 * 64
    assert facts["model"] == {
        "family": "llama",
        "parameters": elements,
        "dtype": "bfloat16",
        "bytes": 2 * elements,
    }
    assert facts["trainer"] == {"shape": "tp2pp2", "ranks": 4}
    assert facts["assumed"]["between_gb_per_s"] == 10
    found = facts["plan"]
    assert (
        found["bytes"] == found["bytes_between_hosts"] == 4 * found["kept_per_engine_rank"]["mean"]
    )
    assert found["bytes"] == sum(each["bytes"] for each in found["hottest_trainer_ranks"])
    most = max(found[f"{each}_rank"]["max"] for each in ("sent_per_trainer", "received_per_engine"))
    assert found["lower_bound_s"] == pytest.approx(most / 10e9)


def test_colocated_engines_share_the_hosts(plan: Plan) -> None:
    found = json.loads(plan("--colocated", "--json")[1])["plan"]
    assert found["bytes_between_hosts"] == 0
    assert "The engines share the trainer's GPUs." in plan("--colocated")[1]


@pytest.mark.parametrize(("ranks", "squares"), [("dp4", 8), ("dp100", 100)])
def test_the_picture_has_a_square_for_each_link(
    plan: Plan, tmp_path: Path, ranks: str, squares: int
) -> None:
    code, _, err = plan("--svg", str(tmp_path / "plan.svg"), trainer=ranks, engine="x2")
    assert (code, err) == (0, "")
    drawn = ET.parse(tmp_path / "plan.svg").getroot()
    titles = [each.text or "" for each in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert titles
    assert len(titles) <= squares
    assert all(title.endswith(" bytes") for title in titles)
    facts = json.loads(plan("--json", trainer=ranks, engine="x2")[1])["plan"]
    drawn_bytes = sum(int(title.split(": ")[1][:-6].replace(",", "")) for title in titles)
    assert drawn_bytes == facts["bytes"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--dtype", "bf16"], "--dtype: 'bf16' is not known"),
        (["--between", "nan"], "--between is nan, which is no finite number above 0"),
        (["--within", "inf"], "--within is inf, which is no finite number above 0"),
        (["--gpus-per-host", "0"], "--gpus-per-host is 0, which is no finite number above 0"),
        (["--svg", "no/such/directory/plan.svg"], "--svg: no/such/directory/plan.svg cannot be"),
    ],
)
def test_bad_options_are_named(plan: Plan, more: list[str], message: str) -> None:
    code, _, err = plan(*more)
    assert code == 1
    assert f"Error: {message}" in err
    assert "Fix: " in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("[1]", "cannot be read"),
        ("{", "cannot be read"),
        ('{"model_type": "qwen4"}', "'qwen4' is a model_type that the planner does not know; did"),
        ('{"model_type": "llama"}', "config.json has no 'num_hidden_layers'"),
        (json.dumps(CONFIG | {"torch_dtype": "int3"}), "--dtype: 'int3' is not known"),
        (json.dumps(CONFIG | {"torch_dtype": ["int8"]}), "is not known"),
        (json.dumps(CONFIG | {"num_hidden_layers": "2"}), "has num_hidden_layers '2', which is no"),
        (json.dumps(CONFIG | {"num_attention_heads": 0}), "has num_attention_heads 0, which is no"),
        (json.dumps(CONFIG | {"hidden_size": 64.5}), "number from 1 to 10000000"),
        (
            json.dumps(CONFIG | {"model_type": "qwen3_moe", "decoder_sparse_step": 2}),
            "layers without experts",
        ),
    ],
)
def test_models_that_cannot_be_planned(
    plan: Plan, tmp_path: Path, text: str | None, message: str
) -> None:
    (tmp_path / "config.json").unlink()
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    code, _, err = plan()
    assert code == 1
    assert message in err
    assert "Fix: " in err


def test_help_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        main(["refit", "plan", "--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert "usage: rl refit plan [OPTIONS]" in out
    assert max(map(len, out.splitlines())) <= 80
