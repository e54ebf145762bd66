"""A blocking socket that sends and receives whole frames, and receives while it sends."""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from dstl.rpc.protocol import MAX_FRAME, PREFIX_BYTES, frame_length
from dstl.rpc.silence import Silence
from dstl.runtime import Clock

CLOSED = "closed by the other side; if its process has ended, it may have run out of memory: its log says so"
_FRONT_BYTES = 1 << 14
"""Received at once where a frame begins: most frames are shorter, and whole then."""


class FrameSocket:
    """Frames over a connected socket. Not thread-safe.

    Both sides of a connection may send much before they receive anything. A side that waited for room to send, and did
    not receive meanwhile, would wait for ever for one that does the same: :meth:`send` receives.

    Args:
        sock: Connected.
        clock: Measures deadlines.
    """

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        self._socket = sock
        self._clock = clock
        self._silence = Silence(None)
        self._deadline: float | None = None
        self._buffer = bytearray(_FRONT_BYTES)
        self._filled = 0
        self._bodies: deque[memoryview] = deque()

    def set_timeout(self, timeout: float) -> None:
        """Fail after so many seconds of silence from now on, and by no deadline."""
        self._silence, self._deadline = Silence(timeout), None
        self._socket.settimeout(self._silence.look_s)

    def set_deadline(self, deadline: float) -> None:
        """Fail at this time of the clock, even if a byte comes now and then."""
        self._deadline = deadline

    def send(self, frame: Sequence[bytes | memoryview], *, receiving: bool = False) -> None:
        """Send a frame, given as its buffers.

        Args:
            frame: The buffers.
            receiving: Frames are due: take those that come meanwhile, for :meth:`receive`.

        Raises:
            OSError: The connection broke, or nothing moved for too long.
        """
        left = [memoryview(buffer) for buffer in frame]
        if not receiving:
            # There is room, for all before it was answered; mostly for all of it.
            self._send(left)
        if left:
            self._send_and_receive(left)

    def receive(self, limit: int = MAX_FRAME) -> memoryview:
        """Return the body of the next frame.

        Raises:
            CorruptData: Its length is above the limit.
            OSError: The connection broke, or nothing came for too long.
        """
        self._silence.moved()
        while not self._bodies:
            if self._deadline is not None:
                left = self._deadline - self._clock.now()
                if left <= 0:
                    raise TimeoutError("timed out")
                self._socket.settimeout(left)
            try:
                self._read(limit)
                self._silence.moved()
            except TimeoutError:
                if self._deadline is not None or self._silence.look():
                    raise
        return self._bodies.popleft()

    @property
    def has_input(self) -> bool:
        """True where the other side has sent something that was not received, be it the end of the connection."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(self._filled or self._bodies or poll.poll(0))

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()

    def _send(self, left: list[memoryview]) -> None:
        """Send what there is room for, all buffers at once, and leave the rest."""
        # A frame that comes in pieces wakes its receiver for each of them.
        sent = self._socket.sendmsg(left)
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]

    def _send_and_receive(self, left: list[memoryview]) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLOUT)
        self._socket.setblocking(False)
        silence = self._silence
        silence.moved()
        try:
            while left:
                ready = poll.poll(None if silence.look_s is None else silence.look_s * 1000)
                if not ready:
                    if silence.look():
                        raise TimeoutError("timed out")
                    continue
                silence.moved()
                if ready[0][1] & ~select.POLLOUT:
                    self._read(MAX_FRAME)
                if ready[0][1] & select.POLLOUT:
                    with suppress(BlockingIOError):
                        self._send(left)
        finally:
            self._socket.settimeout(silence.look_s)

    def _read(self, limit: int) -> None:
        """Receive once, and keep the bodies that are complete then."""
        try:
            got = self._socket.recv_into(memoryview(self._buffer)[self._filled :])
        except BlockingIOError:
            return
        if got == 0:
            raise ConnectionResetError(CLOSED)
        self._filled += got
        while self._filled >= PREFIX_BYTES:
            stop = PREFIX_BYTES + frame_length(bytes(self._buffer[:PREFIX_BYTES]), limit)
            frame, filled = self._buffer, self._filled
            if filled < stop:
                if len(frame) < stop:
                    self._buffer = bytearray(stop)
                    self._buffer[:filled] = frame[:filled]
                return
            self._buffer, self._filled = bytearray(max(_FRONT_BYTES, filled - stop)), filled - stop
            self._buffer[: self._filled] = frame[stop:filled]
            self._bodies.append(memoryview(frame)[PREFIX_BYTES:stop])
