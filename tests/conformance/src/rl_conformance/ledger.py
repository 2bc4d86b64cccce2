"""The ledger of known failures: what fails, why, where it is tracked, and until when.

::

    [[failure]]
    check = "G10"                       # a clause, or one check of it
    reason = "the engine ignores top_k = 0"
    link = "https://example.org/issue/1"
    expires = 2027-01-31
"""

from __future__ import annotations

import datetime as dt
import tomllib
from pathlib import Path
from typing import Any

from rl_conformance.catalogue import CLAUSES
from rl_conformance.registry import all_checks
from rl_core.errors import ConfigError

__all__ = ["read_ledger"]


def read_ledger(path: str | Path, today: dt.date | None = None) -> dict[str, str]:
    """Reasons of the known failures, by check id or clause number.

    Raises:
        ConfigError: The file cannot be read, or an entry is incomplete, unknown or expired.
    """
    today = today or dt.datetime.now(dt.UTC).date()
    try:
        entries = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("failure", [])
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"the ledger {path} cannot be read: {error}", key="known_failures"
        ) from error
    return {entry["check"]: _reason(path, entry, today) for entry in entries}


def _reason(path: str | Path, entry: dict[str, Any], today: dt.date) -> str:
    missing = {"check", "reason", "link", "expires"} - set(entry)
    if missing:
        problem = f"lacks {', '.join(sorted(missing))}"
    elif entry["check"] not in {*CLAUSES, *(check.id for check in all_checks())}:
        problem = "names no clause and no check of the suite"
    elif entry["expires"] < today:
        problem = f"expired on {entry['expires']}"
    else:
        return f"{entry['reason']} ({entry['link']})"
    raise ConfigError(
        f"{path}: the known failure {entry.get('check', '?')!r} {problem}",
        fix="mend the backend, or renew the entry",
        key="known_failures",
    )
