"""``python -m rl_cli``, for environments whose scripts are not on the path."""

import sys

from rl_cli import main

sys.exit(main())
