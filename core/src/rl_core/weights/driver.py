"""One call that brings an engine to a trainer's weights."""

from __future__ import annotations

import concurrent.futures
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from torch import nn

from rl_core.batch.provenance import off_policy
from rl_core.errors import (
    ConfigError,
    DeadlineError,
    LifecycleError,
    LoopWarning,
    ManifestMismatchError,
    RefitError,
    RefitProtocolError,
    RLError,
)
from rl_core.futures import as_concurrent, wait, within
from rl_core.install import install_command
from rl_core.interfaces import GenerationInterface, PolicyInterface, WeightSource
from rl_core.plugins import hookspecs
from rl_core.weights.engine_lock import EngineLock, exclusively
from rl_core.weights.options import SendOptions
from rl_core.weights.protocol.session import Phase, repeats_peer_error
from rl_core.weights.protocol.timing import DRIVER_GRACE_S, TICK_S, report_margin_s
from rl_core.weights.report import RefitReport

if TYPE_CHECKING:
    from rl_core.interfaces import ColocatablePolicyInterface, Future


#: By ``id`` of a policy or an engine, the lock of the calls of ``refit`` that are at it.
_turns: weakref.WeakValueDictionary[int, EngineLock] = weakref.WeakValueDictionary()
_finding_turns = threading.Lock()
#: Engines that ``refit`` warned about: of their distribution, and of another trainer's weights.
_warned_of_sampling: weakref.WeakSet[Any] = weakref.WeakSet()
_warned_of_trainer: weakref.WeakSet[Any] = weakref.WeakSet()


def refit(
    policy: ColocatablePolicyInterface | nn.Module | WeightSource,
    generation: GenerationInterface | nn.Module | None,
    *,
    rename: Callable[[str], str | None] | None = None,
    retries: int = 0,
    address: str | None = None,
    **options: Any,
) -> RefitReport:
    """Gives the policy's weights to the engine, and returns once they serve.

    Args:
        policy: The trainer, embedded or in workers. Or the module that somebody else trains, or a
            source of weights: see :mod:`rl_backends.modules`.
        generation: The engine, embedded or in workers; all of its replicas commit or none. Or a
            module to generate with, written to in place. None on ranks that do not send.
        rename: For a module: gives its tensors the checkpoint's names; None leaves one out.
        retries: How often to try again after a transfer that failed, before ``deadline_s`` have
            passed in all; what was verified and written in place is not sent again.
        address: With ``transport="collective"``, the address of the trainer's host at which the
            engines reach it; weights are not encrypted, so name one of a private network. By
            default that of the trainer's default route, which must be a private one.
        **options: Those of :class:`~rl_core.weights.options.SendOptions`, such as ``verify``,
            ``isolation``, ``transport``, ``delta``, ``version`` and ``deadline_s``.

    The hook ``on_event`` of every plugin gets ``"refit_started"``, then ``"refit_committed"`` or
    ``"refit_failed"``, with the facts; where the policy runs, ``"refit_progress"`` in between.

    Warns, once for each engine, if it samples from another distribution than the policy scores, and
    if it had the weights of another trainer (:attr:`RefitReport.taken_over`).

    Raises:
        CapabilityError: A module's tensors are not whole, or not what an engine has.
        ConfigError: An option is unknown or not legal, or the two are given the other way round.
        ManifestMismatchError: The two disagree on the tensors; nothing was touched.
        RefitError: The transfer failed; if the engine is torn, it takes another refit.
        DeadlineError: A worker, which is named, did not answer; or neither side reported its delay;
            or another call of ``refit`` for one of the two did not end in time.
    """
    sender, receiver = _end(policy, "send_weights"), _end(generation, "receive_weights")
    swapped = isinstance(policy, GenerationInterface) or isinstance(generation, PolicyInterface)
    if swapped or sender is None or (receiver is None and generation is not None):
        fix = "call refit(policy, generation): the trainer, or its module, comes first"
        if isinstance(policy, Mapping) or isinstance(generation, Mapping):
            fix = "pass the module itself, not its state_dict()"
        elif isinstance(policy if sender is None else generation, nn.Module):
            fix = f"for refits of modules: {install_command('rl-backends')}"
        raise ConfigError(
            f"refit(policy, generation) got a {type(policy).__name__} to send weights, and a "
            f"{type(generation).__name__} to receive them",
            fix=fix,
        )
    if rename is not None and sender is policy:
        text = "refit: rename is only for a torch module"
        raise ConfigError(text, fix="leave rename out", key="rename")
    warn_of_sampling(sender, receiver)
    options.setdefault("receivers", getattr(generation, "receiver_count", 1))
    chosen = SendOptions.of(options)
    attempt, end = 1, time.monotonic() + chosen.deadline_s
    least_s = report_margin_s(chosen.deadline_s)  # to report who is late before the deadline
    hookspecs.emit("refit_started", verify=chosen.verify, isolation=chosen.isolation)
    while True:
        try:
            with _turn(sender, end), _turn(receiver, end):
                if sender is not policy:
                    sender.rename = rename
                if (left := end - time.monotonic()) < chosen.deadline_s - TICK_S:
                    chosen = replace(chosen, deadline_s=max(left, TICK_S))
                with within(chosen.deadline_s - least_s):  # for calls before the transfer begins
                    report = _attempt(sender, receiver, chosen, address, attempt)
        except Exception as error:
            may_pass = isinstance(error, RefitError | DeadlineError)
            if isinstance(error, LifecycleError):  # the weights changed while they were sent
                may_pass = error.details.get("phase") in (Phase.TRANSFER, Phase.SEAL)
            may_pass &= not isinstance(error, ManifestMismatchError)
            again = attempt <= retries and may_pass and end - time.monotonic() > least_s
            what = {"error": type(error).__name__, "message": str(error), "attempt": attempt}
            hookspecs.emit("refit_retried" if again else "refit_failed", **what)
            if not again:
                raise
            attempt += 1
            chosen = replace(chosen, delta=chosen.verify != "none")
            continue
        hookspecs.emit("refit_committed", **report.as_dict())
        if report.taken_over and receiver not in _warned_of_trainer:
            _warned_of_trainer.add(receiver)
            had = report.taken_over[0]
            warnings.warn(
                f"{had['name']} had version {had['version']} of origin {had['origin']}: another "
                "trainer's, or this trainer's before a restart. It now has version "
                f"{report.version} of origin {report.origin}. Versions of different origins cannot "
                "be compared: use weights_origin to tell rows apart. If you hand the engine over "
                "on purpose, ignore rl_core.LoopWarning.",
                LoopWarning,
                stacklevel=2,
            )
        return report


def _end(party: Any, method: str) -> Any:
    """What has the method: the party itself, or what a plugin provides for it; None if nothing."""
    if hasattr(party, method):
        return party
    return hookspecs.only_answer("refit_end", party=party, sends=method == "send_weights")


def _turn(side: Any, end: float) -> AbstractContextManager[None]:
    """The turn of a call of ``refit`` at a policy or engine: two at once would share a number."""
    if side is None:
        return nullcontext()
    with _finding_turns:
        lock = _turns.setdefault(id(side), EngineLock())
    left = max(0.0, end - time.monotonic())
    return exclusively(lock, left, f"{type(side).__name__}: another call of refit")


def _attempt(
    policy: ColocatablePolicyInterface,
    generation: GenerationInterface | None,
    chosen: SendOptions,
    address: str | None,
    attempt: int,
) -> RefitReport:
    end = time.monotonic() + chosen.deadline_s
    info = policy.prepare_refit_info()
    if info is None and generation is None:  # another rank of the policy sends
        results = wait(policy.send_weights(**asdict(chosen)), chosen.deadline_s + DRIVER_GRACE_S)
        return RefitReport.of(results, attempt)
    number = info.get("number") if info else None  # also where a side does not derive from ours
    try:
        if info is None or generation is None:
            text, fix = "this rank sends the weights, and has no engine", "pass the engine here"
            if info is None:
                text = "the policy's prepare_refit_info() returned None: it does not send from here"
                fix = "pass None for the engine here, or build the policy on PolicyBackend"
            raise ConfigError(f"refit: {text}", fix=fix, key="generation")
        if chosen.transport == "collective" and "collective" not in info.get("addresses", {}):
            if not {"host", "port"} <= set(info):
                text = "the policy's prepare_refit_info names no host and port to connect to"
                fix = "build the policy on PolicyBackend, or call init_collective on both sides"
                raise RefitProtocolError(text, fix=fix, phase="DISCOVER")
            if address is None and ip_address(info["host"]).is_global:
                text = f"refit: the trainer's default route has the public address {info['host']}, "
                text += "and weights are sent without encryption"
                fix = "pass address= with the trainer's address in a private network"
                raise ConfigError(text, fix=fix, key="address")
            meeting = (address or info["host"], info["port"], 1 + chosen.receivers)
            opening = policy.init_collective(*meeting)
            info = policy.prepare_refit_info() or info  # with where to find it, for the engines
            generation.prepare_refit_info(info)
            opening = [*opening, *generation.init_collective(*meeting)]
            wait(opening, chosen.deadline_s + DRIVER_GRACE_S)
            chosen = replace(chosen, deadline_s=max(TICK_S, end - time.monotonic()))
        else:
            generation.prepare_refit_info(info)
    except BaseException:  # its other ranks may wait already
        _cancel(policy, [], number)
        raise
    sending, receiving, results = list[Any](), list[Any](), list[Any]()
    failure: RLError | None = None
    try:
        sending = policy.send_weights(**asdict(replace(chosen, number=number)))
        for call in map(as_concurrent, sending):
            if call.done():  # it could not begin, and raises the cause
                call.result()
        if chosen.transport not in info.get("addresses", [chosen.transport]):
            # A plugin's transport, which the sender has opened by now; before, it had no address.
            info = {**(policy.prepare_refit_info() or info), "number": number}
            generation.prepare_refit_info(info)
        receiving = generation.receive_weights(
            transport=chosen.transport, deadline_s=chosen.deadline_s, number=number
        )
        results = wait([*sending, *receiving], chosen.deadline_s + DRIVER_GRACE_S)
    except RLError as error:
        failure = error
    finally:
        if not results:
            _cancel(policy, sending, number)
            _cancel(generation, receiving, number)
    if failure is not None:
        raise _cause(failure, sending, receiving)
    return RefitReport.of(results, attempt)


def _cancel(side: Any, calls: list[Future], number: int | None) -> None:
    """Cancels one side's calls of a failed refit; the other side may have died before it could."""
    with suppress(Exception):  # the caller must see why the refit failed, not why this did
        if cancel := getattr(side, "cancel_refit", None):
            cancel(number)
        else:  # neither derived from our interfaces
            for call in calls:
                as_concurrent(call).cancel()


def _cause(failure: RLError, policy: list[Future], engines: list[Future]) -> RLError:
    """Of several errors the one that the others repeat, or that names a rank of the policy.

    An engine that lost rank 0 does not know which rank was the cause; the policy does, or finds
    out in this time.
    """
    others = list(map(as_concurrent, policy + (engines if repeats_peer_error(failure) else [])))
    concurrent.futures.wait(others, DRIVER_GRACE_S)
    errors = [call.exception() for call in others if call.done() and not call.cancelled()]
    found = [failure, *(error for error in errors if isinstance(error, RLError))]
    return min(found, key=lambda error: (repeats_peer_error(error), "rank" not in error.details))


def warn_of_sampling(policy: Any, generation: Any) -> None:
    """Warns, once for each engine, of rows that are drawn from another distribution than scored.

    Both are known wherever the two run: a backend on a cluster has its configuration here.
    """
    sampling = getattr(generation, "sampling", None)
    if sampling is None or not hasattr(policy, "config") or generation in _warned_of_sampling:
        return
    ours = float(policy.config.get("temperature", 1.0))
    if text := off_policy("the engine samples with", sampling.distribution, ours):
        _warned_of_sampling.add(generation)
        text += " Ignore rl_core.LoopWarning for an engine that is for evaluation alone."
        warnings.warn(text, LoopWarning, stacklevel=3)
