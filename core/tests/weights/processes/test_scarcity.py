"""Refits where something runs short: memory, patience, or the process itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from killable import LATER, EngineParty, TrainerParty, begin
from remote import Remote
from simple_pair import SOON, Engine, Trainer, blank, same, until

from rl_core.errors import RefitAborted, RefitError, RefitPeerError, RefitProtocolError
from rl_core.futures import wait

pytestmark = pytest.mark.usefixtures("nothing_is_left")

MEGABYTE = 1 << 20


# -- memory ----------------------------------------------------------------------------------------


def test_a_trainer_without_memory_for_the_buffers_says_so_and_does_with_smaller_ones(stack):
    engine = stack.enter_context(closing(EngineParty()))
    trainer = stack.enter_context(Remote(TrainerParty))
    engine.meet(trainer.info())
    trainer.limit("FSIZE", 1000)
    begin(trainer, engine, bucket_bytes=1024)
    error = trainer.failure()
    assert isinstance(error, RefitError)
    assert error.phase == "PREPARE"
    assert "lower bucket_bytes" in str(error)
    assert isinstance(engine.failure(), RefitAborted)
    engine.check()
    begin(trainer, engine, bucket_bytes=256)
    assert trainer.outcome()["version"] == engine.outcome()["version"] == 1
    assert engine.holds(0)


@pytest.mark.parametrize(
    ("shortage", "kind", "instead"),
    [
        ({"isolation": "staged"}, RefitError, {"isolation": "quiesced"}),
        ({"bucket_bytes": 48 * MEGABYTE}, RefitProtocolError, {"bucket_bytes": MEGABYTE}),
    ],
    ids=["second copy", "buffers"],
)
def test_an_engine_without_memory_says_so_and_does_with_less(stack, shortage, kind, instead):
    trainer = stack.enter_context(closing(TrainerParty(megabytes=128)))
    engine = stack.enter_context(Remote(EngineParty, megabytes=128))
    engine.meet(trainer.info())
    begin(trainer, engine, bucket_bytes=MEGABYTE)
    assert trainer.outcome()["version"] == engine.outcome()["version"] == 1
    trainer.load(1)
    engine.limit_growth(72 * MEGABYTE)
    begin(trainer, engine, **{"bucket_bytes": MEGABYTE} | shortage)
    error = engine.failure()
    assert isinstance(error, kind)
    assert error.phase == "PREPARE"
    told = trainer.failure()
    assert isinstance(told, RefitError)
    assert f"pid {engine.pid}" in told.peer
    engine.check()
    begin(trainer, engine, **{"bucket_bytes": MEGABYTE} | instead)
    assert trainer.outcome()["version"] == engine.outcome()["version"] == 2
    engine.limit("AS", -1)
    assert engine.holds(1)


@pytest.mark.parametrize("scarce", ["trainer", "engine"])
def test_a_process_without_file_descriptors_fails_its_refit_and_lives(stack, scarce):
    """ZeroMQ would end it by SIGABRT."""
    trainer = stack.enter_context(Remote(TrainerParty))
    engine = stack.enter_context(Remote(EngineParty))
    engine.meet(trainer.info())
    begin(trainer, engine)
    assert trainer.outcome()["version"] == engine.outcome()["version"] == 1
    party = trainer if scarce == "trainer" else engine
    party.use_up_descriptors()
    begin(trainer, engine, deadline_s=3.0)
    assert isinstance(trainer.failure(), RefitError)
    assert isinstance(engine.failure(), RefitError)
    assert "ulimit" in str(party.failure().fix)
    party.free_descriptors()
    engine.meet(trainer.info())
    begin(trainer, engine)
    assert trainer.outcome()["version"] == engine.outcome()["version"] == 2
    engine.close()
    trainer.close()


def program(code: str, *before: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with the test doubles at hand, until it ends by itself."""
    path = [str(Path(__file__).parents[2] / "support"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [*before, sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        timeout=LATER,
        capture_output=True,
        text=True,
    )


FILL = 'mount -t tmpfs -o size=64k tmpfs /dev/shm; cat /dev/zero >/dev/shm/full; exec "$@"'
UNSHARED = ["unshare", "--map-root-user", "--mount"]


def may_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    mounts = [*UNSHARED, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    return subprocess.run(mounts, capture_output=True).returncode == 0


def test_a_full_dev_shm_does_not_matter():
    if not may_unshare():
        pytest.skip("no namespaces of one's own here")
    code = """
import os
from killable import EngineParty, TrainerParty
assert os.statvfs("/dev/shm").f_bavail == 0
trainer, engine = TrainerParty(megabytes=1), EngineParty(megabytes=1)
engine.meet(trainer.info())
trainer.begin(bucket_bytes=1 << 20), engine.begin()
assert trainer.outcome()["extra_memory_bytes"] > 64 << 10
assert engine.outcome()["version"] == 1 and engine.holds(0)
trainer.close(), engine.close()
"""
    ended = program(code, *UNSHARED, "sh", "-c", FILL, "sh")
    assert ended.returncode == 0, ended.stderr


# -- patience --------------------------------------------------------------------------------------


def test_a_slow_engine_is_waited_for_with_two_buffers_and_a_fast_one_reads_what_was_meant():
    tensors = {f"t{i}": torch.full((256,), float(i)) for i in range(12)}  # a bucket each
    trainer, fast, slow = Trainer(tensors), Engine(blank(tensors)), Engine(blank(tensors))
    ahead: list[int] = []

    def written(engine: Engine) -> int:
        return engine.sink.calls.count("write")

    def slowly() -> None:
        """Only once the fast engine has all that it can have by now."""
        while written(fast) < min(written(slow) + 1, len(tensors)):
            assert not futures[0].done()
            time.sleep(0.001)

    trainer.source.before = lambda name: ahead.append(int(name[1:]) + 1 - written(slow))
    slow.sink.on["write"] = slowly
    with closing(trainer.sender), closing(fast.receiver), closing(slow.receiver):
        info = trainer.prepare_refit_info()
        fast.prepare_refit_info(info)
        slow.prepare_refit_info(info)
        futures = [trainer.sender.send(receivers=2, bucket_bytes=1024, deadline_s=LATER)]
        futures += [engine.receiver.receive(deadline_s=LATER) for engine in (fast, slow)]
        report, *_ = wait(futures, SOON)
    assert max(ahead) == 2
    assert report["extra_memory_bytes"] == 2 * 1024
    assert same(tensors, fast.sink.tensor)
    assert same(tensors, slow.sink.tensor)


@pytest.mark.parametrize("impatient", ["trainer", "engine"])
def test_an_engine_that_is_slower_than_a_deadline_is_named_whoever_gives_up(stack, impatient):
    trainer, fast = TrainerParty(), EngineParty()
    stack.enter_context(closing(trainer))
    stack.enter_context(closing(fast))
    slow = stack.enter_context(Remote(EngineParty))
    info = trainer.info()
    for engine in (fast, slow):
        engine.meet(info)
    slow.stall("write")
    begin(trainer, fast, slow)
    slow.reached()
    until(lambda: fast.phase() == "TRANSFER")
    (trainer.trainer if impatient == "trainer" else fast.engine).clock.ahead_s = LATER
    error = trainer.failure()
    assert isinstance(error, RefitPeerError)
    assert error.phase == "TRANSFER"
    assert f"pid {slow.pid}" in error.peer
    assert f"pid {os.getpid()}" not in error.peer
    slow.release()
    for engine in (fast, slow):
        assert isinstance(engine.failure(), RefitError)
        assert engine.torn()
    begin(trainer, fast, slow)
    assert trainer.outcome()["version"] == fast.outcome()["version"] == slow.outcome()["version"]
    assert fast.holds(0)
    assert slow.holds(0)


# -- the process ends ------------------------------------------------------------------------------

PREPARED = """
from killable import EngineParty, TrainerParty
trainer, engine = TrainerParty(), EngineParty()
engine.meet(trainer.info())
"""
RUNNING: dict[str, str] = {
    "nobody came": "trainer.begin()",
    "no trainer came": "engine.begin()",
    "in the middle": "engine.stall('write'); trainer.begin(); engine.begin(); engine.reached()",
    "as bytes are copied": "trainer.begin(); engine.begin()",
    "at the end": "engine.stall('commit'); trainer.begin(); engine.begin(); engine.reached()",
    "between two refits": "trainer.begin(); engine.begin(); trainer.outcome(); engine.outcome()",
}


@pytest.mark.parametrize("running", RUNNING.values(), ids=RUNNING)
def test_a_process_that_ends_during_a_refit_ends_soon_and_leaves_nothing(running):
    ended = program(f"{PREPARED}{running}")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert os.listdir(tempfile.gettempdir()) == []


def test_a_process_that_fails_during_a_refit_says_only_why_and_leaves_nothing():
    ended = program(f"{PREPARED}{RUNNING['in the middle']}\n1 / 0")
    assert ended.returncode == 1
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert ended.stderr.count("Traceback") == 1
    assert os.listdir(tempfile.gettempdir()) == []
