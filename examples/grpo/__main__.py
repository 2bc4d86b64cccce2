"""GRPO on additions: a tiny model learns to add, whatever backends train it and generate with it.

Each step generates, grades, scores, trains, refits the engine and checks that trainer and engine
still agree. Run with ``--help`` for the options.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

from examples.preflight import check, parse_options, plain_errors, require_packages

require_packages(
    "typer", "rich", "matplotlib", "transformers", "tokenizers", "rl_core", "rl_losses"
)

import typer  # noqa: E402

from examples.grpo.loop import Settings, run  # noqa: E402
from examples.grpo.report import plot, print_summary, progress_for  # noqa: E402

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    policy: Annotated[str, typer.Option(help="Backend that trains.")] = "hf",
    policy_ranks: Annotated[
        int, typer.Option(min=1, help="Ranks that train; more than one get processes of their own.")
    ] = 1,
    policy_option: Annotated[
        list[str],
        typer.Option(metavar="KEY=VALUE", help="Of the policy's config, in JSON or as text."),
    ] = [],  # noqa: B006
    generation: Annotated[str, typer.Option(help="Backend that generates.")] = "hf",
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint to start from; a tiny one is made if absent.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Of the tiny model that is made.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="GRPO steps.")] = 100,
    warmup: Annotated[int, typer.Option(min=0, help="Supervised steps before.")] = 75,
    prompts: Annotated[int, typer.Option(min=1, help="Problems per step.")] = 64,
    samples: Annotated[int, typer.Option(min=2, help="Completions per problem.")] = 16,
    updates: Annotated[
        int, typer.Option(min=1, help="Optimizer steps per GRPO step; must divide its completions.")
    ] = 8,
    kl_penalty: Annotated[
        float, typer.Option(min=0, help="On the distance to the start; 0 needs no reference.")
    ] = 0.001,
    seed: Annotated[list[int], typer.Option(help="May be repeated: one run for each.")] = [0],  # noqa: B006
    embedded: Annotated[bool, typer.Option(help="Generate in this process, without Ray.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures.")] = None,
    plot_file: Annotated[Path, typer.Option("--plot", help="Write the curves.")] = Path(
        "out/grpo.png"
    ),
) -> None:
    """Teaches a model to add, by example and then by reward."""
    if not embedded:
        require_packages("rl_ray")
    elif policy_ranks > 1:
        require_packages("rl_hosting")
    with plain_errors():
        policy_options = parse_options(policy_option)
        check(policy=policy, generation=generation, files=[plot_file, json_file])
        runs = []
        for one_seed in seed:
            settings = Settings(
                policy=policy,
                policy_ranks=policy_ranks,
                policy_options=policy_options,
                generation=generation,
                model=model,
                layers=layers,
                steps=steps,
                warmup=warmup,
                prompts=prompts,
                samples=samples,
                updates=updates,
                kl_penalty=kl_penalty,
                seed=one_seed,
                embedded=embedded,
            )
            with tempfile.TemporaryDirectory(prefix="grpo-") as folder, progress_for(steps) as show:
                runs.append(run(settings, Path(folder), show))
    print_summary(runs)
    plot(runs, plot_file)
    if json_file is not None:
        json_file.write_text(json.dumps([one.as_dict() for one in runs], indent=1))


if __name__ == "__main__":
    app()
