"""Several ranks of one trainer: here threads of one process, with a rendezvous of their own."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from simple_pair import BUCKET, SOON, Engine, blank, describe, go, make_tensors, same, until

from rl_backends import PolicyRefits
from rl_backends.ranks import RankProcess
from rl_backends.refit_ranks import RefitRanks, join_ranks
from rl_core.errors import (
    ConfigError,
    LifecycleError,
    ManifestMismatchError,
    RefitAborted,
    RefitError,
    RefitPeerError,
)
from rl_core.futures import spawn, wait
from rl_core.interfaces import Piece, WeightSource, WorkerContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rl_core.interfaces import TensorSpec


class Done:
    def wait(self) -> None:
        pass


class Meeting:
    """What is asked of a process group: an ``allgather``, between threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.given: dict[int, torch.Tensor] = {}

    def of(self, rank: int) -> Any:
        return _Group(self, rank)


class _Group:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._meeting.size

    def allgather(self, parts: Any, sent: Any) -> Done:
        self._meeting.given[self._rank] = sent[0]
        self._meeting.barrier.wait(SOON)
        for rank, part in enumerate(parts[0]):
            part.copy_(self._meeting.given[rank])
        self._meeting.barrier.wait(SOON)  # before anybody gives the next one
        return Done()


class Part(WeightSource):
    """One rank's: its rows of each tensor, by ``torch.tensor_split``; all of a tensor without."""

    def __init__(self, trainer: Rank) -> None:
        self.trainer = trainer
        self.unchanged = trainer.changes.watch()
        self.closed = 0
        trainer.parts.append(self)

    def specs(self) -> Sequence[TensorSpec]:
        return describe(self.trainer.tensors)

    def open(self, number: int, deadline_s: float) -> None:
        self.trainer.at("open")

    def pieces(self) -> list[Piece]:
        self.trainer.at("pieces")
        return [
            Piece(name, box, None if name == "half" else view)
            for name, tensor in self.trainer.tensors.items()
            if (found := self.part(tensor)) is not None
            for box, view in [found]
        ]

    def part(self, tensor: torch.Tensor) -> tuple[Any, torch.Tensor] | None:
        box = [(0, size) for size in tensor.shape]
        if tensor.dim():
            rows = torch.arange(len(tensor)).tensor_split(self.trainer.size)[self.trainer.rank]
            if not len(rows):
                return None
            box[0] = int(rows[0]), int(rows[-1]) + 1
            tensor = tensor[box[0][0] : box[0][1]]
        return tuple(box), tensor

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            self.trainer.at(name)
            found = self.part(self.trainer.tensors[name])
            assert found is not None
            yield name, found[1]

    def confirm(self) -> None:
        self.trainer.at("confirm")
        self.unchanged()

    def close(self) -> None:
        self.closed += 1
        self.trainer.at("close")


class Rank(PolicyRefits):
    """A rank that does nothing but refits. ``at`` runs before what its sources do."""

    get_logprobs = get_reference_policy_logprobs = train = save_checkpoint = None  # type: ignore[assignment]

    def __init__(self, rank: int, size: int, group: Any, tensors: Any) -> None:
        super().__init__(WorkerContext(rank, size))
        self.rank, self.size = rank, size
        self.tensors = tensors
        self.parts: list[Part] = []
        self.at: Callable[[str], Any] = lambda name: None
        if size > 1:
            self.refit_ranks = RefitRanks(group)

    @classmethod
    def from_config(cls, config: Any, *, worker: Any = None) -> Any:
        raise NotImplementedError

    def weight_source(self) -> Part:
        return Part(self)

    def shutdown(self) -> bool:
        self.close_refits()
        return True


Rank.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


class Ranks:
    """A policy of several ranks, as a launcher shows it."""

    def __init__(self, size: int) -> None:
        meeting = Meeting(size)
        tensors = [make_tensors() for _ in range(size)]  # one after another: of one seed
        made = [
            spawn(f"rank {r}", lambda r=r: Rank(r, size, meeting.of(r), tensors[r]))
            for r in range(size)
        ]
        self.ranks: list[Rank] = wait(made, SOON)

    def prepare_refit_info(self) -> dict[str, Any] | None:
        return next(info for rank in self.ranks if (info := rank.prepare_refit_info()))

    def send_weights(self, **options: Any) -> list[Any]:
        return [join_ranks([f for rank in self.ranks for f in rank.send_weights(**options)])]

    def cancel_refit(self, number: int) -> None:
        for rank in self.ranks:
            rank.cancel_refit(number)

    def close(self) -> None:
        for rank in self.ranks:
            rank.shutdown()

    def closed(self) -> list[list[int]]:
        """How often each source was closed, once those that are busy have had time for it."""
        until(lambda: all(part.closed for rank in self.ranks for part in rank.parts), "the close")
        return [[part.closed for part in rank.parts] for rank in self.ranks]


@pytest.fixture(params=[2, 4])
def trainer(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


@pytest.fixture
def engine(keep, trainer: Ranks) -> Engine:
    return keep(Engine(blank(trainer.ranks[0].tensors)))


def test_an_engine_keeps_the_same_in_any_order_of_answers(trainer: Ranks, engine: Engine) -> None:
    for order in itertools.permutations(trainer.ranks[1:]):
        before = None
        for rank in order:
            ready, come = before, threading.Event()

            def at(name: str, ready: Any = ready, come: Any = come) -> None:
                if name == "pieces":
                    assert ready is None or ready.wait(SOON)
                    time.sleep(0.02)  # the answer before this one is under way
                    come.set()

            rank.at, before = at, come
        go(trainer, engine)
    assert len(engine.receiver.connections.buckets) == 1


def test_a_delta_sends_the_parts_that_changed(trainer: Ranks, engine: Engine) -> None:
    go(trainer, engine)
    for rank in trainer.ranks:
        rank.tensors["half"][-1] += 1
    report = go(trainer, engine, delta=True)
    assert report.tensors == 1
    whole = trainer.ranks[0].tensors["half"]
    assert 0 < report.bytes < whole.nbytes  # the rows of the last rank
    assert same(engine.sink.tensor, trainer.ranks[0].tensors)
    assert go(trainer, engine, delta=True).bytes == 0


def test_a_source_whose_refit_never_began_ends_no_other(trainer: Ranks, engine: Engine) -> None:
    packing, go_on = threading.Event(), threading.Event()

    def stop(name: str) -> None:
        if name == "pieces":
            packing.set()
            assert go_on.wait(SOON)

    trainer.ranks[0].at = stop
    refitting = spawn("refit", lambda: go(trainer, engine))
    assert packing.wait(SOON)
    for _ in range(2):  # the second one closes the source of the first
        trainer.prepare_refit_info()
    go_on.set()
    assert wait([refitting], SOON)[0].version == 1
    assert same(engine.sink.tensor, trainer.ranks[0].tensors)


@pytest.mark.parametrize("where", ["open", "pieces", "half", "confirm"])
def test_a_rank_that_fails_is_named_and_the_next_refit_works(
    trainer: Ranks, engine: Engine, where: str
) -> None:
    def fail(name: str) -> None:
        if name == where:
            raise ValueError("out of luck")

    trainer.ranks[-1].at = fail
    with pytest.raises(RefitError, match=r"rank \d of \d .*failed: .*ValueError: out of luck") as e:
        go(trainer, engine)
    assert e.value.details["rank"] == len(trainer.ranks) - 1
    trainer.ranks[-1].at = lambda name: None
    assert trainer.closed() == [[1]] * len(trainer.ranks)
    go(trainer, engine)
    assert same(engine.sink.tensor, trainer.ranks[0].tensors)


@pytest.mark.parametrize("trainer", [2], indirect=True)
@pytest.mark.parametrize("where", ["open", "half", "confirm", "write"])
def test_who_was_busy_itself_until_after_the_deadline_blames_nobody_else(
    trainer: Ranks, engine: Engine, where: str
) -> None:
    go(trainer, engine)
    trainer.ranks[0].at = lambda name: time.sleep(1.8 * (name == where))
    if where == "write":
        engine.sink.on[where] = lambda: time.sleep(1.8 * bool(engine.sink.on.pop(where)))
    engine.prepare_refit_info(trainer.prepare_refit_info())
    sending, _ = (rank.send_weights(deadline_s=1.0)[0] for rank in trainer.ranks)
    [receiving] = engine.receive_weights(deadline_s=1.0)
    error = (receiving if where == "write" else sending).exception(SOON)
    assert isinstance(error, RefitError)
    assert f"own weight {'sink' if where == 'write' else 'source'} kept it busy" in str(error)
    assert error.details.get("rank", 0) == 0


@pytest.mark.parametrize("trainer", [2], indirect=True)
def test_each_thread_that_cannot_be_started_is_an_error_that_leaves_nothing(
    trainer: Ranks, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, left = threading.Thread.start, 0

    def scarce(thread: threading.Thread) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    ends = [engine.receiver, *(rank._sender for rank in trainer.ranks)]
    refused, told = 0, list[str]()
    while left <= 0:
        left = refused = refused + 1
        try:
            go(trainer, engine)
        except RefitError as error:
            told.append(str(error))
        until(lambda: not any(end.jobs for end in ends), "the end of all calls")
        assert all(part.closed == 1 for rank in trainer.ranks for part in rank.parts[:-1])
    assert len(told) >= 2 + len(trainer.ranks)
    assert all("cannot start the thread" in text for text in told)
    left = 0
    go(trainer, engine)
    assert {closed for of_rank in trainer.closed() for closed in of_rank} == {1}
    assert same(engine.sink.tensor, trainer.ranks[0].tensors)


def test_a_source_that_cannot_be_closed_is_an_error(trainer: Ranks, engine: Engine) -> None:
    trainer.ranks[-1].at = lambda name: 1 / (name != "close")
    with pytest.raises(RefitError, match="could not be closed: ZeroDivisionError"):
        go(trainer, engine)
    assert engine.receiver.version == 1
    trainer.ranks[-1].at = lambda name: None
    assert go(trainer, engine).version == 2


def test_what_no_rank_has_is_named_before_anything_is_sent(trainer: Ranks, engine: Engine) -> None:
    last = trainer.ranks[-1]
    last.weight_source = lambda: Lacking(last)  # type: ignore[method-assign]
    with pytest.raises(ManifestMismatchError, match="the trainer has no half"):
        go(trainer, engine)
    assert not engine.receiver.torn


def test_a_piece_that_is_made_is_the_only_one_of_its_tensor(trainer: Ranks, engine: Engine) -> None:
    last = trainer.ranks[-1]
    last.weight_source = lambda: Twice(last)  # type: ignore[method-assign]
    with pytest.raises(ManifestMismatchError, match="half: a piece has no tensor, and there are"):
        go(trainer, engine)
    assert engine.receiver.version == 0


def test_a_call_that_is_refused_leaves_the_refit_that_runs_alone(
    trainer: Ranks, engine: Engine
) -> None:
    first = trainer.ranks[0]
    packing, go_on = threading.Event(), threading.Event()

    def stop(name: str) -> None:
        if name == "half":
            packing.set()
            assert go_on.wait(SOON)

    first.at = stop
    refitting = spawn("refit", lambda: go(trainer, engine))
    assert packing.wait(SOON)
    with pytest.raises(ConfigError):
        first.send_weights(transport=1)
    first.cancel_refit(first._sender.number + 1)
    go_on.set()
    assert wait([refitting], SOON)[0].version == 1
    assert same(engine.sink.tensor, first.tensors)


class Twice(Part):
    """A part with a piece of a tensor that is cut in two, each to be made."""

    def pieces(self) -> list[Piece]:
        found = [piece for piece in super().pieces() if piece.name != "half"]
        return [*found, Piece("half", ((0, 1),), None), Piece("half", ((1, 2),), None)]


class Lacking(Part):
    """A part without its rows of one tensor."""

    def pieces(self) -> list[Piece]:
        return [piece for piece in super().pieces() if piece.name != "half"]


def test_a_part_that_changed_is_a_lifecycle_error(trainer: Ranks, engine: Engine) -> None:
    def changed(name: str) -> None:
        if name == "confirm":
            raise LifecycleError("my part changed", fix="wait")

    trainer.ranks[1].at = changed
    with pytest.raises(LifecycleError, match=r"rank 1 of .*my part changed") as error:
        go(trainer, engine)
    assert error.value.details["phase"] == "SEAL"
    assert error.value.fix == "wait"
    assert trainer.closed() == [[1]] * len(trainer.ranks)


def test_ranks_of_other_weights_are_never_one_model(trainer: Ranks, engine: Engine) -> None:
    go(trainer, engine)
    before = {name: tensor.clone() for name, tensor in engine.sink.tensor.items()}
    for rank in trainer.ranks[:-1]:
        with rank.changes.declared():
            rank.tensors["half"] += 1
    last = len(trainer.ranks) - 1
    match = rf"rank {last} of .* has changed its weights 0 times, rank 0 1 times"
    with pytest.raises(LifecycleError, match=match) as error:
        go(trainer, engine)
    assert error.value.details["rank"] == last
    assert engine.receiver.version == 1
    assert not engine.receiver.torn
    assert same(engine.sink.tensor, before)
    with trainer.ranks[-1].changes.declared():
        trainer.ranks[-1].tensors["half"] += 1
    assert go(trainer, engine).version > 1
    assert same(engine.sink.tensor, trainer.ranks[0].tensors)


def test_a_rank_whose_state_moved_before_the_confirmation_is_seen_there(
    trainer: Ranks, engine: Engine
) -> None:
    rank = trainer.ranks[1]
    rank.at = lambda name: setattr(rank.changes, "state", int(name == "confirm"))
    with pytest.raises(
        LifecycleError, match=r"rank 1 of .* has changed its weights 1 times, .* 0 times"
    ) as error:
        go(trainer, engine)
    assert error.value.details["phase"] == "SEAL"


def test_a_rank_with_torn_weights_is_named(trainer: Ranks, engine: Engine) -> None:
    with pytest.raises(ValueError, match="out of luck"), trainer.ranks[1].changes.declared():
        raise ValueError("out of luck")
    engine.prepare_refit_info(trainer.ranks[0].prepare_refit_info())
    sending = trainer.ranks[0].send_weights(number=1, deadline_s=SOON)
    with pytest.raises(LifecycleError, match="partly old and partly new"):
        trainer.ranks[1].send_weights(number=1, deadline_s=SOON)
    with pytest.raises(LifecycleError, match=r"rank 1 of .*partly old and partly new"):
        wait(sending, SOON)


def test_tickets_are_of_all_ranks(trainer: Ranks, engine: Engine) -> None:
    for version in (1, 2):
        [keys], *_ = [rank.prepare_weights_for_ipc() for rank in trainer.ranks]
        for rank in trainer.ranks:
            with pytest.raises(ConfigError):
                rank.get_weights_ipc_handles(keys[1:])
        ticket, *others = [r.get_weights_ipc_handles(keys, deadline_s=SOON) for r in trainer.ranks]
        assert others == [{}] * len(others)
        assert engine.update_weights(ticket)
        assert engine.receiver.version == version
    go(trainer, engine)
    assert same(engine.sink.tensor, trainer.ranks[0].tensors)


def test_followers_do_nothing_where_rank_0_has_all(keep) -> None:
    rank = Rank.__new__(Rank)
    PolicyRefits.__init__(rank, WorkerContext(1, 2))
    assert rank.prepare_refit_info() is None
    assert rank.send_weights(deadline_s=1) == []
    assert rank.broadcast_weights_for_collective() == []
    assert rank.init_collective("127.0.0.1", 1, 3, train_world_size=2) == []
    with pytest.raises(ConfigError, match="unknown key"):
        rank.send_weights(deadline=1)
    rank.close_refits()


def test_rank_0_that_is_shut_down_ends_those_who_follow(trainer: Ranks) -> None:
    first, *others = trainer.ranks
    following = [rank.send_weights(deadline_s=SOON)[0] for rank in others]
    first.shutdown()
    for future in following:
        with pytest.raises(RefitPeerError, match="rank 0 of") as error:
            future.result(SOON)
        assert error.value.details["rank"] == 0


def test_a_follower_that_is_shut_down_ends_its_part(trainer: Ranks) -> None:
    [following] = trainer.ranks[1].send_weights(deadline_s=SOON)
    trainer.ranks[1].shutdown()
    with pytest.raises(RefitAborted, match="shut down"):
        following.result(SOON)
    assert trainer.ranks[1].parts[0].closed == 1


def test_a_process_is_told_by_what_the_system_says_of_it() -> None:
    import os
    import signal
    import subprocess
    import sys

    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peer = RankProcess(1, 2, process.pid, RankProcess.here(0, 2).host)
    try:
        assert peer.state() == "runs"
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: peer.state() == "stopped")
        assert peer.describe_state() == "does not answer: its process is stopped"
    finally:
        process.kill()
        process.communicate()
    assert peer.state() == "ended"
    assert peer.describe_state() == "has ended"
    assert (
        RankProcess(1, 2, process.pid, "elsewhere").describe_state()
        == "has ended or does not answer"
    )


def test_a_rank_that_is_ahead_takes_the_refit_that_it_waited_for(
    trainer: Ranks, engine: Engine
) -> None:
    first, *others = trainer.ranks
    [superseded] = first.send_weights(number=1, deadline_s=SOON)
    calls = [f for rank in others for f in rank.send_weights(number=2, deadline_s=SOON)]
    jobs = [rank._sender.jobs[0] for rank in others]
    # They know where rank 0 is.
    until(lambda: all(job.session.leader_number for job in jobs))
    calls += first.send_weights(number=2, deadline_s=SOON, bucket_bytes=BUCKET)
    engine.prepare_refit_info(first.prepare_refit_info() | {"number": 2})
    wait([*calls, *engine.receive_weights(deadline_s=SOON)], SOON)
    assert isinstance(superseded.exception(SOON), RefitAborted)
    assert same(engine.sink.tensor, first.tensors)
