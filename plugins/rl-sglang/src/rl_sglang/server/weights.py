"""Where a refit writes: a file that the server is then told to load."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl_backends.tensors import whole_pieces
from rl_core.errors import ConfigError, PluginError
from rl_core.interfaces import Piece, WeightSink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.interfaces import TensorSpec
    from rl_sglang.server.peer import Server
    from rl_sglang.server.rows import ServerRows

__all__ = ["DiskSink", "WeightFile"]

#: Names of dtypes in a safetensors file.
_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
#: Seconds for the server to let go of rows that were given up.
_DRAIN_S = 15.0
#: Bytes: as safetensors itself pads.
_ALIGNED = 8


class WeightFile:
    """All tensors of a model in one safetensors file, mapped into this process.

    It is kept from refit to refit, in a directory that this user alone can read. While it is
    written its name is one that no loader takes for weights.

    Args:
        parent: The directory for the private one; None for where temporary files go.
        specs: The tensors; aliases are left out, as in a checkpoint.

    Raises:
        ConfigError: The directory cannot be written, or has no room.
        PluginError: A tensor is of a dtype that such files do not have.
    """

    def __init__(self, parent: str | None, specs: Sequence[TensorSpec]) -> None:
        owned = [spec for spec in specs if spec.alias_of is None]
        owned.sort(key=lambda spec: -spec.torch_dtype.itemsize)  # so that all are aligned
        header: dict[str, object] = {}
        end = 0
        for spec in owned:
            if spec.dtype not in _NAMES:
                raise PluginError(
                    f"{spec.name} is {spec.dtype}, which safetensors files do not support",
                    fix="use another backend for this model",
                )
            place = [end, end + spec.nbytes]
            header[spec.name] = {
                "dtype": _NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": place,
            }
            end += spec.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _ALIGNED)
        begin = 8 + len(text)
        try:
            self.directory = Path(tempfile.mkdtemp(prefix="rl-sglang-", dir=parent)).resolve()
        except OSError as error:
            raise _unwritable(parent, error) from error
        self._remove = weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
        self._loadable = self.directory / "model.safetensors"
        self._unfinished = self.directory / "unfinished"
        try:
            file = os.open(self._unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                # A hole that cannot be filled later would end the process with a signal.
                os.posix_fallocate(file, 0, begin + end)
                self._bytes = mmap.mmap(file, begin + end)
            finally:
                os.close(file)
        except OSError as error:
            self._remove()
            raise _unwritable(parent, error) from error
        self._bytes[:begin] = len(text).to_bytes(8, "little") + text
        self.tensors: dict[str, torch.Tensor] = {}
        for spec in owned:
            if not spec.numel:
                self.tensors[spec.name] = torch.empty(spec.shape, dtype=spec.torch_dtype)
                continue
            flat = torch.frombuffer(
                self._bytes, dtype=spec.torch_dtype, count=spec.numel, offset=begin
            )
            self.tensors[spec.name] = flat.view(spec.shape)
            begin += spec.nbytes

    def begin(self) -> None:
        """From here on no loader finds the file."""
        if self._loadable.exists():
            self._loadable.rename(self._unfinished)

    def finish(self) -> None:
        """What was written is where other hosts see it, and under a name that loaders know."""
        self._bytes.flush()
        self._unfinished.rename(self._loadable)

    def close(self) -> None:
        """Removes the file and its directory. Idempotent."""
        self._remove()


class DiskSink(WeightSink):
    """Takes a refit into a file, and has the server load it at the end.

    Until :meth:`finish` the server goes on with what it has; what it has if :meth:`finish` fails
    is not known.

    Args:
        server: The server.
        rows: Its rows.
        specs: The tensors of the model. No other reaches the server: SGLang says "Success" to names
            that it does not know.
        file: Gives the file, which is made when it is first needed.
        timeout_s: Seconds for the server to load it.
    """

    casts = True

    def __init__(
        self,
        server: Server,
        rows: ServerRows,
        specs: Sequence[TensorSpec],
        file: SharedFile,
        timeout_s: float,
    ) -> None:
        self._server = server
        self._rows = rows
        self._specs = specs
        self._file = file
        self._timeout_s = timeout_s

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSink.specs`."""
        return self._specs

    def begin(self, version: int) -> None:
        """See :meth:`WeightSink.begin`.

        Raises:
            CapabilityError: The server takes no refit.
            ConfigError: There is no room for the file.
            RLError: The server is gone, or another one.
        """
        self._server.check_refit()
        self._rows.drain(_DRAIN_S)
        self._file.get(self._specs).begin()

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        """See :meth:`WeightSink.write`."""
        target = self._file.get(self._specs).tensors[name].view(-1)
        target[offset : offset + data.numel()].copy_(data)

    def pieces(self) -> Sequence[Piece] | None:
        """See :meth:`WeightSink.pieces`: the file."""
        return whole_pieces(self._file.get(self._specs).tensors)

    def finish(self, version: int) -> None:
        """See :meth:`WeightSink.finish`.

        Raises:
            RefitError: The server did not load the file.
            DeadlineError: Not in time.
            WorkerDiedError: It went away.
        """
        file = self._file.get(self._specs)
        file.finish()
        self._server.load(file.directory, version, self._timeout_s)


class SharedFile:
    """The one file of a backend, made when a refit first needs it.

    Args:
        parent: See :class:`WeightFile`.
    """

    def __init__(self, parent: str | None) -> None:
        self._parent = parent
        self._file: WeightFile | None = None

    def get(self, specs: Sequence[TensorSpec]) -> WeightFile:
        """The file for these tensors, which are always the same."""
        if self._file is None:
            self._file = WeightFile(self._parent, specs)
        return self._file

    def close(self) -> None:
        """Removes the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _unwritable(parent: str | None, error: OSError) -> ConfigError:
    return ConfigError(
        f"the weights cannot be written to {parent or tempfile.gettempdir()}: {error.strerror}",
        fix="set weights_dir to a directory that has room for the model and that the server reads",
        key="weights_dir",
    )
