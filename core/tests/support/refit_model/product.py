"""The product's own code, with what it has of the world outside in the hands of a scheduler."""

from __future__ import annotations

import itertools
import secrets
import sys
import types
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from refit_model import tasks
from refit_model.people import overtaken
from refit_model.promises import check_frame
from refit_model.tasks import point, running
from refit_model.threads import threads_in_hand
from rl_core.weights import driver as _driver
from rl_core.weights import job as _job
from rl_core.weights.data.digests import Hasher
from rl_core.weights.protocol.frames import Channel
from rl_core.weights.sending import send_job as _send_job
from rl_core.weights.sending import sender as _sender

if TYPE_CHECKING:
    from collections.abc import Callable

#: Whose threads, locks and events are not the model's: what has none in it.
_OTHERS = tuple(f"rl_core.weights.{name}" for name in ("transports", "modules", "gpu.fold_triton"))


def _hooked(honest: Callable[[Hasher], Any]) -> Callable[[Hasher], Any]:
    def begin(hasher: Hasher) -> Any:
        task = running()
        reads = (
            task is not None and task.party not in tasks.TRAINERS
        )  # what it has not written itself
        if reads:
            point("hash")
        result = honest(hasher)
        tasks.world().digested.update(zip(result(), map(bytes, hasher._blocks), strict=True))
        if reads:
            point("hashed")
        return result

    return begin


def _noted(decode: Callable[..., Any]) -> Callable[..., Any]:
    def decodes(channel: Channel, frame: bytes) -> Any:
        message = decode(channel, frame)
        check_frame(tasks.world(), frame)
        return message

    return decodes


def _may_be_overtaken(waiting: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What was seen of the refits that wait may be old when something is done about it."""

    def sees(endpoint: Any) -> Any:
        found = waiting(endpoint)
        where = sys._getframe(1).f_code.co_name
        if where in ("send", "start", "prepare"):
            overtaken(f"waiting of {where}", 3 if where == "prepare" else 2)
        return found

    return sees


def product_in_hand() -> ExitStack:
    """Puts what :data:`refit_model.tasks.WORLD` does not have of it into the hands of a world."""
    stack = ExitStack()
    ticks = itertools.count()

    def enter(module: Any, name: str, value: object) -> None:
        if hasattr(module, name):
            stack.enter_context(patch.object(module, name, value))

    modules = [
        n for n in sys.modules if n.startswith("rl_core.weights.") and not n.startswith(_OTHERS)
    ]
    with_clock = ["rl_core.weights.driver", "rl_core.weights.engine_lock", "rl_core.futures"]
    stack.enter_context(
        threads_in_hand([n for n in modules if n not in with_clock], with_clock=with_clock)
    )
    # Whether to look is asked of this clock, which always says yes; nobody is busy.
    enter(_job, "time", types.SimpleNamespace(monotonic=lambda: float(next(ticks))))
    enter(_job, "BUSY_S", float("inf"))
    # They divide by seconds, of which none pass here.
    enter(_send_job.SendJob, "_report", lambda *given: types.SimpleNamespace(as_dict=dict))
    report = types.SimpleNamespace(as_dict=dict, taken_over=[])
    enter(_driver, "RefitReport", types.SimpleNamespace(of=lambda *given: report))
    enter(_send_job, "CAUSE_S", 0.0)
    enter(_sender, "default_address", str)
    enter(_sender, "free_port", int)
    enter(_job.Endpoint, "waiting", _may_be_overtaken(_job.Endpoint.waiting))
    enter(Hasher, "begin", _hooked(Hasher.begin))
    enter(Channel, "decode", _noted(Channel.decode))
    enter(secrets, "token_hex", lambda n=32: tasks.world().names.bytes(n).hex())
    enter(secrets, "token_bytes", lambda n=32: tasks.world().names.bytes(n))
    return stack
