"""Requests made up from the OpenAPI document against a real server: no 5xx, no answer that the
document does not describe.
"""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.made_up_requests import ask_all
from tests.e2e.server_process import ServerProcess
from tests.models.minilm import minilm_directory

# A made-up request rarely asks for little; a long answer would show nothing more.
LIMITS = ("sampling.max_tokens=4", "model.max_model_len=64", "scheduler.max_num_seqs=8")
ENCODER = (f"model.path={minilm_directory()}", "graphs.bundle=false")


def check(seen: dict[str, set[int]], url: str, *answered: str) -> None:
    """All was asked, and `answered` could be."""
    assert len(seen) >= 25
    assert not [name for name, statuses in seen.items() if max(statuses) >= 500]
    assert [name for name in answered if 200 not in seen[name]] == []
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200


def test_made_up_requests():
    with ServerProcess(*LIMITS) as server:
        seen = ask_all(server.url, 5)
        check(seen, server.url, "GET /health", "GET /tokenizer_info", "POST /reset_prefix_cache")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("overrides", "answered"),
    [
        ((), ["POST /v1/completions", "POST /v1/embeddings", "POST /v1/rerank", "POST /tokenize"]),
        (ENCODER, ["POST /v1/embeddings", "POST /v1/rerank", "POST /tokenize"]),
    ],
    ids=["generates", "embeds"],
)
def test_many_made_up_requests(overrides, answered):
    with ServerProcess(*LIMITS, *overrides) as server:
        check(ask_all(server.url, 150), server.url, *answered)
