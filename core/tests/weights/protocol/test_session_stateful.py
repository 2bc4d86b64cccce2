"""Whatever the network, the processes and their backends do: all commit the right bytes, or none.

The invariants are about bytes. They hold after every step of any history that Hypothesis finds.
"""

from __future__ import annotations

import pytest
from forgeries import forgeries, out_of_turn_to_engine, out_of_turn_to_trainer
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulation.network import Network
from simulation.parties import DEADLINE_S, NAMES, Engine, Kind

pytestmark = pytest.mark.concerns("core/")

KINDS = st.builds(Kind, st.booleans(), st.booleans(), st.booleans())
SUBSETS = st.sets(st.sampled_from(NAMES))
POSITIONS = st.integers(0, 50)
CALLS = [
    ("trainer", call) for call in ("tensors", "confirm", "lane", "publish")
] + [
    ("engine", call)
    for call in (
        "begin", "write", "finish", "fail", "read", "commit", "attach", "expect", "release",
    )
]  # fmt: skip
ARMED = st.just(set()) | st.sets(st.sampled_from(CALLS), min_size=1, max_size=2)
NUMBERS = st.integers(0, 2)


@st.composite
def options(draw: st.DrawFn) -> dict[str, object]:
    verify = draw(st.sampled_from(["wire", "wire", "installed", "none"]))
    return {
        "verify": verify,
        "isolation": draw(st.sampled_from(["quiesced", "staged"])),
        "mode": draw(st.sampled_from(["packed", "auto"])),
        "delta": verify != "none" and draw(st.booleans()),
        "bucket_bytes": draw(st.sampled_from([64, 128, 192, 1024])),
    }


class Hostile(RuleBasedStateMachine):
    """Refits one after another among the same trainer and engines; anything may go wrong."""

    network: Network

    @initialize(engines=st.integers(1, 3), kind=KINDS, trained=SUBSETS)
    def begin(self, engines: int, kind: Kind, trained: set[str]) -> None:
        self.network = Network(engines, kind)
        self.network.trainer.train(trained)

    # -- what is meant to happen ------------------------------------------------------------------

    @precondition(lambda self: self.network.trainer.job is None)
    @rule(chosen=options(), names=SUBSETS, back=st.integers(0, 3), again=st.booleans(),
          armed=ARMED, number=NUMBERS, progress=st.integers(0, 50))  # fmt: skip
    def a_refit_begins(
        self,
        chosen: dict[str, object],
        names: set[str],
        back: int,
        again: bool,
        armed: set[tuple[str, str]],
        number: int,
        progress: int,
    ) -> None:
        """With calls that will fail, perhaps, and up to where something else happens."""
        network = self.network
        if again and network.trainer.sender.committed is not None and chosen["verify"] != "none":
            chosen["again"] = True
        else:
            network.trainer.train(names, back=back)
        for side, call in armed:
            party = network.trainer if side == "trainer" else self.engine(number)
            party.faults.armed.add(call)
        network.start(**chosen)
        network.settle(progress)

    @precondition(lambda self: self.active)
    @rule(steps=st.integers(1, 60))
    def all_is_well_for_a_while(self, steps: int) -> None:
        self.network.settle(steps)

    @precondition(lambda self: self.active)
    @rule(seconds=st.sampled_from([1.0, DEADLINE_S / 2, DEADLINE_S]))
    def time_passes(self, seconds: float) -> None:
        self.network.clock.now += seconds
        self.network.look()

    @precondition(lambda self: self.network.trainer.job)
    @rule(names=SUBSETS)
    def the_trainer_trains_meanwhile(self, names: set[str]) -> None:
        self.network.trainer.train(names)

    @precondition(lambda self: self.network.trainer.job)
    @rule(number=NUMBERS)
    def an_engine_tries_again(self, number: int) -> None:
        self.network.receive(self.engine(number))

    @precondition(lambda self: self.active)
    @rule(number=NUMBERS, trainer=st.booleans())
    def a_side_gives_up(self, number: int, trainer: bool) -> None:
        job = (self.network.trainer if trainer else self.engine(number)).job
        if job is not None:
            job.cancelled = "not wanted any more"
            self.network.look()

    def engine(self, number: int) -> Engine:
        return self.network.engines[number % len(self.network.engines)]

    @property
    def active(self) -> bool:
        """A refit is going on, on one side at least."""
        return bool(self.network.trainer.job or any(e.job for e in self.network.engines))

    # -- what the network does --------------------------------------------------------------------

    @precondition(lambda self: self.network.up and self.network.trainer.job)
    @rule(positions=st.lists(POSITIONS, min_size=1, max_size=3), repeat=st.booleans())
    def frames_overtake_others_to_the_trainer(self, positions: list[int], repeat: bool) -> None:
        if repeat:
            self.network.up.append(self.network.up[positions[0] % len(self.network.up)])
        self.network.deliver_up(*positions)

    @precondition(lambda self: self.network.down)
    @rule(positions=st.lists(POSITIONS, min_size=1, max_size=3), repeat=st.booleans())
    def frames_overtake_others_to_the_engines(self, positions: list[int], repeat: bool) -> None:
        if repeat:
            self.network.down.append(self.network.down[positions[0] % len(self.network.down)])
        self.network.deliver_down(*positions)

    @precondition(lambda self: self.network.up or self.network.down)
    @rule(position=POSITIONS)
    def a_frame_is_lost(self, position: int) -> None:
        queue = self.network.up if position % 2 and self.network.up else self.network.down
        if queue:
            queue.pop(position // 2 % len(queue))

    @precondition(lambda self: self.network.up or self.network.down)
    @rule(position=POSITIONS, byte=st.integers(0, 10**4), bit=st.integers(0, 7))
    def a_frame_is_damaged(self, position: int, byte: int, bit: int) -> None:
        queue = self.network.up if position % 2 and self.network.up else self.network.down
        if queue:
            at = position // 2 % len(queue)
            key, frame = queue[at]
            damaged = bytearray(frame)
            damaged[byte % len(frame)] ^= 1 << bit
            queue[at] = key, bytes(damaged)

    @rule(position=POSITIONS, number=NUMBERS, up=st.booleans())
    def an_old_frame_is_replayed(self, position: int, number: int, up: bool) -> None:
        network = self.network
        engine = self.engine(number)
        seen = network.seen_up if up else network.seen_down
        if seen and engine.job is not None:
            frame = engine.end.key, seen[position % len(seen)]
            (network.to_trainer if up else network.to_engines)(frame)

    @precondition(lambda self: self.may_be_forged)
    @rule(data=st.data(), position=POSITIONS)
    def a_field_has_another_value(self, data: st.DataObject, position: int) -> None:
        """By whoever holds the token: once a refit, and of the same type."""
        network = self.network
        up = bool(position % 2 and network.up)
        queue = network.up if up else network.down
        if not queue:
            return
        at = position // 2 % len(queue)
        key, frame = queue[at]
        if frame not in network.said:  # it was damaged before
            return
        message, again = network.said[frame]
        queue[at] = key, again(data.draw(st.sampled_from(forgeries(message))))
        network.refit.forged = True

    @precondition(lambda self: self.network.trainer.job and not self.network.refit.forged)
    @rule(data=st.data(), number=NUMBERS, up=st.booleans())
    def a_message_comes_out_of_turn(self, data: st.DataObject, number: int, up: bool) -> None:
        """By whoever holds the token, as above."""
        network, engine = self.network, self.engine(number)
        if engine.job is None:
            return
        others = out_of_turn_to_trainer(network) if up else out_of_turn_to_engine(network, engine)
        sign = network.to_trainer_by_token if up else network.to_engine_by_token
        frame = sign(engine, data.draw(st.sampled_from(others)))
        network.refit.forged = True
        (network.to_trainer if up else network.to_engines)(frame)

    @property
    def may_be_forged(self) -> bool:
        return self.verify != "none" and not self.network.refit.forged

    @precondition(lambda self: self.verify != "none")
    @precondition(lambda self: self.network.lanes and self.network.lanes[-1].published)
    @rule(position=st.integers(0, 10**4))
    def a_byte_is_damaged_in_the_lane(self, position: int) -> None:
        self.network.damage(position)

    @property
    def verify(self) -> str:
        """What the refit that is going on verifies; nothing if there is none."""
        return "none" if self.network.refit is None else self.network.refit.options.verify

    # -- what the processes do --------------------------------------------------------------------

    @precondition(lambda self: self.active)
    @rule(number=NUMBERS)
    def an_engine_dies(self, number: int) -> None:
        self.network.engine_dies(number % len(self.network.engines))

    @precondition(lambda self: self.network.trainer.job)
    @rule()
    def the_trainer_dies(self) -> None:
        self.network.trainer_dies()

    @precondition(lambda self: self.active)
    @rule(number=NUMBERS, seen_by_trainer=st.booleans(), seen_by_engine=st.booleans())
    def a_connection_breaks(self, number: int, seen_by_trainer: bool, seen_by_engine: bool) -> None:
        engine = self.engine(number)
        if engine.job is not None:
            engine.end.is_lost = seen_by_engine
            if seen_by_trainer:
                self.network.trainer.end.gone.append(engine.end.key)

    @precondition(lambda self: self.verify == "installed")
    @rule(number=NUMBERS)
    def a_write_will_be_dropped(self, number: int) -> None:
        """An engine's fault that only ``verify="installed"`` is there to find."""
        engine = self.engine(number)
        if engine.job is not None:
            engine.faults.armed.add("lose a write")

    @precondition(lambda self: self.active)
    @rule(number=NUMBERS, looks=st.integers(1, 6))
    def generation_goes_on(self, number: int, looks: int) -> None:
        self.engine(number).lock.looks = looks

    # -- what must hold ---------------------------------------------------------------------------

    @invariant()
    def an_engine_that_may_generate_has_the_weights_of_its_version(self) -> None:
        self.network.assert_whole()

    @invariant()
    def all_publish_or_none(self) -> None:
        self.network.assert_all_or_none()

    def teardown(self) -> None:
        if hasattr(self, "network"):
            try:
                self.network.assert_recovers(delta=True)
                self.network.assert_recovers(delta=False)
            finally:
                self.network.close()


def at_length(examples: int, *, derandomize: bool) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=60,
        deadline=None,
        derandomize=derandomize,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


class TestHostile(Hostile.TestCase):
    settings = at_length(60, derandomize=True)


@pytest.mark.full
class TestHostileAtLength(Hostile.TestCase):
    settings = at_length(1000, derandomize=False)
