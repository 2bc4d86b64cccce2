"""D1, D2, D3, D4 and D5: what is known of a backend before it runs, and how it fails."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from importlib.metadata import packages_distributions
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.calls import noted
from rl_conformance.catalogue import LARGEST_CONSTANT, LEAST_RELEASED, LOOSEST
from rl_conformance.expect import raised, raises, require, same
from rl_conformance.outcome import Status
from rl_conformance.registry import check, checks_of
from rl_core.config import config_keys
from rl_core.errors import ConfigError, LifecycleError, MissingEngineError, WorkerError
from rl_core.install import engine_extra
from rl_core.plugins.discovery import check_engine, load_object
from rl_core.plugins.manifest import EngineRequirement, manifest_problems
from rl_core.plugins.registry import find_provider

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_conformance.context import Context


#: Lists the backends where the given modules cannot be imported, and prints what was imported.
_LISTING = """
import importlib.abc, json, sys
hidden = set(json.loads(sys.argv[1]))
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"{name} is hidden", name=name)
sys.meta_path.insert(0, Hide())
from rl_cli.listing import list_backends
found = {item.provider.name: item.manifest is not None for item in list_backends()}
print(json.dumps({"found": found, "loaded": sorted(hidden & set(sys.modules))}))
"""


def _require_installed(ctx: Context) -> str:
    if not ctx.target.installed:
        ctx.not_run("the backend is not installed, or not under this name", excused=True)
    return ctx.target.name.rpartition(":")[2]


@check("D1")
def listed_without_its_engine(ctx: Context) -> None:
    """Its manifest loads where torch, ray and the engine cannot be imported."""
    name = _require_installed(ctx)
    distributions = {distribution.lower() for distribution in ctx.manifest.engine.distributions}
    modules = [
        module
        for module, owners in packages_distributions().items()
        if distributions & {owner.lower() for owner in owners}
    ]
    hidden = ["torch", "ray", *modules]
    listing = subprocess.run(
        [sys.executable, "-c", _LISTING, json.dumps(hidden)],
        capture_output=True,
        text=True,
        timeout=600,  # the deadline of the check is shorter
    )
    require(not listing.returncode, "list_backends()", "no error", listing.stderr)
    answer = json.loads(listing.stdout)
    whole = answer["found"].get(name)
    require(whole, "list_backends()", f"{name} with its manifest", answer["found"])
    same(answer["loaded"], [], "modules that list_backends() imported")


@check("D2")
def the_manifest_is_complete(ctx: Context) -> None:
    """Kinds, factories, configurations, capabilities, engine: nothing is missing."""
    problems = manifest_problems(ctx.manifest, ctx.target.name.rpartition(":")[2])
    require(not problems, "the manifest", "no problems", "; ".join(problems))


@check("D2")
def tolerances_are_not_declared_away(ctx: Context) -> None:
    """There are some, and none lets more pass than the contract does."""
    manifest = ctx.manifest
    require(manifest.tolerances, "tolerances of the manifest", "at least one dtype", "none")
    for dtype, declared in manifest.tolerances.items():
        named = str(getattr(torch, dtype, None)) == f"torch.{dtype}"
        require(named, "dtypes of the tolerances", "names as torch has them", dtype)
        loosest = LOOSEST.get(dtype, LOOSEST["bfloat16"])
        within_bounds = all(own <= most for own, most in zip(declared, loosest, strict=True))
        require(within_bounds, f"tolerance of {dtype}", f"at most {loosest}", declared)
    constant, fraction = manifest.refit_constant_bytes, manifest.released_fraction
    require(
        constant <= LARGEST_CONSTANT, "refit_constant_bytes", f"<= {LARGEST_CONSTANT}", constant
    )
    require(fraction >= LEAST_RELEASED, "released_fraction", f">= {LEAST_RELEASED}", fraction)


@check("D2")
def factories_and_configurations_load(ctx: Context) -> None:
    """Every factory has from_config, every configuration is a TypedDict with the common keys."""
    for kind, reference in ctx.manifest.factories.items():
        factory = load_object(reference)
        makes = callable(getattr(factory, "from_config", None))
        require(makes, f"factory {reference} of {kind}", "it has from_config", factory)
        keys = config_keys(load_object(ctx.manifest.configs[kind]))
        same(
            {"backend", "model_name"} - keys.keys(),
            set(),
            f"common keys missing in the {kind} config",
        )


@check("D3", timeout_s=900.0, summary=True)
def declares_what_it_does(ctx: Context) -> None:
    """Each full capability passes its checks, each other one is refused cleanly."""
    wrong, looked_at = [], set()
    for each in checks_of():
        if each.capability is None or each.clause.id == "D3":
            continue
        looked_at.add(each.capability)
        outcome = ctx.outcome_of(each)
        if outcome.status.bad or outcome.status is Status.KNOWN_FAILURE:
            wrong.append(f"{each.capability} ({outcome.check}): {outcome.status}")
    # The last check of its process: what was left running there has to end within it.
    ctx.workshop.discard()
    declared = {name for found in ctx.manifest.capabilities.values() for name in found}
    same(sorted(declared - looked_at), [], "capabilities without a check")
    require(not wrong, "checks of the declared capabilities", "all pass", "; ".join(wrong))


_KINDS: dict[str, dict[str, Any]] = {
    "generation": {"kind": "generation"},
    "policy": {"kind": "policy"},
}


def _offered(ctx: Context, kind: str) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """A configuration that is right but for a model that is not there, and what takes one."""
    if kind not in ctx.manifest.kinds:
        ctx.not_run(f"the backend offers no {kind}", excused=True)

    def make(config: dict[str, Any]) -> Any:
        with noted(None, f"create_{kind}", config):
            return getattr(ctx.target, f"make_{kind}")(config)

    missing = {"model_name": str(ctx.directory() / "no-such-model")}
    return ctx.target.base_config(kind, ctx.settings) | missing, make


@check("D4", cases=_KINDS)
def an_unknown_key_is_named(ctx: Context, kind: str) -> None:
    """ConfigError names the key, the nearest match and the allowed ones, before loading."""
    config, make = _offered(ctx, kind)
    with raises(ConfigError, "modelname", "model_name") as caught:
        make({**config, "modelname": "x"})
    listed = [key for key in ctx.target.config_keys[kind] if key in str(caught.error)]
    require(len(listed) > 3, "the ConfigError", "it lists the allowed keys", caught.error)
    same(caught.error.details["key"], "modelname", 'details["key"] of the ConfigError')


@check("D4", cases=_KINDS)
def an_ill_typed_value_is_named(ctx: Context, kind: str) -> None:
    """ConfigError names the key and what it should be, before loading."""
    config, make = _offered(ctx, kind)
    with raises(ConfigError, "model_name"):
        make({**config, "model_name": 7})
    with raises(ConfigError, "temperature"):
        make({**config, "temperature": "warm"})


@check("D4", cases=_KINDS)
def a_missing_model_is_named(ctx: Context, kind: str) -> None:
    """A path that is not there raises an error naming it."""
    config, make = _offered(ctx, kind)
    with raises(ValueError, "no-such-model"):
        make(config)


@check("D4")
def a_missing_engine_comes_with_its_command(ctx: Context) -> None:
    """The error has the pip command that installs the engine."""
    name = _require_installed(ctx)
    engine = EngineRequirement(("no-such-engine-of-rl-conformance",), ">=1", "engine")
    manifest = dataclasses.replace(ctx.manifest, engine=engine)
    provider = find_provider(ctx.target.name)
    extra = engine_extra(provider.distribution, "engine")
    with raises(MissingEngineError, "pip install", f"[{extra}]", name):
        check_engine(provider, manifest)


@check("D5", modules=("rl_hosting",), device="cpu")
def a_workers_exception_arrives_with_its_traceback(ctx: Context) -> None:
    """A WorkerError with the worker's traceback as text, which keeps its class if it is ours."""
    from rl_core.create import create_generation
    from rl_hosting import LocalCluster

    config = {"backend": "reference", "model_name": str(ctx.model())}
    backend = ctx.closing(create_generation(config, LocalCluster(1)))
    with raises(WorkerError) as caught:
        backend.generate(ctx.prompts(4, 4), greedy=True)  # it is still asleep
    raised(caught.error, LifecycleError)
    traced = caught.error.remote_traceback
    require("Traceback" in traced, "remote_traceback", "the worker's traceback", traced)
