"""A picture of a plan: the bytes between trainer ranks and engine ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["heat_map"]

#: Squares in each direction, at most; with more ranks, neighbours share one.
_SQUARES = 64
_SIZE, _LEFT, _TOP = 10, 70, 60


def heat_map(pairs: Sequence[int], trainer: int, engine: int, title: str) -> str:
    """Draws one square for each pair of ranks, darker the more bytes go between them.

    Args:
        pairs: Bytes from each trainer rank to each engine rank, one trainer rank after another.
        trainer: Ranks.
        engine: Ranks.
        title: Above the picture.

    Returns:
        SVG, with the ranks and bytes of each square as its tooltip.
    """
    down, right = (-(-ranks // _SQUARES) for ranks in (trainer, engine))
    squares: dict[tuple[int, int], int] = {}
    for number, nbytes in enumerate(pairs):
        if nbytes:
            source, sink = divmod(number, engine)
            at = source // down, sink // right
            squares[at] = squares.get(at, 0) + nbytes
    rows, columns = -(-trainer // down), -(-engine // right)
    most = max(squares.values(), default=1)
    width, height = max(columns * _SIZE, 400) + 2 * _LEFT, max(rows * _SIZE, 140) + _TOP + 40
    turned = f'text-anchor="end" transform="rotate(-90 {_LEFT - 10} {_TOP})"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">',
        "<style>text {font: 12px sans-serif}</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20">{title}</text>',
        f'<text x="{_LEFT}" y="{_TOP - 8}">engine ranks 0 to {engine - 1}</text>',
        f'<text x="{_LEFT - 10}" y="{_TOP}" {turned}>trainer ranks 0 to {trainer - 1}</text>',
    ]
    for (row, column), nbytes in sorted(squares.items()):
        lines.append(
            f'<rect x="{_LEFT + column * _SIZE}" y="{_TOP + row * _SIZE}" width="{_SIZE - 1}" '
            f'height="{_SIZE - 1}" fill="#1b3a8a" fill-opacity="{0.08 + 0.92 * nbytes / most:.2f}">'
            f"<title>trainer {_range(row, down, trainer)} to engine "
            f"{_range(column, right, engine)}: {nbytes:,} bytes</title></rect>"
        )
    lines.append(
        f'<text x="{_LEFT}" y="{height - 12}">darkest square: {most / 1e9:.3g} GB</text></svg>'
    )
    return "\n".join(lines) + "\n"


def _range(square: int, each: int, ranks: int) -> str:
    first, last = square * each, min(ranks, (square + 1) * each) - 1
    return str(first) if first == last else f"{first}-{last}"
