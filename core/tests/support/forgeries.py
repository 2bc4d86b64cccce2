"""What somebody who holds the token could write, and neither side would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rl_core.weights.data.parts import LanePlaces
from rl_core.weights.protocol.messages import (
    Abort,
    BucketReady,
    Commit,
    Done,
    Failed,
    FromReceiver,
    FromSender,
    LaneInfo,
    Loaded,
    Prepared,
    Ready,
    Seal,
    Sealed,
)
from rl_core.weights.protocol.session import Phase

if TYPE_CHECKING:
    from simulation.network import Network
    from simulation.parties import Engine


#: Other plans, parts that are left out, other memory, and places that are none.
LANES = [
    ("", b"", {}),
    ("", b"\1", {"lane": 0}),
    ("", b"", {"lane": 10**6}),
    ("", b"", {"lane": 0}, b"", LanePlaces(b"\xff" * 8, ((0, (-1,)), (9, ())))),
]


def forgeries(message: msgspec.Struct) -> list[msgspec.Struct]:
    """The message with another value of the same type in one of its fields."""
    others: list[msgspec.Struct] = []
    for name in message.__struct_fields__:
        value = getattr(message, name)
        others += [
            msgspec.structs.replace(message, **{name: other})
            for other in _others(name, value)
            if other != value
        ]
    return others


def _others(name: str, value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, max(0, value - 1), value + 1000]
        case float():
            return [0.0, value / 2, 1e6]
        case str():
            return ["", value + "x", value[::-1]]
        case bytes():
            return [b"", value + b"\1", b"\1" * len(value), value[:-1]]
        case tuple():
            return [(*value, "GPU-x")]
    return {
        "dtypes": [{}, {"a": "bfloat16"}, {"a": "int8"}, {"x": "float32"}],
        "keeps": [{0: ()}, {1: (((0, 1),),)}, {10**6: ()}, {0: (((0, 9), (0, 9)),)}],
        "cuts": [{0: ((3,), ())}, {0: ((99,), ())}, {10**6: ()}],
        "lanes": [{}, *({0: LaneInfo(*given)} for given in LANES)],
        "kv_scales": [{"k": 1.0}],
    }[name]


def out_of_turn_to_engine(network: Network, engine: Engine) -> list[FromSender]:
    """Messages of this session that are not the next one; the sealed await just one Commit."""
    assert network.trainer.job is not None
    offer = network.trainer.job.session.offer
    s = offer.session
    messages: list[FromSender] = [
        offer,
        *(BucketReady(s, index, b"") for index in range(3)),
        Seal(s, ""),
        Abort(s, "RefitError", "not really"),
    ]
    if engine.job is not None and engine.job.session.phase is not Phase.COMMIT:
        messages.append(Commit(s))
    return messages


def out_of_turn_to_trainer(network: Network) -> list[FromReceiver]:
    """As above, for what a receiver that is right would not say yet, or not at all."""
    assert network.trainer.job is not None
    session, options = network.trainer.job.session, network.trainer.job.options
    offer = session.offer
    s = offer.session
    messages: list[FromReceiver] = [
        Ready(s, {}, b"", ()),
        Failed(s, "RefitError", "not really", True),
    ]
    due = {Phase.PREPARE: Prepared, Phase.INSTALL: Sealed, Phase.COMMIT: Done}.get(session.phase)
    messages += [kind(s) for kind in (Prepared, Sealed, Done) if kind is not due]
    if options.verify != "none":  # else nobody can tell that a slot was filled too early
        messages += [Loaded(s, index) for index in range(3)]
    return messages
