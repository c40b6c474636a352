"""Byte counters of the machine's network interfaces: what crossed, whatever sent it."""

from __future__ import annotations

from collections.abc import Sequence

import psutil


def interface_bytes(names: Sequence[str] | None = None) -> dict[str, tuple[int, int]]:
    """Return the bytes that each network interface received and sent since it came up: ``{name: (rx, tx)}``.

    Args:
        names: Interfaces to look at; None for all of them. On the loopback interface every byte counts once
            as sent and once as received.

    Raises:
        ValueError: An interface does not exist.
    """
    found = psutil.net_io_counters(pernic=True, nowrap=False)
    if names is not None and (missing := [name for name in names if name not in found]):
        raise ValueError(f"no network interface {missing[0]!r}; there are {', '.join(sorted(found))}")
    wanted = found if names is None else names
    return {name: (found[name].bytes_recv, found[name].bytes_sent) for name in wanted}


class InterfaceCounter:
    """Bytes that crossed network interfaces between :meth:`start` and :meth:`stop`.

    Attributes:
        rx, tx: Bytes received and sent, all interfaces together.
        per_interface: ``{name: (rx, tx)}``.
    """

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self.names = names
        self.rx = self.tx = 0
        self.per_interface: dict[str, tuple[int, int]] = {}
        self._begin = interface_bytes(names)

    def start(self) -> None:
        self._begin = interface_bytes(self.names)

    def stop(self) -> InterfaceCounter:
        begin = self._begin
        self.per_interface = {
            name: (rx - begin.get(name, (0, 0))[0], tx - begin.get(name, (0, 0))[1])
            for name, (rx, tx) in interface_bytes(self.names).items()
        }
        self.rx = sum(rx for rx, _ in self.per_interface.values())
        self.tx = sum(tx for _, tx in self.per_interface.values())
        return self
