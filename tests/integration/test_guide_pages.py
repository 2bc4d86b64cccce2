"""The README's and the guide's examples run, in the order of the page, on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import rl_core
from rl_conformance.models import make_tiny_model

ROOT = Path(__file__).parents[2]
GUIDE = ["choosing-a-refit", "data-and-reward", "lora", "resume"]
#: Its engines are on clusters, also of Ray.
LONG = "docs/guide/engines-and-placement.md"
PAGES = ["README.md", "docs/errors.md", "docs/reference/configuration.md"]
PAGES += [f"docs/guide/{page}.md" for page in GUIDE]


# A random model may give all completions of a prompt one reward, which is warned of.
@pytest.mark.filterwarnings("ignore:for every prompt, the rewards:rl_core.LoopWarning")
@pytest.mark.parametrize("page", [*PAGES, pytest.param(LONG, marks=pytest.mark.full)])
def test_the_examples_of_a_page_run(page: str, tmp_path: Path) -> None:
    path = str(make_tiny_model(tmp_path / "model", "qwen2", seed=0))
    names: dict[str, Any] = {**vars(rl_core), "path": path, "folder": str(tmp_path)}
    for name in ("create_policy", "create_generation", "refit"):
        names[name] = getattr(rl_core, name)
    names["policy"] = rl_core.create_policy({"backend": "hf", "model_name": path})
    generation = {"backend": "hf", "model_name": path, "max_new_tokens": 2}
    names["generation"] = rl_core.create_generation(generation)
    names["prompts"] = {"input_ids": [[5, 6]], "input_lengths": [2]}
    names["file"] = tmp_path / "rows.jsonl"
    names["file"].write_text(json.dumps({"question": "2+3=", "answer": "5"}))
    for block in re.findall(r"(?ms)^```python\n(.*?)^```$", (ROOT / page).read_text("utf-8")):
        if "cuda" in block or "apply_chat_template" in block or "offload" in block:
            continue  # needs a GPU, or the template of a chat model
        exec(block.replace('path = "', 'unused = "'), names)
