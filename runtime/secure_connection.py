"""A connection between two machines: token, keys, and options of its sockets.

Both sides derive their keys from the token, so a user copies only one word. ZeroMQ's CURVE
(curvezmq.org) encrypts the connection. Each side knows the public key of the other side, and proves
that it has its own secret key.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import socket
from typing import Any, NamedTuple, Protocol

import zmq
from zmq.utils import z85

__all__ = (
    "SILENCE_S",
    "KeyPair",
    "configure_client",
    "interface_of",
    "leader_keys",
    "listen",
    "new_token",
    "node_keys",
    "own_address",
    "reached_at",
)

SILENCE_S = 3.0  # a side that is silent for longer counts as lost
_TOKEN_BYTES = 20
_PINGS = 6  # pings within `silence_s`
_ANY = ("", "0.0.0.0", "::", "*")  # values of `parallel.host` that name no single address


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


class _Authenticator(Protocol):
    """The method of ZeroMQ's authenticators that is used here."""

    def configure_curve_callback(self, domain: str, credentials_provider: Any) -> None: ...


class _OneKey:
    """Lets a client connect only if it has the secret key that belongs to this public key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


def listen(
    connection: zmq.Socket[Any],
    authenticator: _Authenticator,
    token: str,
    host: str,
    silence_s: float,
) -> str:
    """Bind a socket to a free port, for clients that have the token.

    Args:
        connection: the socket of the side that listens.
        authenticator: a started authenticator of the socket's context.
        token: the token of this run.
        host: the address to listen at, as `parallel.host`; empty = that of the default route.
        silence_s: seconds after which the other side counts as gone.

    Returns:
        `tcp://HOST:PORT`, at which other machines reach the socket.

    Raises:
        zmq.ZMQError: the address is not one of this machine.
    """
    authenticator.configure_curve_callback("*", _OneKey(node_keys(token).public))
    connection.setsockopt(zmq.CURVE_SERVER, 1)
    _configure(connection, leader_keys(token), silence_s)
    host = host or own_address()
    port = connection.bind_to_random_port(f"tcp://{_bracketed(host)}")
    return f"tcp://{_bracketed(reached_at(host))}:{port}"


def configure_client(connection: zmq.Socket[Any], token: str, silence_s: float) -> None:
    """Set the options of a socket before it is connected.

    Args:
        connection: the socket of the side that connects.
        token: the token of the run that this side joins.
        silence_s: seconds after which the other side counts as gone.
    """
    connection.setsockopt(zmq.CURVE_SERVERKEY, leader_keys(token).public)
    _configure(connection, node_keys(token), silence_s)


def _configure(connection: zmq.Socket[Any], keys: KeyPair, silence_s: float) -> None:
    connection.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    connection.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    # The queues have no limit, so that no message is dropped and no send waits.
    connection.setsockopt(zmq.SNDHWM, 0)
    connection.setsockopt(zmq.RCVHWM, 0)
    connection.setsockopt(zmq.IPV6, 1)
    connection.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(silence_s * 1000 / _PINGS)))
    connection.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(silence_s * 1000)))


def reached_at(host: str) -> str:
    """The address at which other machines reach this one, if its `parallel.host` is `host`."""
    return own_address() if host in _ANY else host


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this address; None if no interface has it."""
    import psutil  # only machines with ranks need it

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return None


def own_address(towards: str = "192.0.2.1") -> str:
    """The address of this machine on its route to another machine; 127.0.0.1 without a route.

    Args:
        towards: address of the other machine; the default is on the default route.
    """
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # sends nothing
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def _bracketed(host: str) -> str:
    """A host as it is written in an address."""
    return f"[{host}]" if ":" in host else host


def _derive(token: str, role: bytes) -> KeyPair:
    secret = z85.encode(hashlib.blake2b(token.encode(), digest_size=32, person=role).digest())
    return KeyPair(zmq.curve_public(secret), secret)
