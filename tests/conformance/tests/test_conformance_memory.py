"""What is kept is seen, whatever the system takes back meanwhile."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl_conformance.memory import MemoryPeak

KEPT, FILE = 20 << 20, 64 << 20
pytestmark = pytest.mark.skipif(
    not hasattr(mmap, "MADV_DONTNEED"), reason="nothing is mapped as Linux does"
)


@contextmanager
def mapped(path: Path, access: int) -> Iterator[mmap.mmap]:
    """A file in memory, all of whose pages were read."""
    path.write_bytes(bytes(FILE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), FILE, access=access) as pages:
        assert not any(pages[at] for at in range(0, FILE, mmap.PAGESIZE))
        yield pages


def test_memory_that_is_kept_while_pages_of_a_file_go(tmp_path: Path) -> None:
    with mapped(tmp_path / "library", mmap.ACCESS_READ) as pages:
        peak = MemoryPeak(trim=True)  # else this may lie in what an earlier test freed
        pages.madvise(mmap.MADV_DONTNEED)
        kept = b"x" * KEPT
        assert peak.resident() >= len(kept) * 0.9


def test_a_mapped_file_that_is_written_to_takes_nothing(tmp_path: Path) -> None:
    with mapped(tmp_path / "model.safetensors", mmap.ACCESS_COPY) as pages:
        peak = MemoryPeak()
        for at in range(0, FILE, mmap.PAGESIZE):
            pages[at] = 1
        assert peak.resident() <= FILE * 0.2
