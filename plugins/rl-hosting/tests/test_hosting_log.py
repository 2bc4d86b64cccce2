"""What an engine printed, while its process is given up."""

from __future__ import annotations

import os
import threading

from rl_hosting import _log


def test_a_log_that_is_read_is_closed_afterwards(monkeypatch):
    log = _log.Log(show=False)
    os.write(log.fileno(), b"its last words")
    closing = threading.Thread(target=log.close)
    look = os.fstat

    def fstat_while_it_is_closed(descriptor):
        closing.start()
        closing.join(0.2)
        return look(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(_log.os, "fstat", fstat_while_it_is_closed)
        last = log.tail()
    assert last == "its last words"
    closing.join(10)
    assert log.tail() == ""
