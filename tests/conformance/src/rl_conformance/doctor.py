"""What a backend's manifest names and is not there: faults that its authors repair.

``rl backends doctor`` of rl-core calls :func:`faults` for every backend.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import TYPE_CHECKING, is_typeddict

import importlib_metadata

from rl_core.errors import PluginError
from rl_core.plugins.discovery import load_object

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_cli.listing import BackendListing

__all__ = ["faults"]

_HEAVY = ("torch", "ray", "transformers", "vllm", "sglang", "megatron")
#: Imports a module alone, because this process has some of these already, and prints which it has.
_IMPORTED = f"""
import importlib, sys
sys.path[:] = sys.argv[2:]
importlib.import_module(sys.argv[1])
print("imported", *(name for name in {_HEAVY} if name in sys.modules))
"""


def faults(listing: BackendListing) -> Iterator[str]:
    """What is wrong with a backend's manifest; factories are not imported.

    Args:
        listing: The backend. One whose manifest cannot be loaded has no further faults.
    """
    provider, manifest = listing.provider, listing.manifest
    if manifest is None:
        return
    module = provider.value.partition(":")[0]
    command = [sys.executable, "-c", _IMPORTED, module, *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if imported := done.stdout.rpartition("imported")[2].split():
        yield f"loading its manifest imports {', '.join(imported)}, which backends import late"
    for kind, reference in manifest.configs.items():
        try:
            if not is_typeddict(load_object(reference, provider)):
                yield f"its {kind} configuration {reference} is no TypedDict"
        except PluginError as error:
            yield error.message
    for kind, reference in manifest.factories.items():
        try:
            missing = importlib.util.find_spec(reference.partition(":")[0]) is None
        except ImportError:
            missing = True
        if missing:
            yield f"its {kind} factory {reference} has no such module"
    extra = manifest.engine.extra
    try:
        metadata = importlib_metadata.metadata(provider.distribution)
        if extra and extra not in (metadata.get_all("Provides-Extra") or []):
            yield f"its manifest names the extra {extra!r}, which it does not have"
    except importlib_metadata.PackageNotFoundError:  # its metadata has no name
        yield "its metadata is incomplete"
