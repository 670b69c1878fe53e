"""The bridge process, which connects rank 0 with the ranks on other machines.

A socket of this test stands in for the second machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import zmq

from ostinato.ops.parallel.exchange import Exchange
from ostinato.runtime.errors import StartupError
from ostinato.runtime.ranks.bridge_messages import (
    BridgeMessage,
    FromRank,
    Hello,
    Look,
    OpenLinks,
    Piece,
    ToRank,
    bridge_decoder,
    encode,
)
from ostinato.runtime.ranks.bridge_process import BridgeProcess
from ostinato.runtime.ranks.link_ends import RankLayout, close_all, create_links
from ostinato.runtime.ranks.messages import Idle, RankSeen, encode_frame
from ostinato.runtime.ranks.rank_process import RankLog
from ostinato.runtime.secure_connection import configure_client, new_token

LAYOUT = RankLayout(tensor=2, pipeline=1, machines=2)
SLOT_BYTES = 4096
PATIENCE_MS = 240_000
_REFUSED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


@pytest.fixture
def bridge() -> Iterator[BridgeProcess]:
    one = BridgeProcess(LAYOUT, RankLog(), "127.0.0.1", 240)
    yield one
    for rank in one.ranks:
        rank.release()
    one.end(240)
    assert one.process.returncode == 0


class Peer:
    """A machine that connects with a token."""

    def __init__(self, bridge: BridgeProcess, token: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        configure_client(self.socket, token, 240)
        self.refusals = self.socket.get_monitor_socket(_REFUSED)
        self.socket.connect(bridge.address())
        self.send(Hello(1, "other"))

    def send(self, message: BridgeMessage, *values: bytes) -> None:
        self.socket.send_multipart([encode(message), *values])

    def receive(self) -> tuple[BridgeMessage, list[bytes]]:
        assert self.socket.poll(PATIENCE_MS)
        head, *values = self.socket.recv_multipart()
        return bridge_decoder.decode(head), values

    def close(self) -> None:
        self.socket.disable_monitor()
        self.refusals.close()
        self.socket.close(linger=0)
        self._context.term()


def test_messages_and_pieces_pass_in_both_directions_until_the_machine_is_lost(
    bridge: BridgeProcess,
) -> None:
    [rank] = bridge.ranks
    links = create_links(LAYOUT, 0, SLOT_BYTES)
    peer = Peer(bridge, bridge.token)
    try:
        assert peer.receive() == (Hello(0, ""), [])
        bridge.use(links.relay)
        assert peer.receive() == (OpenLinks(SLOT_BYTES, Exchange.shared_memory), [])
        rank.socket.sendall(encode_frame(Idle()))
        assert peer.receive() == (ToRank(1), [encode_frame(Idle())[4:]])
        bridge.look(is_on=True)
        assert peer.receive() == (Look(is_on=True), [])
        peer.send(FromRank(1), encode_frame(RankSeen(True, False, 2.5))[4:])
        while rank.activity is None:
            rank.take(rank.socket.recv(1 << 12))
        assert rank.activity == (True, False, 2.5)
        peer.send(Piece(0, 1, [0]), b"values")
        os.eventfd_write(links.ranks[0][1], 1)  # rank 0 has written nothing, so nothing is sent
    finally:
        peer.close()
        close_all(links.ranks)
    while not rank.has_ended:
        rank.take(rank.socket.recv(1 << 12))
    assert rank.end(0) == ("killed", "the connection to its machine other was lost")


def test_a_machine_with_another_token_is_not_heard(bridge: BridgeProcess) -> None:
    peer = Peer(bridge, new_token())
    other = Peer(bridge, bridge.token)
    try:
        assert other.receive() == (Hello(0, ""), [])
        assert peer.refusals.poll(PATIENCE_MS)
        assert not peer.socket.poll(0)
    finally:
        peer.close()
        other.close()


def test_a_machine_is_lost_after_rank_0_has_closed_its_stream(bridge: BridgeProcess) -> None:
    peer = Peer(bridge, bridge.token)
    try:
        assert peer.receive() == (Hello(0, ""), [])
        for rank in bridge.ranks:
            rank.release()
    finally:
        peer.close()
    later = Peer(bridge, new_token())
    try:
        assert later.refusals.poll(PATIENCE_MS)  # the bridge has seen the first one leave
    finally:
        later.close()


def test_an_address_of_another_machine_is_refused() -> None:
    bridge = BridgeProcess(LAYOUT, RankLog(), "192.0.2.1", 240)
    try:
        with pytest.raises(StartupError, match=r"set parallel\.host to an address of this machine"):
            bridge.address()
    finally:
        for rank in bridge.ranks:
            rank.release()
        bridge.end(240)
