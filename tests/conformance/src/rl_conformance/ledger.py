"""The ledger of known failures: what fails, why, where it is tracked, and until when.

::

    [[failure]]
    check = "G10/frequencies_match_the_distribution[top_k]"  # as `rl conformance list` shows it
    reason = "the engine ignores top_k = 0"
    link = "https://example.org/issue/1"
    expires = 2027-01-31

An entry holds for one check: a failure that nobody expects cannot hide behind one that is known.
"""

from __future__ import annotations

import datetime as dt
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rl_conformance.registry import all_checks
from rl_core.config import nearest
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["read_ledger"]


class _Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry."""

    check: str
    reason: str
    link: str
    expires: dt.date


class _Ledger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    failure: tuple[_Failure, ...] = ()


def read_ledger(path: str | Path, today: dt.date | None = None) -> dict[str, str]:
    """Reasons of the known failures, by check id.

    Raises:
        ConfigError: The file cannot be read, or an entry is incomplete, unknown, double or expired.
    """
    today = today or dt.datetime.now(dt.UTC).date()
    try:
        text = Path(path).read_text(encoding="utf-8")
        ledger = msgspec.convert(tomllib.loads(text), _Ledger)
    except (OSError, UnicodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"the ledger {path} cannot be read: {error}",
            fix="an entry is [[failure]] with check, reason, link and expires (a date)",
            key="known_failures",
        ) from error
    if problems := list(_problems(ledger, today)):
        raise ConfigError(
            f"{path}: {'; '.join(problems)}",
            fix="mend the backend, or renew or remove the entry",
            key="known_failures",
        )
    return {entry.check: f"{entry.reason} ({entry.link})" for entry in ledger.failure}


def _problems(ledger: _Ledger, today: dt.date) -> Iterator[str]:
    known, seen = [check.id for check in all_checks()], set()
    for entry in ledger.failure:
        name = f"the known failure {entry.check!r}"
        if entry.check not in known:
            close = nearest(entry.check, known)
            hint = f"; did you mean {close!r}?" if close else ""
            yield f"{name} names no check of the suite{hint}"
        if entry.check in seen:
            yield f"{name} is listed twice"
        if not (entry.reason.strip() and entry.link.strip()):
            yield f"{name} has no reason or no link"
        if entry.expires < today:
            yield f"{name} expired on {entry.expires}"
        seen.add(entry.check)
