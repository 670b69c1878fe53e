"""Raw sockets that send too large headers, that send too slowly, or that send much at once."""

from __future__ import annotations

import json
import re
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.server_process import ServerProcess
from tests.waiting import PATIENCE_S, wait_until

BODY = json.dumps({"prompt": "Hi", "max_tokens": 3}).encode()
LIMIT = 64 << 10


@pytest.fixture(scope="module")
def impatient() -> Iterator[ServerProcess]:
    with ServerProcess("server.header_timeout_s=0.5", "server.body_timeout_s=0.5") as process:
        yield process


@pytest.fixture(scope="module")
def patient() -> Iterator[ServerProcess]:
    """Its limit for headers is longer than a pause of this process, so that they come in time."""
    with ServerProcess("server.header_timeout_s=4", "server.body_timeout_s=0.5") as process:
        yield process


class Connection:
    """A socket to the server."""

    def __init__(self, server: ServerProcess) -> None:
        url = httpx.URL(server.url)
        self.socket = socket.create_connection((url.host, url.port or 80), timeout=PATIENCE_S)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exception: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self) -> bytes:
        """All bytes until the server closes the connection."""
        data = b""
        with suppress(ConnectionResetError):
            while part := self.socket.recv(1 << 16):
                data += part
        return data

    def answer(self) -> tuple[int, dict]:
        """Status and body of the next answer."""
        data = b""
        while not (match := re.search(rb"content-length: (\d+)", data)) or (
            len(data.partition(b"\r\n\r\n")[2]) < int(match[1])
        ):
            part = self.socket.recv(1 << 16)
            assert part, f"closed after {data!r}"
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)

    def drip(self, data: bytes) -> None:
        """Send a byte every 0.1 s until the server answers."""
        for byte in data:
            if select.select([self.socket], [], [], 0.1)[0]:
                return
            self.send(bytes([byte]))


def head(*headers: str, length: int = len(BODY)) -> bytes:
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        *headers,
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def head_of_size(size: int) -> bytes:
    filler = size - len(head("Connection: close", "X-Filler: "))
    return head("Connection: close", "X-Filler: " + "f" * filler)


class TestHeaders:
    def test_the_limit_itself_is_taken(self, server):
        with Connection(server) as one:
            one.send(head_of_size(LIMIT) + BODY)
            status, body = one.answer()
        assert (status, body["object"]) == (200, "text_completion")

    @pytest.mark.parametrize("size", [LIMIT + 1, LIMIT + 50_000])
    def test_more_is_refused(self, server, size):
        with Connection(server) as one:
            one.send(head_of_size(size) + BODY)
            status, body = one.answer()
        assert status == 431
        assert body["error"]["code"] == "headers_too_large"
        assert "server.max_header_kib" in body["error"]["message"]

    def test_many_small_ones_and_a_long_path(self, server):
        for data in (
            b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
            b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n",
        ):
            with Connection(server) as one:
                one.send(data)
                assert one.answer()[0] == 431

    def test_300_mb_are_not_stored(self, server):
        process = psutil.Process(server.pid)
        before = process.memory_info().rss
        peak, is_over = [before], threading.Event()

        def watch() -> None:
            while not is_over.wait(0.01):
                peak.append(process.memory_info().rss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        with Connection(server) as one, suppress(ConnectionError):
            one.send(b"GET /health HTTP/1.1\r\nX-Filler: ")
            for _ in range(300):
                one.send(b"f" * (1 << 20))
        is_over.set()
        watcher.join()
        assert max(peak) - before < 16 << 20

    def test_of_a_further_request_on_the_connection(self, server):
        with Connection(server) as one:
            one.send(head() + BODY)
            assert one.answer()[0] == 200
            one.send(head_of_size(LIMIT + 1) + BODY)
            assert one.answer()[0] == 431

    def test_trailers_and_chunk_extensions(self, server):
        start = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        chunk = b"%x\r\n%s\r\n" % (len(BODY), BODY)
        long = b"t" * 100_000
        for rest in (
            chunk + b"0\r\nX-Trailer: " + long + b"\r\n\r\n",
            b"%x;name=" % len(BODY) + long + b"\r\n" + BODY + b"\r\n0\r\n\r\n",
        ):
            with Connection(server) as one:
                one.send(start + rest)
                assert one.answer()[0] == 431

    def test_refusals_are_counted(self, server):
        assert server.metrics()['ostinato_refused_requests_total{status="431"}'] >= 1


class TestTime:
    def test_headers_that_drip(self, impatient):
        with Connection(impatient) as one:
            one.drip(head_of_size(LIMIT))
            status, body = one.answer()
        assert (status, body["error"]["code"]) == (408, "headers_too_slow")

    def test_a_body_that_drips(self, patient):
        with Connection(patient) as one:
            one.send(head(length=1_000_000))
            one.drip(b" " * 1_000_000)
            status, body = one.answer()
        assert (status, body["error"]["code"]) == (408, "body_too_slow")

    def test_a_connection_that_says_nothing(self, impatient):
        with Connection(impatient) as one:
            assert one.read() == b""

    def test_an_answer_and_a_pause_may_take_longer_than_the_limits(self, patient):
        with ExitStack() as kept:
            with patient.held_engine():
                one = kept.enter_context(Connection(patient))
                one.send(head() + BODY)
                with Connection(patient) as silent:
                    assert silent.read() == b""  # the limit for headers has passed
            assert one.answer()[0] == 200
            with Connection(patient) as silent:
                assert silent.read() == b""
            one.send(head() + BODY)
            assert one.answer()[0] == 200


class TestLeaving:
    def test_the_system_looks_whether_the_client_is_there(self, server):
        """The kernel's list of sockets shows the timer that notices a vanished client."""
        with Connection(server) as one:
            one.send(head() + BODY)
            assert one.answer()[0] == 200
            (address, port), (_, own) = one.socket.getpeername(), one.socket.getsockname()
            assert address == "127.0.0.1"
            ends = f":{port:04X}", f":{own:04X}"

            def timer() -> str:
                lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
                rows = [line.split() for line in lines]
                (found,) = [row[5][:2] for row in rows if (row[1][8:], row[2][8:]) == ends]
                return found

            # Keepalive. Until the answer is acknowledged, the timer is that of a retransmission.
            wait_until(lambda: timer() == "02")

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("count", [1, 2000])
    def test_with_requests_behind_the_body(self, server, stream, count):
        """A server that is answering reads no further bytes, but notices that the client left."""
        name = f"left-{count}-{stream}"
        fields = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "stream": stream}
        body = json.dumps(fields).encode()
        server.engine.suspend()  # so that there is no answer
        try:
            with Connection(server) as one:
                one.send(head(f"X-Request-Id: {name}", length=len(body)) + body)
                one.send(b"GET /health HTTP/1.1\r\n\r\n" * count)
            assert f"{name} disconnected" in server.log_of(f"{name} ")
        finally:
            server.engine.resume()


class TestMuchAtOnce:
    def test_pipelined_requests_are_all_answered_in_order(self, server):
        requests = [
            b"GET /health HTTP/1.1\r\nX-Request-Id: number-%d\r\n%s\r\n"
            % (index, b"Connection: close\r\n" if index == 999 else b"")
            for index in range(1000)
        ]
        with Connection(server) as one:
            sender = threading.Thread(target=one.send, args=(b"".join(requests),))
            sender.start()
            answers = one.read()
            sender.join()
        names = [
            line.partition(b": ")[2]
            for line in answers.split(b"\r\n")
            if line.lower().startswith(b"x-request-id: ")
        ]
        assert names == [b"number-%d" % index for index in range(1000)]

    def test_a_body_of_one_byte_chunks(self, server):
        body = json.dumps({"prompt": "Hi", "max_tokens": 3, "user": "u" * 100_000}).encode()
        start = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        )
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        with Connection(server) as one:
            one.send(start + chunks)
            status, reply = one.answer()
        assert (status, reply["object"]) == (200, "text_completion")

    def test_not_http(self, server):
        with Connection(server) as one:
            one.send(b"\x16\x03\x01 nonsense\r\n\r\n")
            status, body = one.answer()
        assert (status, body["error"]["code"]) == (400, "invalid_http")
