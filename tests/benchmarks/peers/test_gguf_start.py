"""The time of a server's start, with servers that are small programs."""

from __future__ import annotations

import sys
import time

import pytest

from ostinato.benchmarks.peers.gguf_start import first_answer_s

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

statuses = [int(status) for status in sys.argv[2].split(",")]

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(statuses.pop(0))
        self.send_header("Content-Length", "0")
        self.end_headers()

print("this is the log", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def _command(statuses: str):
    return lambda port: [sys.executable, "-c", SERVER, str(port), statuses]


def test_it_waits_until_a_request_is_answered():
    began = time.monotonic()
    seconds = first_answer_s(_command("503,503,200"))
    assert 0 < seconds <= time.monotonic() - began


def test_a_refusal_ends_the_measurement():
    with pytest.raises(RuntimeError, match=r"status 404\): this is the log"):
        first_answer_s(_command("503,404"))


def test_a_server_that_ends():
    with pytest.raises(RuntimeError, match=r"gave no completion .*: no such model"):
        first_answer_s(lambda port: [sys.executable, "-c", "exit('no such model')"])
