"""Delay what crosses between two network interfaces, where the kernel has no netem.

    python -m benchmarks.links.delay MILLISECONDS INTERFACE INTERFACE

Every frame that one interface receives leaves by the other one, in order, after the delay. The interfaces
must not be on a bridge. The process ends by a signal. It prints a line once it passes frames on.

Linux, root or the root of a user namespace.
"""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dct_plugin.recommender.links.namespaces import Links

#: linux/if_packet.h, linux/if_ether.h, asm/socket.h.
SOL_PACKET, PACKET_ADD_MEMBERSHIP, PACKET_VNET_HDR, PACKET_MR_PROMISC = 263, 1, 15, 1
ETH_P_ALL, PACKET_OUTGOING, SO_RCVBUFFORCE = 3, 4, 33
#: Bytes that may wait to be read: 100 ms at 1 Gbit/s.
BUFFER = 1 << 24


def opened(interface: str) -> socket.socket:
    """Return a socket that receives and sends whole frames of an interface."""
    frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    # A header before each frame says that its checksum is unfinished; else the other end drops the frame.
    frames.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    frames.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    try:
        frames.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
    except PermissionError:
        print("the kernel bounds the buffer of frames; frames may be lost", file=sys.stderr)
    frames.bind((interface, ETH_P_ALL))
    request = socket.if_nametoindex(interface).to_bytes(4, sys.byteorder)
    request += PACKET_MR_PROMISC.to_bytes(2, sys.byteorder) + bytes(10)
    frames.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, request)
    frames.setblocking(False)
    return frames


def relay(seconds: float, first: socket.socket, second: socket.socket) -> None:
    """Pass frames on in both directions, for ever."""
    waiting: dict[socket.socket, deque[tuple[float, bytes]]] = {first: deque(), second: deque()}
    other = {first: second, second: first}
    while True:
        due = min((queue[0][0] for queue in waiting.values() if queue), default=None)
        timeout = None if due is None else max(0.0, due - time.monotonic())
        for ready in select.select([first, second], [], [], timeout)[0]:
            for _ in range(64):  # then those that are due are sent
                try:
                    frame, address = ready.recvfrom(1 << 17)
                except BlockingIOError:
                    break
                if address[2] != PACKET_OUTGOING:
                    waiting[other[ready]].append((time.monotonic() + seconds, frame))
        now = time.monotonic()
        for interface, queue in waiting.items():
            while queue and queue[0][0] <= now:
                with suppress(OSError):  # the interface's queue is full: as on a real link, a frame is lost
                    interface.send(queue[0][1])
                queue.popleft()


@contextmanager
def delayed(links: Links, milliseconds: float) -> Iterator[None]:
    """Delay what crosses between the two nodes of ``links`` by so much in each direction, in the block."""
    ports = [f"port0-{node}" for node in range(2)]
    for port in ports:
        links._run(-1, f"ip link set {port} nomaster")
    command = [sys.executable, "-m", "benchmarks.links.delay", str(milliseconds), *ports]
    with subprocess.Popen(links.inside(-1, command), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def main() -> None:
    """Pass frames on between the interfaces of the command line."""
    milliseconds, *interfaces = sys.argv[1:]
    first, second = map(opened, interfaces)
    print("ready", flush=True)
    relay(float(milliseconds) / 1e3, first, second)


if __name__ == "__main__":
    main()
