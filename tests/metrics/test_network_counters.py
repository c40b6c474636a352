"""Byte counters of network interfaces."""

from __future__ import annotations

import socket
import threading

import pytest

from dct_plugin.metrics.network_counters import InterfaceCounter, interface_bytes


def test_interface_counter_counts_loopback_traffic() -> None:
    size, counter = 1 << 20, InterfaceCounter(["lo"])
    counter.start()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as other,
    ):
        sender = threading.Thread(target=client.sendall, args=(bytes(size),))
        sender.start()
        left = size
        while left:
            left -= len(other.recv(1 << 16))
        sender.join()
    counter.stop()
    assert counter.tx >= size  # other processes may use the interface as well
    assert counter.per_interface["lo"] == (counter.rx, counter.tx)


def test_interfaces_by_name() -> None:
    assert interface_bytes(["lo"]).keys() == {"lo"}
    with pytest.raises(ValueError, match=r"no network interface 'nope0'; there are .*lo"):
        interface_bytes(["nope0"])
