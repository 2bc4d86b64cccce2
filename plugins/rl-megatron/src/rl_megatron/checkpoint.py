"""Checkpoints of a policy: weights as Hugging Face has them, and beside them the optimizer's state.

That state is of tensors of the whole model, too, under the same names. Each rank writes the boxes
that it has and reads those that it needs, wherever they lie: any number of ranks continues what
another saved. All of it is safetensors and JSON: megatron-core's own checkpoints are pickles, and
are written by processes that it forks off a trainer with threads.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from math import prod
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import torch
from safetensors import SafetensorError, safe_open

from rl_core.errors import CheckpointError
from rl_core.weights.data.runs import flat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rl_backends.torch.optimizer import Optimizer
    from rl_megatron.sharding import Share
    from rl_megatron.table import Piece
    from rl_megatron.weights import Gathering, Owned

__all__ = ["OptimizerState", "export"]

FOLDER = "rl_training/optimizer"
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
#: Bytes of a file of weights, at most, unless one tensor is larger.
FILE_BYTES = 4 << 30


def export(
    directory: Path,
    gathering: Gathering,
    config: Mapping[str, Any],
    tokenizer: Any,
    *,
    writes: bool,
) -> None:
    """Writes the weights as a Hugging Face checkpoint; rank 0 holds one tensor at a time.

    Args:
        directory: Is there. All ranks call it with the same one.
        gathering: Gives the tensors.
        config: Contents of ``config.json``.
        tokenizer: Saved beside the model, if there is one.
        writes: Whether this is rank 0.

    Raises:
        OSError: Something could not be written; all tensors were gathered nevertheless.
    """
    width = gathering.dtype.itemsize
    files: list[list[str]] = []
    room = 0
    for name, shape in gathering.shapes.items():
        size = prod(shape) * width
        if not files or size > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(name)
        room -= size
    index: dict[str, str] = {}
    failed: OSError | None = None
    for number, held in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file = file if len(files) > 1 else "model.safetensors"
        index |= dict.fromkeys(held, file)
        shapes = {name: gathering.shapes[name] for name in held}
        with (
            _TensorFile(directory / file, shapes, gathering.dtype, {"format": "pt"})
            if writes
            else nullcontext()
        ) as written:
            for name in held:
                tensor = gathering(name)
                if written is not None and tensor is not None:
                    written.add(tensor)
        failed = failed or (written.failed if written is not None else None)
    if failed is not None:
        raise failed
    if not writes:
        return
    if len(files) > 1:
        total = sum(prod(shape) for shape in gathering.shapes.values()) * width
        listed = {"metadata": {"total_size": total}, "weight_map": index}
        (directory / "model.safetensors.index.json").write_text(json.dumps(listed, indent=1))
    dtype = str(gathering.dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=1))
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


class _TensorFile:
    """A safetensors file that is written tensor by tensor.

    What cannot be written is kept for the end: other ranks wait for this one with every tensor.

    Args:
        path: Of the file.
        shapes: Of the tensors, by name, in the order in which they come.
        dtype: Of all.
        metadata: For the header of the file.

    Attributes:
        failed: Why it is not whole.
    """

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        metadata: Mapping[str, str],
    ) -> None:
        self._path = path
        self._stream: BinaryIO | None = None
        self.failed: OSError | None = None
        code = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
        header: dict[str, Any] = {"__metadata__": metadata}
        at = 0
        for name, shape in shapes.items():
            end = at + prod(shape) * dtype.itemsize
            header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._write(len(text).to_bytes(8, "little") + text)

    def add(self, tensor: torch.Tensor) -> None:
        """The next tensor."""
        self._write(flat(tensor.cpu().contiguous()).view(torch.uint8).numpy().data)

    def _write(self, data: bytes | memoryview) -> None:
        if self.failed is None:
            try:
                self._stream = self._stream or self._path.open("wb")
                self._stream.write(data)
            except OSError as error:
                self.failed = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._stream is not None:
                self._stream.close()
        except OSError as error:
            self.failed = self.failed or error


class OptimizerState:
    """Moments and float32 weights, as boxes of the tensors of the whole model.

    Args:
        optimizer: Of this rank's parts.
        owned: This rank's pieces.
        shares: This rank's part of each parameter, in one order on all ranks.
        steps: That were taken; before the first one there are no moments.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        owned: Sequence[Owned],
        shares: Mapping[str, Share],
        steps: int,
    ) -> None:
        self._optimizer = optimizer
        self._steps = steps
        pieces: dict[str, list[Piece]] = {name: [] for name in shares}
        for one in owned:
            pieces[one.name].append(one.piece)
        halves = any(s.parameter.dtype != torch.float32 for s in shares.values())
        kinds = (*((MASTER,) if halves else ()), *(MOMENTS if steps else ()))
        self._parts = [
            (kind, name, share, pieces[name]) for name, share in shares.items() for kind in kinds
        ]

    def save(self, directory: Path, rank: int) -> None:
        """Writes the boxes that this rank is the one to give; all ranks call it.

        Args:
            directory: The same on all ranks, with :data:`FOLDER` in it.
            rank: This one.

        Raises:
            OSError: Something could not be written; all tensors were exchanged nevertheless.
        """
        sent = [(k, p) for k, _, _, pieces in self._parts for p in pieces if p.sends]
        places = {
            f"{kind}.{number}": [f"{kind}.{piece.name}", piece.shape, piece.box]
            for number, (kind, piece) in enumerate(sent)
        }
        sizes = {key: piece.sizes for key, (_, piece) in zip(places, sent, strict=True)}
        state = self._optimizer.state()
        path = directory / FOLDER / f"rank-{rank:05d}.safetensors"
        with _TensorFile(path, sizes, torch.float32, {"places": json.dumps(places)}) as file:
            for kind, name, share, pieces in self._parts:
                whole = share.whole(state.get(f"{kind}.{name}"))
                for piece in pieces:
                    if piece.sends:
                        file.add(piece.read(whole))
        if file.failed is not None:
            raise file.failed

    def read(self, directory: Path) -> dict[str, torch.Tensor]:
        """Reads what any number of ranks saved, no more than this rank's boxes.

        Returns:
            The state of this rank's parts, as :meth:`Optimizer.load_state` takes it.

        Raises:
            CheckpointError: It is of another model, or cannot be read.
        """
        stored = _stored(directory)
        state = {}
        for kind, name, share, pieces in self._parts:
            whole = torch.zeros(share.parameter.shape)
            for piece in pieces:
                piece.write(whole, _assembled(f"{kind}.{piece.name}", piece, stored))
            if name in self._optimizer.masters:
                state[f"{kind}.{name}"] = share.of(whole).clone()
        if self._steps:
            counted = torch.tensor(float(self._steps))
            state |= {f"step.{name}": counted for name in self._optimizer.masters}
        return state


#: Shape of a whole tensor, then its boxes: file, key there, and place.
_Stored = dict[str, tuple[tuple[int, ...], list[tuple[Any, str, list[tuple[int, int]]]]]]


def _stored(directory: Path) -> _Stored:
    """All boxes of a checkpoint, by the name of their state."""
    found: _Stored = {}
    for path in sorted((directory / FOLDER).glob("rank-*.safetensors")):
        try:
            file = safe_open(path, framework="pt")
            places = json.loads(file.metadata()["places"])  # type: ignore[no-untyped-call]
            for key, (name, shape, box) in places.items():
                boxes = found.setdefault(name, (tuple(shape), []))[1]
                boxes.append((file, key, [(int(first), int(after)) for first, after in box]))
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}", fix="load another checkpoint", file=str(path)
            ) from error
    return found


def _assembled(name: str, piece: Piece, stored: _Stored) -> torch.Tensor:
    """The box of a piece, from all stored boxes that meet it."""
    shape, boxes = stored.get(name, ((), []))
    if shape != piece.shape:
        found = f"has shape {list(shape)}" if boxes else "is missing"
        raise CheckpointError(
            f"{name} {found} in the checkpoint, but the model has {list(piece.shape)}",
            fix="build the policy from the model that the checkpoint was saved from",
            names=[name],
        )
    result, left = torch.empty(piece.sizes), prod(piece.sizes)
    for file, key, box in boxes:
        met = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(piece.box, box, strict=True)]
        if all(first < after for first, after in met):
            there = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(met, box, strict=True))
            here = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(met, piece.box, strict=True))
            result[here] = file.get_slice(key)[there]
            left -= result[here].numel()
    if left:
        raise CheckpointError(
            f"the files of the checkpoint do not have every element of {name} exactly once "
            f"(difference: {left})",
            fix="copy the whole checkpoint, with the files of all ranks",
            names=[name],
        )
    return result
