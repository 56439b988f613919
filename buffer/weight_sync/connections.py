"""A bound on the connections of a weight server's socket, of which libzmq has none.

Whoever reaches the port may connect, also without a key, and each connection takes a file descriptor, of which
the learner needs some itself: for each version, for each part of its logs, for each checkpoint.
"""

import logging
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

logger = logging.getLogger(__name__)


class ConnectionBound:
    """Hangs up on all peers of a socket once it has `most` of them, and listens anew. Workers connect again by
    themselves, and fetch what they missed. Like the socket, it belongs to one thread."""

    def __init__(self, sock: zmq.Socket, endpoint: str, most: int) -> None:
        """`endpoint` is the one that `sock` is bound to."""
        self._sock, self._endpoint, self._most = sock, endpoint, most
        self._peers: set[int] = set()
        """File descriptors of the connections"""
        self._listening, self._closed = True, False
        address = f"inproc://connections-{id(sock)}"
        sock.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self.events = sock.context.socket(zmq.PAIR)
        """Socket that can be read when `look` is due."""
        self.events.setsockopt(zmq.RCVHWM, 0)  # else a flood would make ZeroMQ's own thread wait
        self.events.connect(address)

    def look(self) -> None:
        """Counts the connections, and does what is to be done about them. Returns at once."""
        with suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self.events.recv_multipart(zmq.NOBLOCK))
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._peers.add(event["value"])
                elif event["event"] == zmq.EVENT_DISCONNECTED:
                    self._peers.discard(event["value"])
                elif not self._listening:  # the listener is closed, and with it all connections
                    self._peers.clear()
                    self._closed = True
        if self._listening and len(self._peers) >= self._most:
            logger.warning(
                "%s: %d connections, as many as this process's limit of open files allows: hanging up on all "
                "of them; workers connect again",
                self._endpoint,
                len(self._peers),
            )
            self._sock.unbind(self._endpoint)
            self._listening = False
        if self._closed:
            # Where another process was faster, it is tried again at the next look.
            with suppress(zmq.ZMQError):
                self._sock.bind(self._endpoint)
                self._listening, self._closed = True, False
