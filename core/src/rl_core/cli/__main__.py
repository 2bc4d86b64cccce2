"""``python -m rl_core.cli``, for environments whose scripts are not on the path."""

import sys

from rl_core.cli import main

sys.exit(main())
