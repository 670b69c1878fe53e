"""The connection between a server and another machine: token, keys, and options of its sockets.

Both sides derive their keys from the token, so a user copies only one word. ZeroMQ's CURVE
(curvezmq.org) encrypts the connection. Each side knows the public key of the other side, and proves
that it has its own secret key.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import NamedTuple

import zmq
import zmq.asyncio
from zmq.utils import z85

__all__ = ("KeyPair", "configure_socket", "leader_keys", "new_token", "node_keys")

_TOKEN_BYTES = 20
# Seconds between two pings, and seconds of silence after which the other side counts as lost.
_PING_S, _SILENCE_S = 0.5, 3.0


class KeyPair(NamedTuple):
    """A Curve25519 key pair, Z85-encoded."""

    public: bytes
    secret: bytes


def new_token() -> str:
    """A secret word of 32 letters and digits for one run of a server."""
    return base64.b32encode(secrets.token_bytes(_TOKEN_BYTES)).decode()


def leader_keys(token: str) -> KeyPair:
    """The keys of the server that other machines join."""
    return _derive(token, b"leader")


def node_keys(token: str) -> KeyPair:
    """The keys of every machine that joins."""
    return _derive(token, b"node")


def configure_socket(connection: zmq.asyncio.Socket) -> None:
    """Set the options of a socket before it is bound or connected.

    By pings the socket notices within 4 s that the other side is gone. The socket's queues have no
    limit, so no message is dropped and no send waits.
    """
    connection.setsockopt(zmq.SNDHWM, 0)
    connection.setsockopt(zmq.RCVHWM, 0)
    connection.setsockopt(zmq.IPV6, 1)
    connection.setsockopt(zmq.HEARTBEAT_IVL, int(_PING_S * 1000))
    connection.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(_SILENCE_S * 1000))


def _derive(token: str, role: bytes) -> KeyPair:
    secret = z85.encode(hashlib.blake2b(token.encode(), digest_size=32, person=role).digest())
    return KeyPair(zmq.curve_public(secret), secret)
