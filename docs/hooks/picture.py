"""Draws ``docs/pictures/architecture.svg``: ``python docs/hooks/picture.py``."""

from __future__ import annotations

from pathlib import Path

PICTURE = Path(__file__).parents[1] / "pictures" / "architecture.svg"
BOXES = [  # left, top, width, height, title, lines below it, colour
    (20, 20, 760, 84, "Your loop", "prompts, rewards, steps: your own, TRL's or NeMo RL's", "#e8eaf6"),
    (20, 164, 300, 130, "Policy (trains)", "hf: transformers|megatron: megatron-core, many ranks", "#e0f2f1"),
    (480, 164, 300, 130, "Engine (generates)", "hf, vllm, sglang|one or several replicas", "#fff3e0"),
    (20, 346, 760, 70, "rl-core", "interfaces, batches, refits, plugins; backends are found by name", "#f3e5f5"),
]  # fmt: skip
ARROWS = [  # from, to, text, where the text is
    ((120, 104), (120, 164), "train, get_logprobs", (128, 140, "start")),
    ((540, 104), (540, 164), "generate", (548, 126, "start")),
    ((700, 164), (700, 104), "completions, log-probs", (692, 154, "end")),
    ((320, 230), (480, 230), "refit", (400, 220, "middle")),
]


def svg() -> str:
    """The picture."""
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 436" font-family="sans-serif" '
        'font-size="14" fill="#1a1a2e">'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>'
        '<rect width="800" height="436" rx="12" fill="#ffffff"/>'
    )
    parts = [head]
    for left, top, width, height, title, lines, colour in BOXES:
        middle = left + width / 2
        parts.append(
            f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="8" '
            f'fill="{colour}" stroke="#5c6bc0"/>'
        )
        parts.append(
            f'<text x="{middle}" y="{top + 32}" text-anchor="middle" font-weight="bold" '
            f'font-size="17">{title}</text>'
        )
        parts += [
            f'<text x="{middle}" y="{top + 58 + 24 * row}" text-anchor="middle">{line}</text>'
            for row, line in enumerate(lines.split("|"))
        ]
    for (x1, y1), (x2, y2), text, (x, y, anchor) in ARROWS:
        parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#1a1a2e" '
            'stroke-width="1.6" marker-end="url(#tip)"/>'
            f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'
        )
    parts.append(
        '<text x="400" y="254" text-anchor="middle" font-size="12">all weights, verified,</text>'
        '<text x="400" y="270" text-anchor="middle" font-size="12">or none</text></svg>\n'
    )
    return "".join(parts)


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
