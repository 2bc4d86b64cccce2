"""Where and how a run of the suite takes place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl_core.errors import ConfigError

__all__ = ["Settings"]

#: Of the weights, by default: as in production on a GPU, strict on a CPU.
_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Settings:
    """Where and how a run takes place.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        dtype: Of the weights of the backend under test.
        model: A checkpoint to use instead of the suite's own tiny models.
        timeout_s: Seconds that each check may take, in place of its own limit.
        url: Of a server that runs already, and that serves ``model``.
        layouts: Which layouts over ranks are tried, see :meth:`Target.layouts`.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "float32"
    model: str | None = None
    timeout_s: float | None = None
    url: str | None = None
    layouts: Literal["few", "all"] = "few"

    @classmethod
    def of(
        cls,
        device: Literal["cpu", "cuda"],
        dtype: str | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        url: str | None = None,
        layouts: Literal["few", "all"] = "few",
    ) -> Settings:
        """Settings; by default with the device's usual dtype.

        Raises:
            ConfigError: The model is no directory of a checkpoint, or missing beside a URL.
        """
        if url is not None and model is None:
            raise ConfigError(
                "--url needs --model: the checkpoint that the server serves",
                fix="add --model PATH; the server must serve that directory",
                key="model",
            )
        if model is not None and not Path(model, "config.json").is_file():
            raise ConfigError(
                f"{model} holds no config.json",
                fix="give the directory of a Hugging Face checkpoint",
                key="model",
            )
        return cls(device, dtype or _DTYPES[device], model, timeout_s, url, layouts)

    def options(self) -> list[str]:
        """Of `rl conformance run`, where these are not what it does without."""
        given = {
            "device": self.device,
            "dtype": self.dtype,
            "model": self.model,
            "timeout": f"{self.timeout_s:g}" if self.timeout_s else None,
            "url": self.url,
            "layouts": self.layouts,
        }
        usual = {"device": "cpu", "dtype": _DTYPES[self.device], "layouts": "few"}
        return [
            part
            for key, value in given.items()
            if value is not None and value != usual.get(key)
            for part in (f"--{key}", value)
        ]
