"""What is remembered as held is what the engine has, whatever becomes of the lane meanwhile.

A sender that gave up uses its slots again, or trains on, while a receiver may still read them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simple_pair import (
    DictSink,
    Engine,
    InPlaceSink,
    Tensors,
    Trainer,
    blank,
    describe,
    go,
    in_order,
    make_persistent,
    make_tensors,
    same,
)

from rl_core.errors import RefitCorrupted
from rl_core.weights.data.digests import BlockHash, DigestTable, TensorHasher
from rl_core.weights.data.manifest import WeightManifest
from rl_core.weights.data.parts import Partition
from rl_core.weights.data.plan import DataMode, make_plan
from rl_core.weights.receiving.loading import Loader, Places, ReceiverBuckets, ReceiverLanes
from rl_core.weights.receiving.staging import StagedSink
from rl_core.weights.sending.packing import Packer, SenderBuckets, sent_parts
from rl_core.weights.transports.base import NoLane

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "bool", "int64", "complex64", "uint8"]
SIZES = [0, 1, 11, 130, 900]
HASHES = [BlockHash("xxh3", b""), BlockHash("blake3", bytes(32)), BlockHash("fold", bytes(32))]


class RestlessRoute(ReceiverBuckets):
    """``between`` is called before and after everything that a step does."""

    between: Callable[[], None]

    def steps(self, index: int, *, verified: bool) -> list[Any]:
        def disturbed(call: Callable[[], Any]) -> Any:
            self.between()
            result = call()
            self.between()
            return result

        return [
            step._replace(
                copies=[partial(disturbed, call) for call in step.copies],
                digests=partial(disturbed, step.digests),
                writes=[partial(disturbed, call) for call in step.writes],
            )
            for step in super().steps(index, verified=verified)
        ]


class Rig:
    """A trainer's tensors on their way into an engine, without the protocol around them."""

    def __init__(
        self, trained: Tensors, sink: DictSink, ties: dict[str, str], block_hash: BlockHash
    ) -> None:
        self.source = Trainer(trained, ties).source
        self.sink, self.block_hash = sink, block_hash
        self.manifest = WeightManifest.of(self.source.specs())
        self.touched = 0

    def refit(
        self,
        known: dict[str, bytes],
        disturb: Callable[[torch.Tensor], None],
        *,
        bucket_bytes: int,
        direct: bool,
        staged: bool = False,
    ) -> bool:
        """Sends what is not known as it is now, and disturbs the lane; whether it was complete."""
        now = self.digests(bucket_bytes)
        left = [i for i, s in enumerate(self.manifest.owned) if known.get(s.name) != now[s.name]]
        parts = Partition(self.manifest)
        plan = make_plan(
            parts,
            bucket_bytes,
            DataMode.DIRECT if direct else DataMode.PACKED,
            skip=bytes(i not in left for i in range(len(self.manifest.owned))),
            block=self.block_hash.block,
            places=in_order(self.manifest),
        )
        lane = NoLane()
        lane.data = torch.zeros(plan.lane_bytes, dtype=torch.uint8)
        table = DigestTable(self.manifest, dict(known))
        given = sent_parts(self.source, parts, self.manifest, plan.sent, None)
        packer = Packer(SenderBuckets(plan, lane, self.block_hash), given, table, {})
        sink: Any = self.sink
        expected = WeightManifest.of(sink.specs())
        if staged:
            sent = {s.name for s in expected.owned if self.manifest.root(s.name) not in known}
            sink, known = StagedSink(sink, sent, 0, {}, self.mark_torn), dict(known)
            sink.begin(1)
        places = Places(sink, parts, expected, sink.pieces())
        route = RestlessRoute(places, plan, lane.data, self.block_hash, b"")
        route.between = lambda: disturb(lane.data)
        hasher = TensorHasher(self.block_hash, plan.block_bytes)
        keeps = bytes([1]) * len(self.manifest.owned)
        lanes = ReceiverLanes(places, keeps, {0: route}, hasher)
        loader = Loader(lanes, verify="wire", known=known, mark_torn=self.mark_torn)
        try:
            for index in range(len(plan.buckets)):
                loader.load(index, packer.put(index), 0)
        except RefitCorrupted:
            sink.fail()
            return False
        loader.check_sealed(table.digest(keeps))
        sink.finish(1)
        loader.check_installed()
        return True

    def mark_torn(self) -> None:
        self.touched += 1

    def digests(self, bucket_bytes: int, tensors: Tensors | None = None) -> dict[str, bytes]:
        block = min(bucket_bytes // 64 * 64, self.block_hash.block)
        held = self.source.tensor if tensors is None else tensors
        given = ((spec.name, spec, held[spec.name]) for spec in self.manifest.tensors)
        return TensorHasher(self.block_hash, block).digests(given, ())

    def check_known(self, known: dict[str, bytes], bucket_bytes: int) -> None:
        found = self.digests(bucket_bytes, self.sink.tensor)
        for name, digest in found.items():
            assert known.get(self.manifest.root(name), digest) == digest, name


def contents(size: int, dtype: str, seed: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 256, (size * kind.itemsize,), generator=generator, dtype=torch.uint8)
    return numbers % 2 == 1 if dtype == "bool" else numbers.view(kind)


@settings(max_examples=25)
@example(["float32"], [900], False, True, False, HASHES[0], 1024, [(1, 0, 9, 7, 99)])
@example(["float32"], [900], False, True, True, HASHES[0], 1024, [(6, 0.5, 1024, 7, 1)])
@example(["float32"], [900], True, True, True, HASHES[0], 1024, [(12, 0, 9999, 7, 1)])
@example(["float32"], [900], True, False, True, HASHES[0], 1024, [(3, 0, 9, 7, 99)])
@given(
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=5),
    sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=5),
    tied=st.booleans(),
    in_place=st.booleans(),
    direct=st.booleans(),
    block_hash=st.sampled_from(HASHES[:2]) | st.sampled_from(HASHES),
    bucket_bytes=st.sampled_from([1024, 8 << 20]),
    changes=st.lists(
        st.tuples(
            st.integers(0, 40),
            st.floats(0, 1),
            st.integers(1, 100_000),
            st.integers(1, 255),
            st.sampled_from([1, 1, 2, 3, 99]),
        ),
        max_size=3,
    ),
)
@pytest.mark.parametrize("staged", [False, True])
def test_nothing_wrong_is_ever_known_to_be_held(
    staged: bool,
    dtypes: list[str],
    sizes: list[int],
    tied: bool,
    in_place: bool,
    direct: bool,
    block_hash: BlockHash,
    bucket_bytes: int,
    changes: list[tuple[int, float, int, int, int]],
) -> None:
    scale = 1 if bucket_bytes == 1024 else 700  # up to more than a block
    trained = {
        f"t{i}": contents(scale * size, dtype, i)
        for i, (size, dtype) in enumerate(zip(sizes, dtypes, strict=False))
    }
    ties = {}
    if tied:  # by the trainer: the engine has two storages
        trained["tied"], ties["tied"] = trained["t0"], "t0"
    sink = (InPlaceSink if in_place else DictSink)(blank(trained))
    rig, known, way = Rig(trained, sink, ties, block_hash), {}, {"bucket_bytes": bucket_bytes}
    moment = 0

    def disturb(lane: torch.Tensor) -> None:
        nonlocal moment
        for when, where, count, amount, lasting in changes:
            if moment in (when, when + lasting):  # then it is as before
                first = int(where * len(lane))
                lane[first : first + count] ^= amount
        moment += 1

    complete = rig.refit(known, disturb, direct=direct, staged=staged, **way)
    if not staged:
        rig.check_known(known, bucket_bytes)
    elif not complete:
        assert same(sink.tensor, blank(trained))
    assert not complete or same(sink.tensor, trained)
    # The next refit sends what is lacking, and is exact.
    assert rig.refit(known, lambda lane: None, direct=direct, **way)
    assert same(sink.tensor, trained)
    rig.check_known(known, bucket_bytes)


@pytest.mark.parametrize("mode", ["packed", "direct"])
@pytest.mark.parametrize("isolation", ["quiesced", "staged"])
def test_a_sink_is_given_the_bytes_that_were_verified(keep, mode, isolation):
    """Whatever becomes of the lane before the engine's loader has read them."""
    tensors = make_persistent()
    trainer = keep(Trainer(tensors, at_home=True))
    engine = keep(Engine(blank(tensors)))
    expected = {name: tensor.clone() for name, tensor in tensors.items()}

    def write(name: str, offset: int, data: torch.Tensor, **kwargs: Any) -> None:
        for lane in trainer.sender.kept.connections["ipc"].lanes.values():
            lane.data ^= 85  # a sender that gave up uses it for something else
        honest(name, offset, data, **kwargs)
        for lane in trainer.sender.kept.connections["ipc"].lanes.values():
            lane.data ^= 85

    honest, engine.sink.write = engine.sink.write, write
    way = {"mode": mode, "bucket_bytes": 1 << 20}  # one bucket: the sender is done with the lane
    go(trainer, engine, isolation=isolation, **way)
    assert same(engine.sink.tensor, expected)
    assert go(trainer, engine, delta=True, verify="installed", **way).bytes == 0


@pytest.mark.parametrize("mode", ["packed", "direct"])
def test_what_a_sender_remembers_is_what_it_announced(keep, mode):
    """Not what became of the tensors since."""
    tensors = make_persistent() if mode == "direct" else make_tensors()
    trainer = keep(Trainer(tensors, at_home=mode == "direct"))
    engine = keep(Engine(blank(tensors)))
    trainer.source.on["confirm"] = lambda: tensors["big"].add_(1)
    go(trainer, engine, mode=mode)
    trainer.source.on.clear()
    assert trainer.sender.kept.committed.known == engine.receiver.known
    report = go(trainer, engine, mode=mode, delta=True)
    assert (report.tensors, report.unchanged) == (1, len(describe(tensors)) - 2)
    assert same(tensors, engine.sink.tensor)
