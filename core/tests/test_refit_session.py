"""The two state machines against a network that loses, repeats, reorders and damages."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl_core.errors import (
    ManifestMismatchError,
    RefitAborted,
    RefitCorrupted,
    RefitPeerError,
    RefitProtocolError,
    RLError,
    WeightsTornError,
)
from rl_core.refit.messages import (
    PROTOCOL,
    Abort,
    BucketReady,
    Codec,
    Commit,
    Failed,
    FromReceiver,
    FromSender,
    Hello,
    Loaded,
    Offer,
    Prepare,
    Prepared,
    Process,
    Ready,
    Seal,
    Sealed,
)
from rl_core.refit.session import (
    Attach,
    Effect,
    End,
    Install,
    Load,
    MakePlan,
    Pack,
    Phase,
    Publish,
    ReceiverSession,
    Send,
    SenderSession,
    bucket_digest,
    seal_digest,
)

SLOTS = 2
DEADLINE = 60.0
TOKEN = "secret"


def digest(session: str, index: int, data: bytes) -> str:
    return bucket_digest(session, index, [xxhash.xxh3_128_digest(data)])


@dataclass
class Network:
    """Both sides of one refit over shared slots, with every frame in the open."""

    receivers: int
    buckets: int
    session: str = "this"
    now: float = 0.0
    slots: dict[int, bytes] = field(default_factory=dict)
    to_sender: list[tuple[str, bytes]] = field(default_factory=list)
    to_receiver: list[tuple[str, bytes]] = field(default_factory=list)
    seen_by_sender: list[tuple[str, bytes]] = field(default_factory=list)
    seen_by_receiver: list[tuple[str, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.up = Codec[FromReceiver](FromReceiver, TOKEN)
        self.down = Codec[FromSender](FromSender, TOKEN)
        offer = Offer(self.session, PROTOCOL, "trainer", 1, "manifest", "wire", "quiesced")
        self.sender = SenderSession(
            offer, receivers=self.receivers, deadline_s=DEADLINE, clock=self.clock
        )
        self.receiver = {f"r{i}": self._receiver(f"r{i}") for i in range(self.receivers)}
        self.stored: dict[str, dict[int, bytes]] = {key: {} for key in self.receiver}
        self.served: set[str] = set()
        for key, receiver in self.receiver.items():
            self.at_receiver(key, receiver.start())

    def clock(self) -> float:
        return self.now

    def data(self, index: int) -> bytes:
        return f"{self.session} bucket {index}".encode()

    def _receiver(self, key: str) -> ReceiverSession:
        return ReceiverSession(
            Hello(PROTOCOL, key, "engine", Process(1, "", "")),
            manifest="manifest",
            dtypes={},
            deadline_s=DEADLINE,
            clock=self.clock,
        )

    def at_sender(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message, to):
                    for key in self.sender.peers if to is None else [to]:
                        self.to_receiver.append((key, self.down.encode(message)))
                case MakePlan():
                    self.at_sender(self.sender.planned(self._prepare()))
                case Pack(index):
                    self.slots[index % SLOTS] = self.data(index)
                    code = digest(self.session, index, self.data(index))
                    self.at_sender(self.sender.packed(index, code))
                case End(phase):
                    assert phase.terminal

    def _prepare(self) -> Prepare:
        return Prepare(self.session, "plan", 64, self.buckets, SLOTS, 64, None, DEADLINE)

    def at_receiver(self, key: str, effects: list[Effect]) -> None:
        receiver = self.receiver[key]
        for effect in effects:
            match effect:
                case Send(message):
                    self.to_sender.append((key, self.up.encode(message)))
                case Attach(prepare):
                    self.at_receiver(key, receiver.attached(prepare.plan))
                case Load(index, code):
                    data = self.slots[index % SLOTS]
                    if digest(self.session, index, data) != code:
                        self.at_receiver(key, receiver.fail(RefitCorrupted("bucket")))
                        continue
                    receiver.touch()
                    self.stored[key][index] = data
                    self.at_receiver(key, receiver.loaded(index))
                case Install():
                    self.at_receiver(key, receiver.installed())
                case Publish(version):
                    assert version == 1
                    self.served.add(key)
                    self.at_receiver(key, receiver.published())

    def deliver_up(self, position: int) -> None:
        key, frame = self.to_sender.pop(position % len(self.to_sender))
        self.seen_by_sender.append((key, frame))
        try:
            effects = self.sender.receive(key, self.up.decode(frame))
        except RefitProtocolError as error:
            effects = self.sender.corrupted(key, error)
        self.at_sender(effects)

    def deliver_down(self, position: int) -> None:
        key, frame = self.to_receiver.pop(position % len(self.to_receiver))
        self.seen_by_receiver.append((key, frame))
        receiver = self.receiver[key]
        try:
            effects = receiver.receive(self.down.decode(frame))
        except RefitProtocolError as error:
            effects = receiver.fail(error)
        self.at_receiver(key, effects)

    def deliver_one(self) -> None:
        """Delivers the oldest frame to the sender, else the oldest to a receiver."""
        if self.to_sender:
            self.deliver_up(0)
        elif self.to_receiver:
            self.deliver_down(0)

    def settle(self, steps: int = 1000) -> None:
        """Delivers in order until nothing moves."""
        while steps and (self.to_sender or self.to_receiver):
            steps -= 1
            if self.to_sender:
                self.deliver_up(0)
            if self.to_receiver:
                self.deliver_down(0)

    def tick(self) -> None:
        self.at_sender(self.sender.tick())
        for key, receiver in self.receiver.items():
            self.at_receiver(key, receiver.tick())

    @property
    def sessions(self) -> list[SenderSession | ReceiverSession]:
        return [self.sender, *self.receiver.values()]


class Unreliable(RuleBasedStateMachine):
    """Anything may happen to any frame and any process, in any order."""

    @initialize(receivers=st.integers(1, 3), buckets=st.integers(0, 4), progress=st.integers(0, 40))
    def begin(self, receivers: int, buckets: int, progress: int) -> None:
        earlier = Network(receivers, buckets, session="earlier")
        earlier.settle()
        self.network = Network(receivers, buckets)
        self.network.seen_by_sender += earlier.seen_by_sender
        self.network.seen_by_receiver += earlier.seen_by_receiver
        for _ in range(progress):
            self.network.deliver_one()

    @rule(steps=st.integers(1, 30))
    def all_is_well_for_a_while(self, steps: int) -> None:
        self.network.settle(steps)

    @precondition(lambda self: self.network.to_sender)
    @rule(position=st.integers(0, 50), repeat=st.booleans())
    def a_frame_overtakes_to_the_sender(self, position: int, repeat: bool) -> None:
        position %= len(self.network.to_sender)
        if repeat:
            self.network.to_sender.append(self.network.to_sender[position])
        self.network.deliver_up(position)

    @precondition(lambda self: self.network.to_receiver)
    @rule(position=st.integers(0, 50), repeat=st.booleans())
    def a_frame_overtakes_to_a_receiver(self, position: int, repeat: bool) -> None:
        position %= len(self.network.to_receiver)
        if repeat:
            self.network.to_receiver.append(self.network.to_receiver[position])
        self.network.deliver_down(position)

    @rule(data=st.data())
    def a_frame_is_lost(self, data: st.DataObject) -> None:
        queue = data.draw(st.sampled_from([self.network.to_sender, self.network.to_receiver]))
        if queue:
            queue.pop(data.draw(st.integers(0, len(queue) - 1)))

    @rule(data=st.data())
    def a_frame_is_damaged(self, data: st.DataObject) -> None:
        queue = data.draw(st.sampled_from([self.network.to_sender, self.network.to_receiver]))
        if queue:
            at = data.draw(st.integers(0, len(queue) - 1))
            key, frame = queue[at]
            byte = data.draw(st.integers(0, len(frame) - 1))
            queue[at] = key, frame[:byte] + bytes([frame[byte] ^ 1]) + frame[byte + 1 :]

    @rule(data=st.data(), up=st.booleans())
    def an_old_frame_is_replayed(self, data: st.DataObject, up: bool) -> None:
        network = self.network
        seen = network.seen_by_sender if up else network.seen_by_receiver
        if seen:
            queue = network.to_sender if up else network.to_receiver
            queue.insert(0, data.draw(st.sampled_from(seen)))
            (network.deliver_up if up else network.deliver_down)(0)

    @precondition(lambda self: self.network.slots)
    @rule(data=st.data())
    def a_slot_is_damaged(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.network.slots)))
        self.network.slots[slot] = b"damaged " + self.network.slots[slot]

    @rule(data=st.data())
    def a_receiver_dies(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.network.receiver)))
        self.network.at_sender(self.network.sender.lost(key, "died"))

    @rule()
    def the_sender_dies(self) -> None:
        for key, receiver in self.network.receiver.items():
            self.network.at_receiver(key, receiver.lost("died"))

    @rule(seconds=st.sampled_from([0.1, 1.0, DEADLINE / 2]))
    def time_passes(self, seconds: float) -> None:
        self.network.now += seconds
        self.network.tick()

    @invariant()
    def only_right_and_complete_bytes_are_committed(self) -> None:
        network = self.network
        right = {index: network.data(index) for index in range(network.buckets)}
        for key, receiver in network.receiver.items():
            if receiver.phase is Phase.COMMITTED or key in network.served:
                assert network.stored[key] == right

    @invariant()
    def aborted_means_that_nothing_was_written(self) -> None:
        for key, receiver in self.network.receiver.items():
            assert receiver.phase is not Phase.ABORTED or not self.network.stored[key]

    @invariant()
    def no_receiver_serves_unless_all_are_sealed(self) -> None:
        network = self.network
        if network.served:
            assert network.sender.phase in (Phase.COMMIT, Phase.COMMITTED)
            assert all(network.stored[key] == network.stored[min(network.served)]
                       for key in network.receiver)  # fmt: skip

    @invariant()
    def success_means_that_all_serve(self) -> None:
        network = self.network
        if network.sender.phase is Phase.COMMITTED and network.sender.error is None:
            assert network.served == set(network.receiver)

    @invariant()
    def failure_always_has_a_typed_error_with_its_phase(self) -> None:
        for session in self.network.sessions:
            if session.phase in (Phase.ABORTED, Phase.TORN):
                assert isinstance(session.error, RLError)
                assert session.error.details["phase"]

    def teardown(self) -> None:
        self.network.now += 2 * DEADLINE
        self.network.tick()
        assert all(session.phase.terminal for session in self.network.sessions)


Unreliable.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestUnreliableNetwork = Unreliable.TestCase


@pytest.mark.parametrize("receivers", [1, 3])
@pytest.mark.parametrize("buckets", [0, 1, 2, 7])
def test_a_reliable_network_commits_everywhere(receivers: int, buckets: int):
    network = Network(receivers, buckets)
    network.settle()
    assert [session.phase for session in network.sessions] == [Phase.COMMITTED] * (receivers + 1)
    assert all(session.error is None for session in network.sessions)


def in_transfer(receivers: int = 1) -> Network:
    """A network right after every receiver has loaded its first bucket."""
    network = Network(receivers, buckets=9)
    while not all(network.stored.values()):
        network.settle(1)
    return network


def test_a_damaged_bucket_is_found_before_it_is_written():
    network = Network(1, buckets=2)
    while not network.slots:
        network.deliver_one()
    network.slots = dict.fromkeys(network.slots, b"damaged")
    network.settle()
    assert network.receiver["r0"].phase is Phase.ABORTED
    assert isinstance(network.sender.error, RefitCorrupted)
    assert not network.stored["r0"]


def test_a_death_in_transfer_tears_the_others_and_names_the_dead():
    network = in_transfer(receivers=2)
    network.at_sender(network.sender.lost("r0", "died"))
    network.settle()
    assert network.sender.phase is Phase.TORN
    assert "receiver 0" in network.sender.error.peer
    assert network.sender.error.phase == "TRANSFER"
    assert network.receiver["r1"].phase is Phase.TORN
    assert isinstance(network.receiver["r1"].error, WeightsTornError)


def test_a_failure_before_the_first_write_leaves_the_old_weights():
    network = Network(1, buckets=2)
    while network.sender.phase is not Phase.PREPARE:
        network.settle(1)
    network.at_sender(network.sender.fail(ValueError("no memory")))
    network.settle()
    assert network.sender.phase is Phase.ABORTED
    assert isinstance(network.receiver["r0"].error, RefitAborted)
    assert "no memory" in str(network.receiver["r0"].error)


def test_silence_ends_in_an_error_that_names_who_was_awaited():
    network = Network(2, buckets=1)
    network.to_sender = [frame for frame in network.to_sender if frame[0] == "r0"]
    network.settle()
    network.now += DEADLINE
    network.tick()
    assert isinstance(network.sender.error, RefitPeerError)
    assert "1 of 2 receivers" in str(network.sender.error)
    assert network.sender.error.phase == "DISCOVER"


def test_hello_is_said_again_until_there_is_an_offer():
    network = Network(1, buckets=1)
    network.to_sender.clear()
    network.now += 1
    network.tick()
    network.settle()
    assert network.sender.phase is Phase.COMMITTED


def test_a_receiver_too_many_is_refused_and_does_no_harm():
    network = Network(1, buckets=1)
    extra = network.receiver["r1"] = network._receiver("r1")
    network.stored["r1"] = {}
    network.at_receiver("r1", extra.start())
    network.settle()
    assert network.sender.phase is Phase.COMMITTED
    assert isinstance(extra.error, RefitAborted)


def test_a_receiver_that_comes_again_before_it_was_ready_takes_its_own_place():
    network = Network(1, buckets=1)
    hello = Hello(PROTOCOL, "r0", "engine", Process(1, "", ""))
    network.sender.receive("gone", hello)
    network.settle()
    assert network.sender.phase is Phase.COMMITTED


def test_receivers_that_want_different_dtypes_are_refused():
    network = Network(2, buckets=1)
    network.receiver["r1"]._dtypes = {"w": "bfloat16"}
    network.settle()
    assert isinstance(network.sender.error, ManifestMismatchError)
    assert all(receiver.phase is Phase.ABORTED for receiver in network.receiver.values())


def test_another_manifest_aborts_before_anything_is_prepared():
    network = Network(1, buckets=1)
    network.receiver["r0"]._manifest = "older"
    network.settle()
    assert network.receiver["r0"].phase is Phase.ABORTED
    assert network.sender.phase is Phase.ABORTED


def test_a_loss_after_commit_is_reported_and_the_version_counts():
    network = Network(2, buckets=1)
    while network.sender.phase is not Phase.COMMIT:
        network.settle(1)
    network.at_sender(network.sender.lost("r1", "died"))
    network.settle()
    assert network.sender.phase is Phase.COMMITTED
    assert isinstance(network.sender.error, RefitPeerError)
    assert network.served


OUT_OF_TURN = {
    Phase.DISCOVER: [Prepared("this", "plan"), Loaded("this", 0), Sealed("this", "")],
    Phase.PREPARE: [Ready("this", "manifest", {}), Loaded("this", 0), Prepared("this", "other")],
    Phase.TRANSFER: [Prepared("this", "plan"), Loaded("this", 8), Loaded("other", 0)],
}


@pytest.mark.parametrize(
    ("phase", "message"), [(p, m) for p, messages in OUT_OF_TURN.items() for m in messages]
)
def test_the_sender_fails_on_a_message_out_of_turn(phase: Phase, message: object):
    network = Network(1, buckets=9)
    while network.sender.phase is not phase or not network.sender.peers:
        network.settle(1)
    network.at_sender(network.sender.receive("r0", message))
    assert isinstance(network.sender.error, RefitProtocolError)


@pytest.mark.parametrize(
    "message",
    [
        BucketReady("this", 5, ""),
        Seal("this", seal_digest("this", [])),
        Commit("this", 1),
        Offer("this", PROTOCOL, "trainer", 2, "manifest", "wire", "quiesced"),
        Commit("other", 1),
        Abort("other", "RefitError", "not ours"),
    ],
)
def test_a_receiver_is_torn_by_a_message_out_of_turn_in_transfer(message: object):
    network = in_transfer()
    network.at_receiver("r0", network.receiver["r0"].receive(message))
    assert network.receiver["r0"].phase is Phase.TORN
    assert isinstance(network.receiver["r0"].error, RefitProtocolError)


def test_a_seal_before_the_last_bucket_is_refused():
    network = in_transfer()
    receiver = network.receiver["r0"]
    network.at_receiver(
        "r0", receiver.receive(Seal("this", seal_digest("this", receiver._digests)))
    )
    assert receiver.phase is Phase.TORN
    assert not network.served


def sealed(receivers: int = 1) -> Network:
    """A network right after the first receiver was sealed."""
    network = Network(receivers, buckets=1)
    while network.receiver["r0"].phase is not Phase.COMMIT:
        network.deliver_one()
    return network


@pytest.mark.parametrize("commit", [Commit("earlier", 1), Commit("this", 2)])
def test_a_commit_of_another_refit_commits_nothing(commit: Commit):
    network = sealed()
    network.at_receiver("r0", network.receiver["r0"].receive(commit))
    assert network.receiver["r0"].phase is Phase.TORN
    assert not network.served


def test_nobody_commits_before_the_last_receiver_is_sealed():
    network = sealed(receivers=2)
    network.to_receiver = [frame for frame in network.to_receiver if frame[0] != "r1"]
    network.settle()
    assert network.sender.phase is Phase.SEAL
    assert not network.served


def test_a_receiver_sealed_on_other_bytes_stops_the_commit():
    network = sealed()
    network.to_sender.clear()
    network.at_sender(network.sender.receive("r0", Sealed("this", "other")))
    network.settle()
    assert isinstance(network.sender.error, RefitProtocolError)
    assert not network.served


@pytest.mark.parametrize("kind", ["RefitCorrupted", "ManifestMismatchError"])
def test_a_receivers_error_arrives_as_one_of_its_class(kind: str):
    network = in_transfer()
    failed = Failed("this", kind, "what happened", True)
    network.at_sender(network.sender.receive("r0", failed))
    assert type(network.sender.error).__name__ == kind
    assert "what happened" in str(network.sender.error)
    assert "receiver 0" in network.sender.error.peer


def test_an_unknown_error_class_arrives_as_a_peer_error():
    network = in_transfer()
    network.at_sender(network.sender.receive("r0", Failed("this", "Exception", "boom", True)))
    assert type(network.sender.error) is RefitPeerError
