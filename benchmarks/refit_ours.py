"""Our refits as a method of ``refit_pair.py``: one clock with everybody else's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refit_bench.engine import Tensors as Model
from refit_pair import Contender, Method, Tensors

from rl_core.futures import wait
from rl_core.weights import RefitReceiver, RefitSender

__all__ = ["OURS"]

DEADLINE_S = 60.0


class Refit(Method):
    """A refit as :class:`rl_core.weights.SendOptions` tells it."""

    def __init__(self, folder: Path, transport: str = "ipc", **options: Any) -> None:
        super().__init__(folder)
        self.transport, self.options = transport, options
        self.sender: RefitSender | None = None
        self.receiver: RefitReceiver | None = None

    def send(self, tensors: Tensors, tell: Callable[[Any], None]) -> None:
        if self.sender is None:
            model = Model(tensors)
            self.sender = RefitSender(lambda: model, name="trainer")
            tell(self._info(self.sender))
        else:
            tell(None)
        options = {"transport": self.transport, "deadline_s": DEADLINE_S, **self.options}
        wait(self.sender.send(**options), DEADLINE_S)

    def _info(self, sender: RefitSender) -> dict[str, Any]:
        info = sender.prepare()
        if self.transport == "collective":
            sender.open("collective", DEADLINE_S, ip=info["host"], port=info["port"], receivers=1)
            info = sender.prepare()
        return info

    def load(self, told: dict[str, Any] | None, targets: Tensors) -> None:
        if self.receiver is None:
            model = Model(targets)
            self.receiver = RefitReceiver(lambda: model, name="engine", lock=threading.RLock())
            self.receiver.prepare(told)
        wait(self.receiver.receive(transport=self.transport, deadline_s=DEADLINE_S), DEADLINE_S)

    def leave(self) -> None:
        for end in (self.sender, self.receiver):
            if end is not None:
                end.close()


def contender(name: str, *, copies: int, **options: Any) -> Contender:
    """One way to refit, under a name."""
    ways = {"": lambda folder, _: Refit(folder, **options)}
    return Contender(name, ways, kind="ours", copies=copies)


OURS = [
    *(
        contender(f"{mode}, verify={verify}", copies=copies, mode=mode, verify=verify)
        for mode, copies in (("direct", 1), ("packed", 2))
        for verify in ("none", "wire", "installed")
    ),
    contender("packed, verify=wire, staged", copies=2, mode="packed", isolation="staged"),
    contender("collective, verify=wire", copies=2, mode="packed", transport="collective"),
]
