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
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rl_core.backends.checkpoint import STATE_FILE, read_json
from rl_core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rl_megatron.table import Piece
    from rl_megatron.weights import Gathering, Owned
    from rl_torch.optimizer import Optimizer

__all__ = ["export", "read_optimizer", "save_optimizer"]

FOLDER = "rl_training/optimizer"
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
#: Bytes of a file of weights, at most, unless one tensor is larger.
FILE_BYTES = 4 << 30


def export(
    directory: Path,
    gathering: Gathering,
    names: Mapping[str, str],
    config: Mapping[str, Any],
    tokenizer: Any,
    *,
    writes: bool,
) -> None:
    """Writes the weights as a Hugging Face checkpoint; rank 0 holds one tensor at a time.

    Args:
        directory: Is there. All ranks call it with the same one.
        gathering: Gives the tensors.
        names: The checkpoint's name of each tensor that has another than ours.
        config: What ``config.json`` says.
        tokenizer: Saved beside the model, if there is one.
        writes: Whether this is rank 0.
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
    for number, held in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file = file if len(files) > 1 else "model.safetensors"
        index |= {names.get(name, name): file for name in held}
        with (directory / file).open("wb") if writes else nullcontext() as stream:
            if stream is not None:
                stream.write(
                    _header({names.get(n, n): gathering.shapes[n] for n in held}, gathering.dtype)
                )
            for name in held:
                tensor = gathering(name)
                if stream is not None and tensor is not None:
                    flat = tensor.detach().cpu().contiguous().reshape(-1)
                    stream.write(flat.view(torch.uint8).numpy().data)
    if not writes:
        return
    if len(files) > 1:
        total = sum(prod(shape) for shape in gathering.shapes.values()) * width
        written = {"metadata": {"total_size": total}, "weight_map": index}
        (directory / "model.safetensors.index.json").write_text(json.dumps(written, indent=1))
    dtype = str(gathering.dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=1))
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    """What a safetensors file begins with: how long this is, and where each tensor lies."""
    code = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        end = at + prod(shape) * dtype.itemsize
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def save_optimizer(
    directory: Path, rank: int, optimizer: Optimizer, owned: Sequence[Owned]
) -> None:
    """Writes this rank's boxes of moments and float32 weights, if it is the one that sends them.

    Args:
        directory: The same on all ranks.
        rank: This one.
        optimizer: Of the model.
        owned: This rank's pieces.
    """
    boxes: dict[str, torch.Tensor] = {}
    places: dict[str, Any] = {}
    for kind, one, tensor in _states(owned, optimizer.state()):
        if one.piece.sends:
            key = f"{kind}.{len(boxes)}"
            boxes[key] = one.piece.read(tensor).contiguous().cpu()
            places[key] = [f"{kind}.{one.piece.name}", one.piece.shape, one.piece.box]
    (directory / FOLDER).mkdir(exist_ok=True)
    metadata = {"places": json.dumps(places)}
    save_file(boxes, directory / FOLDER / f"rank-{rank:05d}.safetensors", metadata=metadata)


def read_optimizer(
    directory: Path, optimizer: Optimizer, owned: Sequence[Owned]
) -> dict[str, torch.Tensor]:
    """Reads what :func:`save_optimizer` wrote on any number of ranks; no more than this one's part.

    Returns:
        The state of this rank's parameters, as :meth:`Optimizer.load_state` takes it.

    Raises:
        CheckpointError: It is of another model, or cannot be read.
    """
    steps = read_json(directory / STATE_FILE)["steps"]
    kinds = (MASTER, *(MOMENTS if steps else ()))
    state = {
        f"{kind}.{name}": torch.zeros_like(master, device="cpu")
        for name, master in optimizer.masters.items()
        for kind in kinds
        if kind != MASTER or master is not optimizer.parameters[name]
    }
    stored = _stored(directory)
    for kind, one, tensor in _states(owned, state):
        one.piece.write(tensor, _assembled(f"{kind}.{one.piece.name}", one.piece, stored))
    counted = torch.tensor(float(steps))
    return state | ({f"step.{name}": counted for name in optimizer.masters} if steps else {})


def _states(
    owned: Sequence[Owned], state: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, Owned, torch.Tensor]]:
    """Each kind of state that a piece has, with the tensor of its parameter."""
    for one in owned:
        for kind in (MASTER, *MOMENTS):
            if f"{kind}.{one.name}" in state:
                yield kind, one, state[f"{kind}.{one.name}"]


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
                f"{path} cannot be read: {error}", fix="use another checkpoint", file=str(path)
            ) from error
    return found


def _assembled(name: str, piece: Piece, stored: _Stored) -> torch.Tensor:
    """The box of a piece, from all stored boxes that meet it."""
    shape, boxes = stored.get(name, ((), []))
    if shape != piece.shape:
        found = f"is {list(shape)}" if boxes else "is missing"
        raise CheckpointError(
            f"{name} {found} in the checkpoint, the model has {list(piece.shape)}",
            fix="build the policy from the model the checkpoint was made with",
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
            f"{left} elements of {name} are in no file of the checkpoint, or in several",
            fix="copy the whole checkpoint, with the files of all ranks",
            names=[name],
        )
    return result
