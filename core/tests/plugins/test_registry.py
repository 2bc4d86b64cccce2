"""A name means exactly one backend or raises; hooks and the factory build on that."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
from installed import NO_ENGINE, Install

from rl_core.create import create_generation, create_policy
from rl_core.errors import (
    AmbiguousBackendError,
    BackendNotFoundError,
    BrokenPluginError,
    ConfigError,
    IncompatiblePluginError,
    MissingEngineError,
    PluginError,
)
from rl_core.install import install_command
from rl_core.plugins import registry
from rl_core.plugins.discovery import BACKENDS, HOOKS
from rl_core.plugins.hookspecs import emit, only_answer
from rl_core.plugins.registry import find_provider, resolve
from rl_core.weights.transports import find_transport

CONFIG = {"backend": "toy", "model_name": "m"}
HOOK = "from rl_core.plugins.hookspecs import hookimpl\n\n@hookimpl\n"


def hooks(install: Install, source: str, name: str = "rl-hooks") -> None:
    module = name.replace("-", "_")
    install(name, {HOOKS: {"hooks": module}}, {module: HOOK + source})


# -- the registry ----------------------------------------------------------------------------------


def test_name_resolves_to_its_manifest(install: Install) -> None:
    install.toy()
    assert resolve("toy", "generation").summary == "A toy."


def test_qualified_name_resolves_too(install: Install) -> None:
    install.toy()
    assert resolve("rl-toy:toy") is resolve("RL_Toy:toy")


def test_unknown_name_suggests_the_nearest_and_lists_what_is_there(install: Install) -> None:
    install.toy()
    with pytest.raises(BackendNotFoundError, match=r"'tyo'; installed are: .*toy") as caught:
        resolve("tyo")
    assert caught.value.fix == "write 'toy'"


def test_unknown_name_like_no_other_names_no_distribution_that_anybody_may_have_taken() -> None:
    with pytest.raises(BackendNotFoundError) as caught:
        resolve("qqqqqq")
    assert caught.value.fix.startswith("install the plugin that provides it;")


def test_unknown_distribution_suggests_the_one_that_provides_the_name(install: Install) -> None:
    install.toy()
    with pytest.raises(BackendNotFoundError) as caught:
        resolve("rl-other:toy")
    assert caught.value.fix == "write 'rl-toy:toy'"


def test_kind_that_is_not_offered_is_not_found(install: Install) -> None:
    install.toy()
    with pytest.raises(BackendNotFoundError, match="offers generation, not policy"):
        resolve("toy", "policy")


def test_two_providers_are_ambiguous_until_one_is_named(install: Install) -> None:
    install.toy("rl-toy")
    install.toy("rl-toy-two", summary="'The second.'")
    with pytest.raises(AmbiguousBackendError) as caught:
        find_provider("toy")
    assert caught.value.details["candidates"] == ["rl-toy:toy", "rl-toy-two:toy"]
    assert resolve("rl-toy-two:toy").summary == "The second."


def test_broken_backend_raises_with_its_cause_and_never_falls_back(install: Install) -> None:
    install("rl-toy", {BACKENDS: {"toy": "bad:BACKEND"}}, {"bad": "1 / 0"})
    with pytest.raises(BrokenPluginError) as caught:
        resolve("toy")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.details["distribution"] == "rl-toy"
    assert caught.value.details["version"] == "1.0"


def test_incompatible_backend_raises(install: Install) -> None:
    install.toy(contract="'2.0'")
    with pytest.raises(IncompatiblePluginError, match=r"version 2\.0 of the contract"):
        resolve("toy")


def test_engine_is_asked_for_only_where_the_backend_runs(install: Install) -> None:
    install.toy(engine=NO_ENGINE)
    assert resolve("toy").name == "toy"
    with pytest.raises(MissingEngineError, match="needs no-such-engine >=2"):
        resolve("toy", config={})


def test_engine_of_another_environment_need_not_be_here(install: Install) -> None:
    install.toy(engine=NO_ENGINE.replace("extra=", "elsewhere='toy_cfg.python', extra="))
    assert resolve("toy", config={"toy_cfg": {"python": "/e/bin/python"}}).name == "toy"
    for config in ({}, {"toy_cfg": None}, {"toy_cfg": {"python": ""}}):
        with pytest.raises(MissingEngineError):
            resolve("toy", config=config)


# -- the factory -----------------------------------------------------------------------------------


def test_embedded_backend_gets_its_checked_configuration(install: Install) -> None:
    install.toy()
    backend: Any = create_generation(CONFIG | {"toy_size": 3, "top_p": 1})
    assert type(backend).__module__ == "toy.backend"
    assert backend.config == CONFIG | {"toy_size": 3, "top_p": 1}


def test_configuration_is_refused_before_the_backend_is_imported(install: Install) -> None:
    import sys

    install.toy()
    with pytest.raises(ConfigError, match="generation backend 'toy': unknown key 'toy_sise'"):
        create_generation(CONFIG | {"toy_sise": 3})
    assert "toy.backend" not in sys.modules


def test_missing_engine_is_refused_with_the_pip_command(install: Install) -> None:
    install.toy(engine=NO_ENGINE)
    with pytest.raises(MissingEngineError) as caught:
        create_generation(CONFIG)
    assert caught.value.fix == 'pip install "rl-toy[engine]"'


def test_configuration_without_a_backend_lists_those_installed(install: Install) -> None:
    install.toy()
    with pytest.raises(ConfigError, match=r"names no backend \(installed: .*toy"):
        create_generation({"model_name": "m"})


def test_policy_is_not_built_from_a_generation_backend(install: Install) -> None:
    install.toy()
    with pytest.raises(BackendNotFoundError, match="not policy"):
        create_policy(CONFIG)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("factories", "toy.nowhere:Toy", r"rl-toy 1\.0: cannot load 'toy\.nowhere:Toy"),
        ("factories", "toy.config:ToyConfig", r"rl-toy 1\.0: cannot load .*from_config"),
        ("configs", "toy.backend:Toy", "not a TypedDict"),
    ],
)
def test_what_is_not_what_the_manifest_says_is_a_broken_plugin(
    install: Install, field: str, value: str, problem: str
) -> None:
    install.toy(**{field: f"{{'generation': '{value}'}}"})
    with pytest.raises(BrokenPluginError, match=problem):
        create_generation(CONFIG)


def test_embedded_environment_leaves_what_the_user_exported(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install.toy(environment="{'TOY_EXPORTED': 'manifest', 'TOY_OPEN': 'manifest'}")
    monkeypatch.setenv("TOY_EXPORTED", "user")
    monkeypatch.setenv("TOY_OPEN", "restored by monkeypatch")
    monkeypatch.delenv("TOY_OPEN")
    create_generation(CONFIG)
    assert (os.environ["TOY_EXPORTED"], os.environ["TOY_OPEN"]) == ("user", "manifest")


# -- hooks -----------------------------------------------------------------------------------------


def test_hook_that_raises_is_reported_under_its_plugins_name(install: Install) -> None:
    hooks(install, "def weight_source():\n    1 / 0\n")
    with pytest.raises(PluginError, match=r"rl-hooks 1\.0 .* weight_source raised Zero") as it:
        only_answer("weight_source", module=torch.nn.Linear(1, 1))
    assert isinstance(it.value.__cause__, ZeroDivisionError)


def test_two_plugins_of_which_one_may_answer_are_both_named(install: Install) -> None:
    hooks(install, "def refit_end(): return 1\n")
    install("rl-more", {HOOKS: {"more": "more"}}, {"more": HOOK + "def refit_end(): return 2\n"})
    with pytest.raises(PluginError, match=r"rl-hooks 1\.0 .* and rl-more .* all provide refit_end"):
        only_answer("refit_end", party=object(), sends=True)


@pytest.mark.parametrize(
    "source",
    ["import no_such_module\n", "def no_such_hook(): pass\n", "def on_event(wrong): pass\n"],
)
def test_broken_hook_plugin_is_left_out_with_a_warning(install: Install, source: str) -> None:
    install.toy()
    install("rl-hooks", {HOOKS: {"hooks": "bad_hooks"}}, {"bad_hooks": HOOK + source})
    with pytest.warns(RuntimeWarning, match=r"rl-hooks 1\.0"):
        create_generation(CONFIG)
    with pytest.raises(PluginError, match=r"rl-hooks 1\.0"):
        only_answer("weight_source", module=torch.nn.Linear(1, 1))


def test_a_plugin_that_cannot_be_loaded_takes_a_name_from_nobody(install: Install) -> None:
    install.toy("rl-toy")
    broken = {"broken_manifest": "import no_such_module\n"}
    install("rl-other", {BACKENDS: {"toy": "broken_manifest:MANIFEST"}}, broken)
    assert find_provider("toy").distribution == "rl-toy"


def test_events_reach_every_plugin_although_one_raises(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    hooks(install, "def on_event():\n    1 / 0\n", "rl-one")
    hooks(install, "def on_event(event):\n    event.data['seen'].append(event.name)\n", "rl-two")
    seen: list[str] = []
    with caplog.at_level(logging.ERROR):
        emit("refit_committed", seen=seen)
    assert seen == ["refit_committed"]
    assert "rl-one 1.0 (hooks) failed to observe refit_committed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_transport_of_another_distribution_is_named_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = [p for p in registry.providers(registry.TRANSPORTS) if p.distribution == "rl-core"]
    monkeypatch.setattr(registry, "providers", lambda group: alone)
    with pytest.raises(BackendNotFoundError, match="installed are: ipc") as caught:
        find_transport("collective")
    assert caught.value.fix == install_command("rl-collective")
