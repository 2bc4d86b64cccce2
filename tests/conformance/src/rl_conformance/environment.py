"""The versions and the machine behind a report."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_conformance.settings import Settings
    from rl_conformance.target import Target

__all__ = ["describe"]


def describe(target: Target, settings: Settings) -> dict[str, Any]:
    """Versions of everything that takes part, the device, and the time."""
    import torch

    cuda = settings.device == "cuda" and torch.cuda.is_available()
    return {
        "suite": metadata.version("rl-conformance"),
        "core": metadata.version("rl-core"),
        "contract": target.manifest.contract,
        **target.versions,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if cuda else None,
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "device": settings.device,
        "dtype": settings.dtype,
        "model": settings.model or "the suite's tiny models",
        "settings": json.dumps(own) if (own := target.own_settings(settings)) else None,
        "layouts": ", ".join(target.layouts(settings)) or None,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    }
