"""One thing goes wrong, at every step of a refit in turn: all commit the right bytes, or none.

Several things that go wrong in one refit, and every order of events, are for ``test_model``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from itertools import count, product
from typing import Any

import pytest
from forgeries import forgeries, out_of_turn_to_engine, out_of_turn_to_trainer
from simulation.network import Network
from simulation.parties import DEADLINE_S, NAMES, Kind

from rl_core.errors import RefitPeerError, WeightsTornError

pytestmark = pytest.mark.full

ISOLATIONS = ["quiesced", "staged"]
IN_PLACE, CAST = Kind(in_place=True), Kind(casts=True, ties=False)


#: More than a refit here has.
STEPS = 20


def refit_at(
    step: int, isolation: str, kind: Kind, *, trained: Iterable[str] = "abc", **options: Any
) -> Network:
    """Two engines that have weights, so many steps into a refit to others."""
    network = Network(2, kind)
    network.trainer.train(NAMES)
    network.start(bucket_bytes=1024)
    network.settle()
    network.trainer.train(trained)
    network.start(
        **{"verify": "installed", "delta": True, "bucket_bytes": 128, "isolation": isolation}
        | options
    )
    network.settle(step)
    return network


def see_to_the_end(network: Network) -> None:
    """All that must hold, then and later."""
    run(network)
    network.clock.now += DEADLINE_S
    network.look()
    run(network)
    network.assert_recovers(delta=True)


def run(network: Network) -> None:
    network.look()
    while network.step():
        network.assert_whole()
        network.assert_all_or_none()


def engine_dies(network: Network) -> None:
    network.engine_dies(1)


def deadline(network: Network) -> None:
    network.clock.now += DEADLINE_S


def trainer_gives_up(network: Network) -> None:
    if network.trainer.job is not None:
        network.trainer.job.cancelled = "not wanted any more"


def engine_gives_up(network: Network) -> None:
    if network.engines[1].job is not None:
        network.engines[1].job.cancelled = "not wanted any more"


def connection_lost_to_trainer(network: Network) -> None:
    if network.engines[1].job is not None:
        network.trainer.end.gone.append(network.engines[1].end.key)


def connection_lost_to_engine(network: Network) -> None:
    if network.engines[1].job is not None:
        network.engines[1].end.is_lost = True


def all_frames_lost(network: Network) -> None:
    network.up.clear()
    network.down.clear()


def frames_lost_to_one_engine(network: Network) -> None:
    if network.engines[1].job is not None:
        lost = network.engines[1].end.key
        network.down = [(key, frame) for key, frame in network.down if key != lost]


def frames_repeated(network: Network) -> None:
    network.up += network.up
    network.down += network.down


def frames_reversed(network: Network) -> None:
    network.up.reverse()
    network.down.reverse()


def frames_damaged(network: Network) -> None:
    def damaged(frame: bytes) -> bytes:
        return frame[:-1] + bytes([frame[-1] ^ 1])

    network.up = [(key, damaged(frame)) for key, frame in network.up]
    network.down = [(key, damaged(frame)) for key, frame in network.down]


def frame_of_another_session(network: Network) -> None:
    if network.engines[1].job is not None:
        network.down.insert(0, (network.engines[1].end.key, network.seen_down[-1]))


def frame_to_the_trainer_of_another_session(network: Network) -> None:
    if network.engines[1].job is not None and network.seen_up:
        network.up.insert(0, (network.engines[1].end.key, network.seen_up[0]))


def lane_damaged(network: Network) -> None:
    if network.trainer.job is not None and network.lanes[-1].published:
        network.damage(len(network.lanes[-1].published) - 1)


def trained_meanwhile(network: Network) -> None:
    network.trainer.train(["b", "scalar"])


def generation_goes_on(network: Network) -> None:
    network.engines[1].lock.looks = 6


def late_engine(network: Network) -> None:
    network.engine_dies(1)
    network.receive(network.engines[1])


def calls_fail(side: str, *calls: str) -> Callable[[Network], None]:
    def disaster(network: Network) -> None:
        party = network.trainer if side == "trainer" else network.engines[1]
        party.faults.armed |= set(calls)

    disaster.__name__ = f"{'_and_'.join(calls)}_of_{side}"
    return disaster


DISASTERS = [
    engine_dies, Network.trainer_dies,
    deadline, trainer_gives_up, engine_gives_up,
    connection_lost_to_trainer, connection_lost_to_engine,
    all_frames_lost, frames_lost_to_one_engine, frames_repeated, frames_reversed, frames_damaged,
    frame_of_another_session, frame_to_the_trainer_of_another_session,
    lane_damaged, trained_meanwhile, generation_goes_on, late_engine,
    *(calls_fail("trainer", call) for call in ("tensors", "confirm", "lane", "publish")),
    *(calls_fail("engine", call) for call in (
        "begin", "write", "lose a write", "finish", "fail", "read", "commit", "attach", "expect",
        "release",
    )),
    calls_fail("engine", "read", "fail"),
    calls_fail("engine", "finish", "fail"),
    calls_fail("engine", "commit", "fail"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("isolation", "kind"),
    [("quiesced", CAST), ("staged", CAST), ("staged", IN_PLACE)],
    ids=["quiesced, cast", "staged, cast", "staged, in place"],
)
@pytest.mark.parametrize("disaster", DISASTERS, ids=lambda disaster: disaster.__name__)
def test_at_every_step(disaster: Callable[[Network], None], isolation: str, kind: Kind):
    for step in range(STEPS):
        with closing(refit_at(step, isolation, kind)) as network:
            disaster(network)
            see_to_the_end(network)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_refit_has_fewer_steps_than_are_tried(isolation: str):
    with closing(refit_at(STEPS - 1, isolation, IN_PLACE)) as network:
        assert network.trainer.job is None
        assert network.trainer.sender.version == 2


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("side", ["up", "down"])
def test_every_field_of_every_message_with_another_value(side: str, isolation: str):
    """Written by someone who holds the token: the value is of the same type, and wrong."""

    def forge(network: Network, number: int) -> bool:
        queue = {"up": network.up, "down": network.down}[side]
        if not queue:
            return False
        key, frame = queue[0]
        message, again = network.said[frame]
        others = forgeries(message)
        if number < len(others):
            queue[0] = key, again(others[number])
        return number < len(others)

    try_all(forge, isolation)


@pytest.mark.parametrize(
    ("isolation", "verify"),
    [("quiesced", "none"), ("staged", "wire")],
)
def test_every_message_out_of_turn(verify: str, isolation: str):
    """Written by someone who holds the token: to an engine, or in the name of one."""

    def interrupt(network: Network, number: int) -> bool:
        engine = network.engines[1]
        if network.trainer.job is None or engine.job is None:
            return False
        up, down = out_of_turn_to_trainer(network), out_of_turn_to_engine(network, engine)
        frames = [network.to_trainer_by_token(engine, message) for message in up]
        frames += [network.to_engine_by_token(engine, message) for message in down]
        if number < len(up):
            network.to_trainer(frames[number])
            frames_lost_to_one_engine(network)
        elif number < len(frames):
            network.to_engines(frames[number])
        return number < len(frames)

    try_all(interrupt, isolation, verify=verify, delta=False)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_every_frame_of_a_session_before_with_the_same_weights(isolation: str):
    """What was right to say then is of the same plan, digests and version as now."""

    def replay(network: Network, number: int) -> bool:
        to, of = network.engines
        frames = [*dict.fromkeys(network.seen_up), *dict.fromkeys(network.seen_down)]
        if to.job is None or of.job is None or number == len(frames):
            return False
        if frames[number] in network.seen_up:
            network.to_trainer((of.end.key, frames[number]))
        else:
            network.to_engines((to.end.key, frames[number]))
        frames_lost_to_one_engine(network)
        return True

    try_all(replay, isolation, trained=[], delta=False, bucket_bytes=1024, again=True)


def try_all(change: Callable[[Network, int], bool], isolation: str, **options: Any) -> None:
    """Refits in which one thing is changed: in every way that there is, at every step."""
    for step in range(STEPS):
        for number in count():
            with closing(refit_at(step, isolation, IN_PLACE, **options)) as network:
                if not change(network, number):
                    break
                see_to_the_end(network)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("mode", ["packed", "direct"])
def test_frames_keep_their_order_while_an_engine_is_found_to_be_gone(mode: str, lost: int):
    """The trainer has some frames, and more arrive while it learns that it cannot answer one."""
    blamed = []
    for step, cut in product(range(STEPS), range(6)):
        with closing(refit_at(step, "quiesced", IN_PLACE, mode=mode, delta=False)) as network:
            network.to_engines(*network.down)
            for engine in network.engines * 3:
                network.work(engine)
            if network.trainer.job is None or network.engines[lost].job is None:
                break
            key = network.engines[lost].end.key
            network.closed.add(key)
            network.trainer.end.gone.append(key)
            network.trainer.end.later, network.up = network.up[cut:], network.up[:cut]
            network.deliver_up(*([0] * cut))
            network.look()
            blamed += [type(error) for error in network.errors]
    assert blamed
    assert set(blamed) <= {RefitPeerError, WeightsTornError}


@pytest.mark.parametrize("isolation", ["quiesced", "staged"])
@pytest.mark.parametrize("mode", ["packed", "direct"])
@pytest.mark.parametrize("engines", [1, 3])
def test_a_reliable_network_commits_everywhere(engines: int, mode: str, isolation: str):
    with closing(Network(engines)) as network:
        network.trainer.train(NAMES)
        refit = network.start(mode=mode, isolation=isolation, bucket_bytes=64)
        network.settle()
        assert refit.succeeded
        assert not network.errors
        assert all(engine.weights == network.trained() for engine in network.engines)
