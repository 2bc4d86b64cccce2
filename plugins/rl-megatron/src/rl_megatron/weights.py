"""A model's weights: read from a checkpoint, and put together for one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import distributed as dist

from rl_backends.model_files import check_files
from rl_core.errors import ConfigError
from rl_megatron.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from rl_megatron.architectures import Architecture
    from rl_megatron.sizes import Coordinates, Sizes
    from rl_megatron.table import Piece

__all__ = [
    "CheckpointFiles",
    "Gathering",
    "Owned",
    "load_weights",
    "owned_pieces",
]

_LISTED = 5
_PART_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Owned:
    """A piece, and the parameter of this rank's model that it lies in.

    Attributes:
        piece: Where the box is.
        name: The parameter's.
        parameter: Itself.
    """

    piece: Piece
    name: str
    parameter: nn.Parameter


def owned_pieces(table: Table, at: Coordinates, model: nn.Module) -> list[Owned]:
    """This rank's pieces with its parameters, each of which is all made of pieces.

    Raises:
        ConfigError: The model has parameters that the table does not know, or lacks some.
    """
    parameters = dict(model.named_parameters())
    found, used = [], set()
    for piece in table.pieces(at):
        name = next((name for name in piece.parameter if name in parameters), None)
        if name is None:
            raise ConfigError(
                f"megatron-core's model has no parameter for {piece.name}: expected one of "
                f"{', '.join(piece.parameter)}",
                fix="install a version of megatron-core that rl-megatron supports: "
                "`rl backends info megatron` shows them",
                key="model_name",
            )
        used.add(name)
        found.append(Owned(piece, name, parameters[name]))
    used |= table.padding(at)
    if left := [name for name in parameters if name not in used]:
        raise ConfigError(
            f"megatron-core's model has parameters that no tensor of the checkpoint fills: "
            f"{', '.join(left[:_LISTED])}",
            fix="install a version of megatron-core that rl-megatron supports: `rl backends info "
            "megatron` shows them",
            key="model_name",
        )
    return found


class CheckpointFiles:
    """The safetensors files of a checkpoint, of which single boxes are read.

    Args:
        directory: With ``model.safetensors``, or shards of it.

    Raises:
        ConfigError: A file is missing, truncated or no safetensors file.
    """

    def __init__(self, directory: Path) -> None:
        check_files(directory, "safetensors")
        self.directory = directory
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for file in sorted(directory.glob("*.safetensors")):
            self._open[file] = safe_open(file, framework="pt")
            self._file_of |= dict.fromkeys(self._open[file].keys(), file)

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        return tuple(self._open[self._file_of[name]].get_slice(name).get_shape())

    def table(self, architecture: Architecture) -> Table:
        """Of a model, with experts as they are named here; all tensors were checked.

        Raises:
            ConfigError: Tensors are missing, left over or of another shape; names them.
        """
        stacked = [n for n in Table(architecture).shapes() if n.endswith("experts.gate_up_proj")]
        here = not stacked or any(name in self._file_of for name in stacked)
        table = Table(architecture, "stacked" if here else "separate")
        expected = table.shapes()
        known = {*expected, *(table.tied or ())}
        found = self.names
        wrong = [f"{name} is missing" for name in expected if name not in found]
        wrong += [
            f"{name} is {list(self.shape(name))}, not {list(shape)}"
            for name, shape in expected.items()
            if name in found and self.shape(name) != shape
        ]
        wrong += [
            f"{name} has no place in the model"
            for name in sorted(found - known)
            if not name.endswith("rotary_emb.inv_freq")  # of old checkpoints; it is computed
        ]
        if wrong:
            more = f", and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
            raise ConfigError(
                f"the checkpoint {self.directory} does not fit its config.json: "
                f"{'; '.join(wrong[:_LISTED])}{more}",
                fix="save model and configuration again together with save_pretrained",
                key="model_name",
            )
        return table

    def read(self, piece: Piece) -> torch.Tensor:
        """The box of a tensor, in the dtype of the file."""
        file = self._file_of[piece.name]
        try:
            box: torch.Tensor = self._open[file].get_slice(piece.name)[piece.index]
        except SafetensorError as error:
            raise ConfigError(
                f"{piece.name} of {file} cannot be read: {error}",
                fix="copy or download the file again",
                key="model_name",
            ) from error
        return box


@torch.no_grad()
def load_weights(files: CheckpointFiles, owned: Sequence[Owned]) -> None:
    """Fills this rank's parameters with their boxes of a checkpoint, and reads nothing else."""
    for one in owned:
        one.piece.write(one.parameter, files.read(one.piece))


class Gathering:
    """Brings whole tensors to rank 0, each from the ranks that send its boxes.

    Every rank calls it for the same tensors in the same order. Rank 0 holds one tensor at a time,
    the others no more than a box.

    Args:
        table: Of the model.
        sizes: Of all ranks.
        owned: This rank's pieces.
        dtype: Of the weights.
        device: Where tensors are put together.
    """

    def __init__(
        self,
        table: Table,
        sizes: Sizes,
        owned: Sequence[Owned],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.dtype = dtype
        self._device = device
        self._rank = dist.get_rank()
        self._owned = {(one.piece.name, one.piece.box): one for one in owned}
        self._senders: dict[str, list[tuple[int, Piece]]] = {}
        for rank in range(sizes.world):
            for piece in table.pieces(sizes.coordinates(rank)):
                if piece.sends:
                    self._senders.setdefault(piece.name, []).append((rank, piece))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, in their order."""
        return {name: senders[0][1].shape for name, senders in self._senders.items()}

    def __call__(self, name: str) -> torch.Tensor | None:
        """One tensor on rank 0, None elsewhere."""
        senders = self._senders[name]
        if self._rank == 0 and [rank for rank, _ in senders] == [0]:
            return self._box(senders[0][1])
        whole: torch.Tensor | None = None
        for rank, piece in senders:
            if self._rank:
                if rank == self._rank:
                    for part in _parts(self._box(piece)):
                        dist.send(part.contiguous(), 0)
                continue
            if whole is None:
                whole = torch.empty(piece.shape, dtype=self.dtype, device=self._device)
            place = whole[piece.index]
            if rank == 0:
                place.copy_(self._box(piece))
                continue
            for part in _parts(place):
                landed = part if part.is_contiguous() else part.new_empty(part.shape)
                dist.recv(landed, rank)
                if landed is not part:
                    part.copy_(landed)
        return whole

    def _box(self, piece: Piece) -> torch.Tensor:
        one = self._owned[piece.name, piece.box]
        return piece.read(one.parameter.detach())


def _parts(box: torch.Tensor) -> Sequence[torch.Tensor]:
    """Rows that travel together: rank 0 has no room for a box beside the tensor that it is of."""
    rows = max(1, _PART_BYTES * len(box) // max(1, box.nbytes))
    return [box[start : start + rows] for start in range(0, len(box), rows)]
