"""``python -m rl_core.cli``, for environments whose scripts are not on the path."""

from rl_core.cli import main

main()
