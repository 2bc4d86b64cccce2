"""What ``rl`` prints and how it exits."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys

import pytest
from installed import NO_ENGINE, Install

from rl_cli import main
from rl_core.errors import BrokenPluginError
from rl_core.install import install_command


def rl(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    return code, out.getvalue(), err.getvalue()


def row(output: str, name: str) -> list[str]:
    (line,) = [line for line in output.splitlines() if line.startswith(f"{name} ")]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_version() -> None:
    code, out, _ = rl("--version")
    assert (code, out.split()[0]) == (0, "rl-core")


def test_list_shows_what_a_backend_offers_and_its_engine(install: Install) -> None:
    install.toy()
    cells = row(rl("backends", "list")[1], "toy")
    assert cells[:3] == ["toy", "generation", "rl-toy 1.0"]
    assert cells[3].startswith("pluggy ")
    assert cells[4] == "ready"


def test_list_tolerates_a_missing_engine_and_says_how_to_install_it(install: Install) -> None:
    install.toy(engine=NO_ENGINE)
    out = rl("backends", "list")[1]
    assert row(out, "toy")[-1] == "no engine"
    assert 'Fix: pip install "rl-toy[engine]"' in out


def test_list_shows_a_broken_plugin_of_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    error = BrokenPluginError("rl-hooks 1.0: cannot be imported", fix="reinstall rl-hooks")
    monkeypatch.setattr("rl_cli.backends.broken_hooks", lambda: [error])
    code, out, _ = rl("backends", "list")
    assert code == 1
    assert "hooks: rl-hooks 1.0: cannot be imported\nFix: reinstall rl-hooks" in out
    assert json.loads(rl("backends", "list", "--json")[1])["broken_hooks"] == [error.message]


def test_list_without_backends_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_cli.backends.list_backends", list)
    assert install_command("rl-hf") in rl("backends", "list")[1]


def test_info_shows_every_capability(install: Install) -> None:
    install.toy()
    code, out, _ = rl("backends", "info", "toy")
    assert code == 0
    assert row(out, "kv_scales") == ["kv_scales", "generation", "unsupported", "-"]
    assert "toy.backend:Toy" in out


def test_info_as_json_holds_the_manifest(install: Install) -> None:
    install.toy()
    (backend,) = json.loads(rl("backends", "info", "toy", "--json")[1])["backends"]
    assert backend["manifest"]["capabilities"]["generation"]["sleep"]["level"] == "unsupported"
    assert backend["manifest"]["engine"]["versions"] == ">=1"


def test_info_of_an_ambiguous_name_shows_both_and_exits_with_one(install: Install) -> None:
    install.toy("rl-toy")
    install.toy("rl-toy-two")
    code, out, _ = rl("backends", "info", "toy")
    assert code == 1
    assert "write 'rl-toy:toy'" in out
    assert "write 'rl-toy-two:toy'" in out


def test_unknown_backend_is_a_clean_error_with_its_fix(install: Install) -> None:
    install.toy()
    code, out, err = rl("backends", "info", "tyo")
    assert (code, out) == (1, "")
    assert "Error: no installed plugin provides the backend 'tyo'" in err
    assert "Fix: write 'toy'" in err


def test_debug_shows_the_traceback() -> None:
    command = [sys.executable, "-m", "rl_cli", "--debug", "backends", "info", "qqqqqq"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 1
    assert "Traceback" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [[], ["frob"], ["backends"], ["backends", "frob"], ["backends", "list", "--frob"], ["--frob"]],
)
def test_wrong_usage_exits_with_two_and_says_so(arguments: list[str]) -> None:
    code, out, err = rl(*arguments)
    assert (code, out) == (2, "")
    assert "usage: rl" in err


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--help"], "  backends     List the installed backends"),
        (["backends", "--help"], "  rl backends info vllm"),
        (["backends", "doctor", "--help"], "usage: rl backends doctor [OPTIONS] [NAME]"),
    ],
)
@pytest.mark.parametrize("width", ["60", "80"])
def test_help_exits_with_zero(
    arguments: list[str], shown: str, width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    code, out, _ = rl(*arguments)
    assert code == 0
    assert shown in out
    assert "examples:\n  rl " in out
    assert max(map(len, out.splitlines())) <= int(width)


def test_command_that_two_plugins_provide_names_both(install: Install) -> None:
    for name in ("rl-one", "rl-two"):
        install(name, {"rl_core.commands": {"serve": "one:app"}})
    code, _, err = rl("serve")
    assert code == 1
    assert "several plugins provide 'rl serve': rl-one 1.0, rl-two 1.0" in err


def test_command_that_cannot_be_called_is_a_broken_plugin(install: Install) -> None:
    install("rl-one", {"rl_core.commands": {"serve": "sys:version"}})
    assert "'sys:version' is of type str, not callable" in rl("serve")[2]


def test_command_gets_its_arguments_and_its_exit_code_is_kept(install: Install) -> None:
    source = "def main(argv):\n    print(argv)\n    return 7\n"
    install("rl-one", {"rl_core.commands": {"serve": "served:main"}}, {"served": source})
    assert rl("serve", "--port", "1")[:2] == (7, "['--port', '1']\n")


def test_what_plugins_print_is_not_part_of_the_json(install: Install) -> None:
    install.toy()
    noisy = "import os\nprint('hello')\nos.system('echo from a child')\n"
    (install.root / "toy" / "__init__.py").write_text(noisy)
    command = [sys.executable, "-m", "rl_cli", "backends", "list", "--json"]
    path = os.pathsep.join([str(install.root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert "toy" in [backend["name"] for backend in json.loads(result.stdout)["backends"]]
    assert {"hello", "from a child"} <= set(result.stderr.splitlines())


def test_json_shows_a_manifest_as_it_is_declared(install: Install) -> None:
    install.toy(tolerances="{'float32': (1e-4, 1e-3)}", devices="('cpu',)")
    (backend,) = json.loads(rl("backends", "info", "toy", "--json")[1])["backends"]
    assert backend["manifest"]["tolerances"] == {"float32": [1e-4, 1e-3]}


def test_misspelt_command_is_told_the_nearest() -> None:
    assert "did you mean 'check'?" in rl("chek")[2]


def test_unknown_command_is_told_which_there_are() -> None:
    assert "there is no command 'frob'; there are: backends, check, " in rl("frob")[2]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["backends", "inof"], "no command 'inof'; did you mean 'info'?"),
        (["backends", "info", "--jsn"], "no option --jsn; did you mean --json?"),
        (["backends", "info", "--name", "vllm"], "no option --name; write NAME without --name"),
        (["backends", "list", "toy"], "unexpected argument 'toy'"),
        (["--verson"], "no option --verson; did you mean --version?"),
    ],
)
def test_wrong_usage_names_what_was_meant(arguments: list[str], hint: str) -> None:
    code, _, err = rl(*arguments)
    words = [word for word in arguments[:2] if word in ("backends", "info", "list")]
    assert (code, hint in err) == (2, True)
    assert err.startswith(f"usage: {' '.join(['rl', *words])} [OPTIONS]")


@pytest.mark.parametrize("words", [["check", "logprobs"], ["explain", "G7"]])
def test_command_of_the_suite_says_how_to_install_it(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_cli.providers", lambda _: [])
    code, _, err = rl(*words)
    assert code == 1
    assert f"'rl {words[0]}' is a command of rl-conformance" in err
    assert f"Fix: {install_command('rl-conformance')}" in err


@pytest.mark.parametrize(
    ("arguments", "code"), [("list", 1), ("list --json", 1), ("--help", 0), ("frob", 2)]
)
def test_closed_pipe_is_quiet(arguments: str, code: int) -> None:
    command = [sys.executable, "-m", "rl_cli", "backends", *arguments.split()]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, timeout=280, check=False
        )
    assert done.returncode == code
    assert b"Traceback" not in done.stderr
    assert b"BrokenPipe" not in done.stderr


def test_interrupt_exits_with_130_without_a_traceback(install: Install) -> None:
    source = "def main(argv):\n    raise KeyboardInterrupt\n"
    install("rl-one", {"rl_core.commands": {"serve": "served:main"}}, {"served": source})
    assert rl("serve") == (130, "", "Interrupted\n")


def test_command_of_a_plugin_does_not_hide_ours_in_the_help(install: Install) -> None:
    install("rl-one", {"rl_core.commands": {"backends": "one:app"}})
    assert "List the installed backends" in rl("--help")[1]
