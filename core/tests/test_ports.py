"""A port that is still free when it is used."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rl_core import ports
from rl_core.ports import free_port


def first_given_by_the_system() -> int:
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_it_is_none_that_the_system_gives_to_connections():
    if first_given_by_the_system() <= ports._FIRST:
        pytest.skip("the system gives connections all ports from which one is chosen")
    found = {free_port() for _ in range(20)}
    assert max(found) < first_given_by_the_system()
    assert len(found) > 1


def test_nobody_listens_on_it(monkeypatch):
    monkeypatch.setattr(ports, "_TRIES", 200)
    with socket.socket() as taken:
        taken.bind(("", free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports.secrets, "randbelow", lambda _: port - ports._FIRST)
        assert free_port() != port


def test_where_the_system_gives_away_all_ports_it_is_one_of_them(monkeypatch, tmp_path):
    wide = tmp_path / "range"
    wide.write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "_RANGE", wide)
    with socket.socket() as probe:
        probe.bind(("", free_port()))
