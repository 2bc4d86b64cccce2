"""A small local Ray for the checks that need one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["local_ray"]


@contextmanager
def local_ray() -> Generator[Any]:
    """The running Ray, or one of two CPUs that is shut down afterwards."""
    import ray

    mine = not ray.is_initialized()
    if mine:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=100 << 20,
        )
    try:
        yield ray
    finally:
        if mine:
            ray.shutdown()
