"""Many calls at once over one engine: whose rows, which version, who waits for whom."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import itertools
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from patience import enough_for
from prompt_rows import single_tokens
from simple_pair import SOON, until

from rl_backends import (
    Completion,
    FailedRow,
    GenerationBackend,
    ModelFacts,
    PromptBatch,
    Row,
    RowEngine,
    SamplingParams,
)
from rl_backends.generation import serving as _serving
from rl_backends.generation.batch_engine import BatchEngine
from rl_backends.generation.serving import Mailbox, RowService, ServedCall
from rl_core.batch import BatchedDataDict
from rl_core.errors import DataError, DeadlineError, LifecycleError, PluginError
from rl_core.weights.engine_lock import EngineLock

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence


class SteppedEngine(RowEngine):
    """A row of n tokens ends after n steps: the prompt's last token, plus 1, plus 2, ..."""

    def __init__(self, room: int = 8) -> None:
        self.room = room
        self.rows: dict[int, tuple[Row, int]] = {}
        self.most = 0
        self.admitted: list[int] = []
        self.step = threading.Semaphore(0)
        self.stepped = False
        self.broken: Exception | None = None
        self.cancelled: list[int] = []
        self.left: list[int] = []
        self.worked: set[int] = set()

    def release_threads(self) -> None:
        self.left.append(threading.get_ident())

    def submit(self, rows: Sequence[Row]) -> None:
        self.rows |= {row.key: (row, 0) for row in rows}
        self.admitted += [row.call for row in rows]
        self.most = max(self.most, len(self.rows))

    def collect(self) -> list[Completion | FailedRow]:
        self.worked.add(threading.get_ident())
        if self.stepped and not self.step.acquire(timeout=0.01):
            return []
        if self.broken is not None:
            raise self.broken
        ended: list[Completion | FailedRow] = []
        for key, (row, count) in list(self.rows.items()):
            self.rows[key] = row, count + 1
            if row.token_ids[-1] == 13:
                ended.append(FailedRow(key, DataError(f"row {row.index} is unlucky")))
            elif count + 1 == row.budget:
                tokens = [row.token_ids[-1] + 1 + i for i in range(row.budget)]
                ended.append(Completion(key, tokens, [-1.0] * row.budget, True))
        for one in ended:
            del self.rows[one.row]
        return ended

    def cancel(self, keys: Collection[int]) -> None:
        self.cancelled += keys
        for key in keys:
            self.rows.pop(key, None)


class Engine(GenerationBackend):
    """A backend over a :class:`SteppedEngine`."""

    def __init__(self, room: int = 8, *, stepped: bool = False, **config: Any) -> None:
        super().__init__({"max_new_tokens": 3} | config, ModelFacts(0, (1,), 10_000, 64))
        self.rows = SteppedEngine(room)
        self.rows.stepped = stepped
        self.version = 0
        self.prepare_for_generation()

    @property
    def weights_version(self) -> int:
        return self.version

    def row_engine(self) -> RowEngine:
        return self.rows

    def call(
        self, deliver: Callable[[Any], object], *tokens: int, method: str = "generate_async"
    ) -> ServedCall:
        prompts = PromptBatch.from_data(single_tokens(*tokens), self.sampling, self.facts)
        return ServedCall(method, prompts, self.sampling, deliver)

    def weight_sink(self) -> Any:
        raise NotImplementedError

    def on_wake(self, tags: frozenset[str]) -> None: ...
    def on_sleep(self, tags: frozenset[str]) -> None: ...
    def on_shutdown(self) -> None: ...


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(64) as threads:
        yield threads


def test_who_waits_for_rows_leaves_the_processors_to_who_decodes_them():
    engine = Engine()
    engine.generate(single_tokens(2))
    asyncio.run(rows_of(engine, single_tokens(3)))
    assert engine.rows.left == [threading.get_ident()] * 2
    assert threading.get_ident() not in engine.rows.worked


def test_the_thread_ends_with_the_calls_and_keeps_nobody_alive():
    engine = Engine()
    engine.generate(single_tokens(5))
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("generate-")])
    rows = engine.rows
    engine.shutdown()
    del engine
    gc.collect()
    assert [type(one).__name__ for one in gc.get_referrers(rows)] in ([], ["frame"])


def test_a_writer_waits_for_calls_that_have_begun_and_no_other_begins(pool):
    engine = Engine(room=1, stepped=True)
    begun = pool.submit(engine.generate, single_tokens(5, 6))
    until(lambda: bool(engine.rows.rows))
    order: list[str] = []

    def write(name: str) -> None:
        with engine._lock:
            order.append(name)
            engine.version += 1

    first = pool.submit(write, "first")
    until(lambda: engine._lock.refit_waiting)
    later = pool.submit(engine.generate, single_tokens(7))
    later.add_done_callback(lambda _: order.append("later"))
    until(lambda: len(engine._serving("generate")._arrived) == 1)
    assert not first.done()
    second = pool.submit(write, "second")
    until(lambda: len(engine._lock._waiting) == 2)
    engine.rows.step.release(6)
    assert begun.result(SOON)["weights_version"].tolist() == [0, 0]
    first.result(SOON)
    second.result(SOON)
    engine.rows.step.release(3)
    assert later.result(SOON)["weights_version"].tolist() == [2]
    assert order[0] == "first"
    assert set(order[1:]) == {"later", "second"}


def test_a_row_that_fails_fails_its_call_alone(pool):
    engine = Engine(stepped=True)
    good = pool.submit(engine.generate, single_tokens(20, 30))
    bad = pool.submit(engine.generate, single_tokens(40, 13, 50))
    until(lambda: len(engine.rows.rows) == 5)
    engine.rows.step.release(20)
    with pytest.raises(DataError, match="row 1 is unlucky"):
        bad.result(SOON)
    assert good.result(SOON)["generation_lengths"].tolist() == [3, 3]
    until(lambda: not engine.rows.rows)


def test_an_engine_that_fails_fails_the_calls_in_it_and_serves_those_after(pool):
    engine = Engine(room=3, stepped=True)
    inside = [pool.submit(engine.generate, single_tokens(20 + i)) for i in range(3)]
    until(lambda: len(engine.rows.rows) == 3)
    outside = pool.submit(engine.generate, single_tokens(90))
    until(lambda: len(engine._serving("generate")._arrived) == 1)
    engine.rows.broken = OSError("it broke")
    engine.rows.step.release(1)
    errors = []
    for call in inside:
        with pytest.raises(OSError, match="it broke") as caught:
            call.result(SOON)
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 3
    assert len(engine.rows.cancelled) == 3
    engine.rows.broken = None
    engine.rows.step.release(9)
    assert outside.result(SOON)["output_ids"].tolist() == [[90, 91, 92, 93]]


def test_a_reader_whose_loop_is_gone_keeps_nobody_waiting():
    engine = Engine(stepped=True)

    def deliver(_: Any) -> None:
        raise RuntimeError("Event loop is closed")

    engine._serving("generate").submit(engine.call(deliver, 5, 6))
    until(lambda: len(engine.rows.rows) == 2)
    engine.rows.step.release(9)
    until(lambda: not engine.rows.rows)
    engine.rows.step.release(9)
    assert engine.generate(single_tokens(5))["generation_lengths"].tolist() == [3]


def test_who_changes_the_engine_cannot_generate_meanwhile():
    engine = Engine()
    with engine._lock, pytest.raises(LifecycleError, match="changes the engine"):
        engine.generate(single_tokens(5))
    assert engine.generate(single_tokens(5)).size == 1


def test_calls_that_wait_when_the_engine_ends_are_refused(pool):
    engine = Engine(room=1, stepped=True)
    begun = pool.submit(engine.generate, single_tokens(5))
    until(lambda: bool(engine.rows.rows))
    service = engine._serving("generate")
    ending = pool.submit(engine.shutdown)
    until(lambda: engine._lock.refit_waiting)
    service.submit(engine.call((told := []).append, 6, method="generate"))
    engine.rows.step.release(9)
    begun.result(SOON)
    assert ending.result(SOON) is True
    until(lambda: bool(told))
    assert isinstance(told[0], LifecycleError)


# -- what an examiner found -----------------------------------------------------------------------


def test_a_system_without_threads_refuses_a_call_and_serves_the_next(monkeypatch):
    engine = Engine()

    def cannot(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", cannot)
        with pytest.raises(RuntimeError, match="new thread"):
            engine.generate(single_tokens(5))
    assert engine.generate(single_tokens(5)).size == 1


def test_a_version_that_cannot_be_read_is_the_calls_error(pool):
    engine = Engine()
    service = RowService(
        engine.rows, EngineLock(), name="Engine", check=lambda method: None, weights=lambda: 1 // 0
    )
    told: list[Any] = []
    service.submit(engine.call(told.append, 6, method="generate"))
    until(lambda: bool(told))
    assert isinstance(told[0], ZeroDivisionError)


def test_a_key_that_the_engine_does_not_have_is_the_plugins_fault():
    engine = Engine()
    collect = engine.rows.collect

    def by_index() -> list[Any]:
        return [Completion(0, done.token_ids, done.logprobs, True) for done in collect()]

    engine.generate(single_tokens(5))
    engine.rows.collect = by_index
    with pytest.raises(PluginError, match="row's key"):
        engine.generate(single_tokens(5))


@pytest.mark.parametrize("seconds", [None, 1000.0, 1e12, float("inf")])
@pytest.mark.parametrize("error", [TimeoutError("the engine's own"), DeadlineError("its own too")])
def test_an_engines_own_time_out_is_told_as_it_is(error, seconds):
    engine = Engine(call_deadline_s=seconds)
    engine.rows.broken = error
    with pytest.raises(TimeoutError, match=r"its own|engine's own"):
        engine.generate(single_tokens(5))
    with pytest.raises(TimeoutError, match=r"its own|engine's own"):
        asyncio.run(rows_of(engine, single_tokens(5)))


async def rows_of(engine: Engine, data: BatchedDataDict[Any]) -> list[int]:
    return [row async for row, _ in engine.generate_async(data)]


def test_rows_that_are_done_come_to_a_slow_reader_too():
    seconds = enough_for(lambda: Engine(room=1).generate(single_tokens(5, 6, 7)), least=3.0)
    engine = Engine(room=1, call_deadline_s=seconds, stepped=True)
    engine.rows.step.release(3)

    async def read_slowly() -> list[int]:
        found, passed = [], time.monotonic() + seconds + 0.5
        async for row, _ in engine.generate_async(single_tokens(5, 6, 7)):
            found.append(row)
            # The event loop is held: it sees what is done meanwhile when the deadline has passed.
            engine.rows.step.release(6)
            until(lambda: time.monotonic() > passed and len(engine.rows.admitted) == 3)
            until(lambda: not engine.rows.rows)
        return found

    assert sorted(asyncio.run(read_slowly())) == [0, 1, 2]


@pytest.mark.parametrize("deadline", [None, 60.0])
def test_no_cancellation_is_lost(deadline):
    engine = Engine(call_deadline_s=deadline)

    async def cancel_once(yields: int) -> None:
        async def read() -> None:
            while True:
                await rows_of(engine, single_tokens(5))

        task = asyncio.create_task(read())
        for _ in range(yields):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=SOON)
        assert done
        assert task.cancelled()

    for yields in range(150):
        asyncio.run(cancel_once(yields % 30))


def test_a_batch_engine_forgets_calls_that_are_done():
    def complete(prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        if len(prompts) > 1:
            raise OSError("one at a time, please")
        yield Completion(0, [1], [-1.0], False)

    engine = BatchEngine(complete, pad_token_id=0, name="Engine")
    for call in range(1, 6):
        rows_for(engine, call, 5)
    assert len(collected(engine, 5)) == 5
    assert not engine._alone


# -- an engine that takes one batch after the other ------------------------------------------------


def rows_for(engine: BatchEngine, call: int, *tokens: int) -> None:
    engine.submit(
        [
            Row(call * 100 + i, call, i, [token], 2, 7, True, (), SamplingParams())
            for i, token in enumerate(tokens)
        ]
    )


def collected(engine: BatchEngine, count: int) -> list[Completion | FailedRow]:
    found: list[Completion | FailedRow] = []
    for _ in range(20):
        found += engine.collect()
    assert len(found) == count
    return found


def test_rows_that_wait_share_the_next_batch():
    batches: list[list[int]] = []

    def complete(prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        batches.append(prompts.input_ids[:, 0].tolist())
        for row in reversed(range(len(prompts))):
            yield Completion(row, [int(prompts.input_ids[row, 0]) + 1], [-1.0], False)

    engine = BatchEngine(complete, pad_token_id=0, name="Engine")
    rows_for(engine, 1, 5, 6)
    first = list(engine.collect())
    rows_for(engine, 2, 7)
    rows_for(engine, 3, 8)
    found = {done.row: done.token_ids for done in [*first, *collected(engine, 3)]}
    assert found == {100: [6], 101: [7], 200: [8], 300: [9]}
    assert batches == [[5, 6], [7, 8]]


def test_a_batch_that_fails_is_tried_again_call_by_call():
    def complete(prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        for row in range(len(prompts)):
            if int(prompts.input_ids[row, 0]) == 13:
                raise OSError("unlucky")
            yield Completion(row, [1], [-1.0], False)

    engine = BatchEngine(complete, pad_token_id=0, name="Engine")
    rows_for(engine, 1, 5)
    rows_for(engine, 2, 6, 13, 7)
    rows_for(engine, 3, 8)
    found = collected(engine, 5)
    failed = {one.row for one in found if isinstance(one, FailedRow)}
    assert {one.row for one in found if isinstance(one, Completion)} == {100, 200, 300}
    assert failed == {201, 202}
    rows_for(engine, 4, 5)
    assert isinstance(collected(engine, 1)[0], Completion)


@pytest.mark.parametrize("kept", [True, False])
def test_rows_that_are_dropped_are_not_told_and_a_batch_of_none_ends(kept):
    closed = []

    def complete(prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        try:
            for row in range(len(prompts)):
                yield Completion(row, [1], [-1.0], False)
        finally:
            closed.append(len(prompts))

    engine = BatchEngine(complete, pad_token_id=0, name="Engine")
    rows_for(engine, 1, 5, 6)
    rows_for(engine, 2, 7)
    [first] = engine.collect()
    assert isinstance(first, Completion)
    engine.cancel([101] if kept else [101, 200])
    assert closed == ([] if kept else [3])
    assert len(collected(engine, 1 if kept else 0)) == kept
    assert closed == [3]


def test_a_batch_of_the_wrong_rows_is_the_plugins_fault():
    extra = [Completion(0, [1], [-1.0], False), Completion(0, [2], [-1.0], False)]
    engine = BatchEngine(lambda *_: iter(extra), pad_token_id=0, name="Engine")
    rows_for(engine, 1, 5)
    [failed] = collected(engine, 1)
    assert isinstance(failed, FailedRow)
    assert isinstance(failed.error, PluginError)


def test_a_service_without_calls_takes_an_engine_that_cannot_cancel(caplog):
    class Broken(SteppedEngine):
        def cancel(self, keys: Collection[int]) -> None:
            raise OSError("cannot")

    engine = Broken()
    engine.broken = OSError("it broke")
    service = RowService(
        engine, EngineLock(), name="Broken", check=lambda method: None, weights=lambda: (0, 0)
    )
    told: list[Any] = []
    prompts = PromptBatch(
        torch.tensor([[5]]), torch.tensor([1]), torch.tensor([2]), [()], torch.tensor([0])
    )
    service.submit(ServedCall("generate", prompts, SamplingParams(), told.append))
    until(lambda: bool(told))
    assert isinstance(told[0], OSError)
    until(lambda: "could not cancel its rows" in caplog.text)


def clock(sleep: Callable[[float], object], monotonic: Callable[[], float] = float) -> Any:
    """In which time stands still, so that a busy machine is none too late."""
    return SimpleNamespace(sleep=sleep, monotonic=monotonic)


def test_streams_that_come_one_by_one_begin_together(monkeypatch):
    engine = Engine(room=8)
    arriving, submitted, ended = iter(range(1, 4)), [], []
    submit = engine.rows.submit
    monkeypatch.setattr(
        engine.rows, "submit", lambda rows: (submitted.append(len(rows)), submit(rows))
    )
    service = engine._serving("generate_async")

    def ask(*tokens: int, method: str = "generate_async") -> None:
        service.submit(engine.call(lambda item: ended.append(item is None), *tokens, method=method))

    def another_comes(_: float) -> None:
        if (token := next(arriving, None)) is not None:
            thread = threading.Thread(target=ask, args=(20 + token,))
            thread.start()
            thread.join(SOON)

    monkeypatch.setattr(_serving, "time", clock(another_comes))
    ask(20)
    until(lambda: sum(ended) == 4 and service._thread is None)
    assert submitted == [4]

    # All rows of one call are there at once: it waits for nobody.
    monkeypatch.setattr(_serving, "time", clock(lambda _: submitted.append("waited")))
    ask(5, 6, method="generate")
    until(lambda: sum(ended) == 5)
    assert submitted == [4, 2]


def test_a_steady_stream_of_calls_does_not_keep_the_first_one_waiting(monkeypatch):
    engine = Engine(room=10**6)
    service = engine._serving("generate_async")
    done = threading.Event()

    def another_comes(_: float) -> None:
        assert not done.wait(0.001)
        with service._guard:
            service._arrived.append(engine.call(repr, 20))

    passing = itertools.count(0, 0.001).__next__
    monkeypatch.setattr(_serving, "time", clock(another_comes, passing))
    service.submit(engine.call(lambda _: done.set(), 20))
    assert done.wait(SOON)
    service.end(SOON)


def test_a_stream_that_is_cancelled_while_others_gather_is_gone(monkeypatch):
    engine = Engine()
    service = engine._serving("generate_async")
    call = engine.call(repr, 20)
    monkeypatch.setattr(_serving, "time", clock(lambda _: service.cancel(call)))
    service.submit(call)
    until(lambda: service._thread is None)
    assert engine.generate(single_tokens(5))["output_ids"].tolist() == [[5, 6, 7, 8]]
    assert len(engine.rows.admitted) == 1


def test_streams_that_come_after_a_writer_wait_for_it(monkeypatch, pool):
    engine = Engine()
    service = engine._serving("generate_async")
    ended: list[int] = []
    writing: list[concurrent.futures.Future[None]] = []

    def ask() -> ServedCall:
        call = engine.call(lambda item: item is None and ended.append(call.weights[0]), 20)
        service.submit(call)
        return call

    def write() -> None:
        with engine._lock:
            engine.version += 1

    def a_writer_and_streams_come(_: float) -> None:
        if not writing:
            writing.append(pool.submit(write))
            until(lambda: engine._lock.refit_waiting)
        if len(writing) == 1:
            writing.extend(pool.submit(ask) for _ in range(3))  # type: ignore[arg-type]
            until(lambda: len(service._arrived) == 4)

    monkeypatch.setattr(_serving, "time", clock(a_writer_and_streams_come))
    ask()
    until(lambda: len(ended) == 4)
    writing[0].result(SOON)
    assert sorted(ended) == [0, 1, 1, 1]


def test_a_loop_that_is_closed_before_it_wakes_keeps_nobody_waiting():
    engine = Engine(room=1, max_new_tokens=1, stepped=True)
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    deliver = partial(mailbox.post, asyncio.Queue())
    engine._serving("generate_async").submit(engine.call(deliver, *range(20, 40)))
    engine.rows.step.release(1)  # a row ends, of which the loop is told while it does not run
    until(lambda: len(engine.rows.admitted) == 2)
    loop.close()
    engine.rows.step.release(99)
    until(lambda: not engine.rows.rows)
    assert len(engine.rows.admitted) == 2
    assert not mailbox._posted


def test_an_event_loop_is_woken_once_for_all_that_is_done_meanwhile():
    async def read() -> list[int]:
        mailbox = Mailbox(asyncio.get_running_loop())
        inboxes = [asyncio.Queue[int](), asyncio.Queue[int]()]
        woken = []
        mailbox.loop.call_soon_threadsafe, told = (
            lambda do: woken.append(told(do)),
            mailbox.loop.call_soon_threadsafe,
        )
        for item in range(6):
            mailbox.post(inboxes[item % 2], item)
        read = [await inbox.get() for _ in range(3) for inbox in inboxes]
        assert len(woken) == 1
        mailbox.post(inboxes[0], 6)
        assert await inboxes[0].get() == 6
        assert len(woken) == 2
        return read

    assert asyncio.run(read()) == [0, 1, 2, 3, 4, 5]


def test_every_post_to_a_closed_loop_says_so():
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    loop.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            mailbox.post(asyncio.Queue(), 1)
