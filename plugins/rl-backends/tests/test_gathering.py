"""Several ranks of one trainer: here threads of one process, with a rendezvous of their own."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from simple_pair import BUCKET, SOON, Engine, blank, describe, go, make_tensors, same

from rl_backends import PolicyRefits
from rl_backends.gathering import GatheredSource, RefitRanks, messages
from rl_backends.gathering.leader import Leader
from rl_backends.gathering.processes import RankProcess, join_ranks
from rl_backends.gathering.thread import RefitThread
from rl_core.errors import (
    ConfigError,
    LifecycleError,
    ManifestMismatchError,
    RefitAborted,
    RefitError,
    RefitPeerError,
)
from rl_core.futures import spawn, wait
from rl_core.interfaces import WorkerContext

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


class Part(GatheredSource):
    """One rank's; a gather is a barrier of all ranks, and the tensor is rank 0's."""

    def __init__(self, trainer: Rank) -> None:
        super().__init__(trainer.refit_ranks, trainer.changes)
        self.trainer = trainer
        self.names: list[str] = []
        self.closed = 0
        trainer.parts.append(self)

    def specs(self) -> Sequence[TensorSpec]:
        return describe(self.trainer.tensors)

    def gather(self, name: str) -> torch.Tensor | None:
        self.names.append(name)
        self.trainer.at(name)
        self.trainer.collective.wait(SOON)
        return self.trainer.tensors[name] if self.trainer.rank == 0 else None

    def confirm_part(self) -> None:
        self.trainer.at("confirm")
        super().confirm_part()

    def close_part(self) -> None:
        self.closed += 1


class Rank(PolicyRefits):
    """A rank that does nothing but refits. ``at`` runs before each of its gathers."""

    get_logprobs = get_reference_policy_logprobs = train = save_checkpoint = None  # type: ignore[assignment]

    def __init__(self, rank: int, size: int, group: Any, collective: threading.Barrier) -> None:
        super().__init__(WorkerContext(rank, size))
        self.rank, self.collective = rank, collective
        self.tensors = make_tensors()
        self.parts: list[Part] = []
        self.at: Callable[[str], Any] = lambda name: None
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
        meeting, collective = Meeting(size), threading.Barrier(size)
        made = [
            spawn(f"rank {r}", lambda r=r: Rank(r, size, meeting.of(r), collective))
            for r in range(size)
        ]
        self.ranks: list[Rank] = wait(made, SOON)

    def prepare_refit_info(self) -> dict[str, Any] | None:
        return next(info for rank in self.ranks if (info := rank.prepare_refit_info()))

    def send_weights(self, **options: Any) -> list[Any]:
        return [join_ranks([f for rank in self.ranks for f in rank.send_weights(**options)])]

    def close(self) -> None:
        for rank in self.ranks:
            rank.shutdown()

    def closed(self) -> list[list[int]]:
        """How often each source was closed, once those that are busy have had time for it."""
        end = time.monotonic() + SOON
        while True:
            counts = [[part.closed for part in rank.parts] for rank in self.ranks]
            if all(all(rank) for rank in counts) or time.monotonic() > end:
                return counts
            time.sleep(0.01)


@pytest.fixture(params=[2, 4])
def trainer(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    for rank in ranks.ranks:
        rank.collective.abort()
    ranks.close()


@pytest.fixture
def engine(keep, trainer: Ranks) -> Engine:
    return keep(Engine(blank(trainer.ranks[0].tensors)))


def test_all_ranks_gather_the_same_names_in_the_same_order(trainer: Ranks, engine: Engine) -> None:
    for options in ({}, {"verify": "installed"}, {"isolation": "staged"}):
        go(trainer, engine, **options)
        assert same(engine.sink.tensor, trainer.ranks[0].tensors)
        first, *others = [rank.parts[-1].names for rank in trainer.ranks]
        assert first
        assert all(names == first for names in others)
    assert trainer.closed() == [[1, 1, 1]] * len(trainer.ranks)


def test_what_a_delta_skips_is_skipped_on_all_ranks(trainer: Ranks, engine: Engine) -> None:
    go(trainer, engine)
    for rank in trainer.ranks:
        rank.tensors["half"] += 1
    report = go(trainer, engine, delta=True)
    assert report.tensors == 1
    first, *others = [rank.parts[-1].names for rank in trainer.ranks]
    assert first[-1] == "half"
    assert first.count("half") == 2  # to compare it, and to send it
    assert all(names == first for names in others)


def test_a_source_whose_refit_never_began_ends_no_other(trainer: Ranks, engine: Engine) -> None:
    gathering, go_on = threading.Event(), threading.Event()

    def stop(name: str) -> None:
        gathering.set()
        assert go_on.wait(SOON)

    trainer.ranks[0].at = stop
    refitting = spawn("refit", lambda: go(trainer, engine))
    assert gathering.wait(SOON)
    for _ in range(2):  # the second one closes the source of the first
        trainer.prepare_refit_info()
    go_on.set()
    assert wait([refitting], SOON)[0].version == 1
    assert same(engine.sink.tensor, trainer.ranks[0].tensors)


def test_a_follower_that_fails_to_gather_is_named_and_later_refits_are_refused(
    trainer: Ranks, engine: Engine
) -> None:
    def fail(name: str) -> None:
        if name == "half":
            for rank in trainer.ranks:
                rank.collective.abort()
            raise ValueError("out of luck")

    trainer.ranks[-1].at = fail
    with pytest.raises(RefitError, match=r"rank \d of \d .*failed: (ValueError|Broken)") as e:
        go(trainer, engine)
    assert e.value.details["rank"] > 0
    trainer.ranks[-1].at = lambda name: None
    counts = trainer.closed()
    assert counts == [[1]] * len(trainer.ranks)
    trainer.ranks[0].collective.reset()
    with pytest.raises(RefitError, match="may no longer match") as e:
        go(trainer, engine)
    assert "build the policy again" in (e.value.fix or "")


def test_a_follower_that_is_out_of_step_alone_says_so_before_rank_0_gathers(
    trainer: Ranks, engine: Engine
) -> None:
    follower = trainer.ranks[-1].refit_ranks
    assert follower is not None
    follower.thread.collectives_diverged = "half: of a refit that rank 0 gave up"
    rank = follower.rank
    with pytest.raises(RefitPeerError, match=rf"rank {rank} of .*may no longer match"):
        go(trainer, engine, deadline_s=5)
    assert trainer.ranks[0].parts[-1].names == []  # it would hang, with nobody to end it


def test_a_gather_that_failed_after_its_refit_was_given_up_is_remembered() -> None:
    class Server:
        """A ``ControlServer`` that brings what it was given."""

        def __init__(self) -> None:
            self.frames: list[tuple[str, bytes]] = []

        def receive(self, timeout_s: float) -> list[tuple[str, bytes]]:
            frames, self.frames = self.frames, []
            return frames

        def send(self, key: str, frame: bytes) -> bool:
            return True

        def departed(self) -> list[str]:
            return []

        def close(self) -> None:
            pass

    server, thread = Server(), RefitThread()
    leader = Leader(server, [RankProcess.here(rank, 2) for rank in range(2)], thread)  # type: ignore[arg-type]
    try:
        leader.open(1, SOON, 0, "")
        server.frames = [("follower", messages.encode(messages.RankHello(1, 1)))]
        leader.look()
        leader.dismiss(1)
        failed = messages.RankFailed("ValueError", "out of luck", collectives_diverged=True)
        server.frames = [("follower", messages.encode(failed))]
        leader.open(2, SOON, 0, "")
        leader.look()
        with pytest.raises(RefitError, match="out of luck"):
            thread.check_in_sync()
    finally:
        leader.end()
        thread.close()


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
    match = rf"rank {last} of .* is at step or load number 0, rank 0 at 1"
    with pytest.raises(LifecycleError, match=match) as error:
        go(trainer, engine)
    assert error.value.details["rank"] == last
    assert trainer.ranks[0].parts[-1].names == []  # before anything was gathered
    assert engine.receiver.version == 1
    assert not engine.receiver.torn
    assert same(engine.sink.tensor, before)
    with trainer.ranks[-1].changes.declared():
        pass
    assert go(trainer, engine).version > 1
    assert same(engine.sink.tensor, trainer.ranks[0].tensors)


def test_ranks_of_other_tensors_are_never_one_model(trainer: Ranks, engine: Engine) -> None:
    tensors = trainer.ranks[-1].tensors
    name = next(n for n, t in tensors.items() if t.dtype is torch.float32 and n == "strided")
    tensors[name] = tensors[name].view(torch.int32)  # of as many bytes
    last = len(trainer.ranks) - 1
    with pytest.raises(ManifestMismatchError, match=rf"rank {last} of .*other tensors") as error:
        go(trainer, engine, verify="installed")
    assert error.value.details["rank"] == last
    assert engine.receiver.version == 0
    assert not engine.receiver.torn


def test_a_rank_whose_state_moved_before_the_confirmation_is_seen_there(
    trainer: Ranks, engine: Engine
) -> None:
    rank = trainer.ranks[1]
    rank.at = lambda name: setattr(rank.changes, "state", int(name == "confirm"))
    with pytest.raises(
        LifecycleError, match=r"rank 1 of .* is at step or load number 1, .* at 0"
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


def test_a_rank_that_hangs_is_named_before_the_deadline_and_blocks_no_later_refit(
    trainer: Ranks, engine: Engine
) -> None:
    freed = threading.Event()
    trainer.ranks[1].at = lambda name: freed.wait(SOON) if name == "strided" else None
    begun = time.monotonic()
    with pytest.raises(RefitPeerError, match=r"rank 1 of .*did not gather") as error:
        go(trainer, engine, deadline_s=5)
    assert time.monotonic() - begun < 8  # a busy machine has three seconds more
    assert error.value.details["rank"] == 1
    with pytest.raises(RefitPeerError, match=r"rank \d of .*did not answer"):
        go(trainer, engine, deadline_s=2)  # what hangs must end first
    freed.set()
    trainer.ranks[1].at = lambda name: None
    go(trainer, engine)
    assert same(engine.sink.tensor, trainer.ranks[0].tensors)
    assert trainer.closed() == [[1, 1, 1]] * len(trainer.ranks)


def test_a_rank_that_is_not_called_is_named_before_the_deadline(
    trainer: Ranks, engine: Engine
) -> None:
    engine.prepare_refit_info(trainer.prepare_refit_info())
    sending = trainer.ranks[0].send_weights(deadline_s=2, bucket_bytes=BUCKET)
    engine.receiver.receive(deadline_s=2)
    with pytest.raises(RefitPeerError, match=r"rank 1 of .*did not join"):
        wait(sending, SOON)


def test_who_comes_after_the_end_is_told(trainer: Ranks) -> None:
    first, *others = trainer.ranks
    with pytest.raises(ConfigError):
        first.send_weights(transport=1)
    [following] = others[0].send_weights(deadline_s=SOON)
    with pytest.raises(RefitAborted, match=r"rank 0 of .*transport=1 is not valid"):
        following.result(SOON)
    sending = first.send_weights(deadline_s=0.3)
    with pytest.raises(RefitPeerError):
        wait(sending, SOON)
    [following] = others[0].send_weights(deadline_s=SOON)
    with pytest.raises(RefitAborted, match="ended the refit"):
        following.result(SOON)
    first.cancel_refit(3)
    with pytest.raises(RefitAborted, match="refit 3 was already requested or cancelled"):
        first.send_weights(number=3)
    [following] = others[0].send_weights(deadline_s=SOON)
    with pytest.raises(RefitAborted, match="it was cancelled"):
        following.result(SOON)
    assert [part.closed for part in others[0].parts] == [1, 1, 1]


def test_a_follower_of_a_refit_before_the_one_that_runs_gets_its_end(
    trainer: Ranks, engine: Engine
) -> None:
    first, *others = trainer.ranks
    sending = first.send_weights(number=1, deadline_s=SOON)
    sending += first.send_weights(number=2, deadline_s=SOON)
    sending += [call for rank in others for call in rank.send_weights(number=2, deadline_s=SOON)]
    engine.prepare_refit_info(first.prepare_refit_info() | {"number": 2})
    wait([*sending[1:], *engine.receive_weights(deadline_s=SOON)], SOON)
    hello = messages.RankHello(1, 1)
    sent: list[Any] = []
    leader = first.refit_ranks.leader
    leader._send = lambda key, message: sent.append(message)  # type: ignore[method-assign]
    leader._sort("late", hello)
    assert sent == [messages.Close("refit 1 is over: this is refit 2")]


def test_a_rank_whose_source_cannot_be_made_is_named(trainer: Ranks, engine: Engine) -> None:
    trainer.ranks[1].weight_source = lambda: 1 / 0  # type: ignore[method-assign]
    engine.prepare_refit_info(trainer.ranks[0].prepare_refit_info())
    sending = trainer.ranks[0].send_weights(number=1, deadline_s=SOON)
    with pytest.raises(ZeroDivisionError):
        trainer.ranks[1].send_weights(number=1, deadline_s=SOON)
    with pytest.raises(RefitError, match=r"rank 1 of .*ZeroDivisionError"):
        wait(sending, SOON)


@pytest.mark.parametrize("first_ends", [False, True])
@pytest.mark.parametrize("order", sorted(set(itertools.permutations([0, 0, 1, 1]))), ids=str)
def test_of_two_refits_that_are_counted_each_ends_alike_on_all_ranks(
    engine: Engine, trainer: Ranks, order: tuple[int, ...], first_ends: bool
) -> None:
    calls: dict[int, list[Any]] = {rank: [] for rank in range(len(trainer.ranks))}
    engine.prepare_refit_info(trainer.prepare_refit_info())
    for one in order:  # the followers come together
        for rank in [0] if one == 0 else range(1, len(trainer.ranks)):
            calls[rank] += trainer.ranks[rank].send_weights(deadline_s=SOON)
        if first_ends and len(calls[0]) == 2:
            assert isinstance(calls[0][0].exception(SOON), RefitAborted)
    for first, _ in calls.values():
        with pytest.raises(RefitAborted, match=r"newer refit|ended the refit"):
            first.result(SOON)
    receiving = engine.receive_weights(number=2, deadline_s=SOON)
    wait([*(second for _, second in calls.values()), *receiving], SOON)
    assert same(engine.sink.tensor, trainer.ranks[0].tensors)
    assert trainer.closed() == [[1, 1, 1]] + [[1, 1]] * (len(trainer.ranks) - 1)


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
    with pytest.raises(ConfigError, match="unknown option"):
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


def test_a_source_of_one_rank_gathers_alone(keep, engine: Engine) -> None:
    alone = keep(Ranks(1))
    go(alone, engine)
    assert same(engine.sink.tensor, alone.ranks[0].tensors)
    assert alone.closed() == [[1]]


def test_the_thread_works_in_order_and_outlive_errors() -> None:
    thread, seen = RefitThread(), []
    failing = thread.submit(lambda: 1 / 0)
    done = [thread.submit(lambda i=i: seen.append(i)) for i in range(5)]
    wait(done, SOON)
    assert isinstance(failing.exception(SOON), ZeroDivisionError)
    assert seen == [0, 1, 2, 3, 4]
    assert thread.idle
    thread.close()


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
        end = time.monotonic() + SOON
        while peer.state() != "stopped":
            assert time.monotonic() < end
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
