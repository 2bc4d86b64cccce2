"""Which of an engine's own arguments a configuration may pass on to it, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rl_core.config import nearest
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["ArgumentRules", "Reason"]


class Reason(NamedTuple):
    """Why an argument is refused, and what to do instead."""

    why: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class ArgumentRules:
    """Sorts the arguments of an engine, by name; what is in no table is refused, too.

    An engine takes hundreds of arguments, and some of them change what a backend promises: which
    model it is, what the log-probs are of, that a refit reaches all of it.

    Attributes:
        backend: The backend's distribution, for errors.
        key: Of the configuration that holds the arguments, such as ``"vllm_cfg.engine_args"``.
        refit_key: Of the configuration that turns refits off.
        own_keys: Arguments that have a key in the configuration, and that key.
        allowed: Neither results nor refits depend on them.
        without_refits: A refit would not reach what they make.
        refused: All others that were looked at.
    """

    backend: str
    key: str
    refit_key: str
    own_keys: Mapping[str, str]
    allowed: Collection[str]
    without_refits: Collection[str]
    refused: Mapping[str, Reason]

    def check(self, given: Collection[str], *, takes_refits: bool) -> None:
        """Refuses arguments that would change what the backend promises.

        Args:
            given: Names.
            takes_refits: Whether the engine is going to be refit.

        Raises:
            ConfigError: Names the argument, and the key to set instead if there is one.
        """
        for name in given:
            at = f"{self.key}.{name}"

            def refusal(why: str, fix: str, at: str = at) -> ConfigError:
                return ConfigError(f"'{at}' {why}", fix=fix, key=at)

            if name in self.own_keys:
                raise refusal("is set by another key", f"set {self.own_keys[name]} instead")
            if name in self.refused:
                reason = self.refused[name]
                raise refusal(f"is refused: {reason.why}", reason.fix)
            if name in self.without_refits:
                if takes_refits:
                    raise refusal(
                        "is refused: a refit cannot update what the engine derives with it",
                        f"leave it out; for an engine that takes no refits, set {self.refit_key} "
                        "to False",
                    )
            elif name not in self.allowed:
                close = nearest(name, [*self.own_keys, *self.allowed, *self.without_refits])
                meant = self.own_keys.get(close or "", f"{self.key}.{close}")
                raise refusal(
                    f"is not an engine argument that {self.backend} knows"
                    + (f", did you mean '{close}'?" if close else ""),
                    f"write {meant} instead" if close else f"remove '{at}'",
                )
