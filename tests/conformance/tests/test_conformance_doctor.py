"""What ``rl backends doctor`` finds, prints and exits with."""

from __future__ import annotations

import json

import pytest
from installed import NO_ENGINE, Install

from rl_cli import main
from rl_cli.doctor import diagnose
from rl_core.errors import BackendNotFoundError


def texts(name: str | None, level: str) -> str:
    return "\n".join(finding.text for finding in diagnose(name) if finding.level == level)


def test_doctor_finds_nothing_wrong_with_a_whole_backend(install: Install) -> None:
    install.toy()
    assert {finding.level for finding in diagnose("toy")} == {"ok"}


def test_doctor_tolerates_a_missing_engine_unless_asked_for_the_backend(install: Install) -> None:
    install.toy(engine=NO_ENGINE)
    assert "needs no-such-engine" in texts(None, "warning")
    assert "needs no-such-engine" in texts("toy", "error")


def test_doctor_finds_a_manifest_that_imports_an_engine(install: Install) -> None:
    install("ray-double", {}, {"sglang": ""})  # a test double of an engine's package
    install.toy()
    path = install.root / "toy" / "__init__.py"
    path.write_text("import sglang")
    assert "loading its manifest imports sglang" in texts("toy", "error")


@pytest.mark.parametrize(
    ("field", "expression", "finding"),
    [
        ("factories", "{'generation': 'toy.nowhere:Toy'}", "factory toy.nowhere:Toy has no such"),
        ("configs", "{'generation': 'toy.config:Nothing'}", "cannot load 'toy.config:Nothing'"),
        ("configs", "{'generation': 'toy.backend:Toy'}", "toy.backend:Toy is no TypedDict"),
        ("engine", "EngineRequirement(('pluggy',), '>=1', extra='gone')", "the extra 'gone'"),
    ],
)
def test_doctor_finds_what_the_manifest_promises_and_lacks(
    install: Install, field: str, expression: str, finding: str
) -> None:
    install.toy(**{field: expression})
    assert finding in texts("toy", "error")


def test_doctor_finds_hooks_that_cannot_be_registered(install: Install) -> None:
    install(
        "rl-hooks", {"rl_core.plugins": {"hooks": "bad_hooks"}}, {"bad_hooks": "import nothing"}
    )
    assert "No module named 'nothing'" in texts(None, "error")


def test_doctor_finds_two_plugins_with_one_command(install: Install) -> None:
    for name in ("rl-one", "rl-two"):
        install(name, {"rl_core.commands": {"serve": "one:app"}})
    assert "several plugins provide it in rl_core.commands: rl-one 1.0, rl-two" in texts(
        None, "error"
    )


def test_doctor_refuses_a_name_that_nothing_provides() -> None:
    with pytest.raises(BackendNotFoundError):
        list(diagnose("qqqqqq"))


def test_doctor_examines_a_backend_whose_metadata_has_no_name(install: Install) -> None:
    info = install.toy()
    (info / "METADATA").unlink()
    assert "its metadata is incomplete" in texts("toy", "error")


def test_doctor_of_a_whole_backend_exits_with_zero(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install.toy()
    assert main(["backends", "doctor", "toy"]) == 0
    assert "0 errors, 0 warnings" in capsys.readouterr().out


def test_doctor_of_a_backend_without_engine_exits_with_one(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install.toy(engine=NO_ENGINE)
    assert main(["backends", "doctor", "toy"]) == 1
    out = capsys.readouterr().out
    assert 'Fix: pip install "rl-toy[engine]"' in out
    assert "1 error, 0 warnings" in out


def test_doctor_as_json_lists_its_findings(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install.toy()
    assert main(["backends", "doctor", "toy", "--json"]) == 0
    (finding,) = json.loads(capsys.readouterr().out)
    assert (finding["level"], finding["subject"]) == ("ok", "toy")
