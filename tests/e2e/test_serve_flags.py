"""A server that is started with the flags of `vllm serve`."""

from __future__ import annotations

import httpx

from tests.e2e.server_process import HTTP, ServerProcess
from tests.waiting import PATIENCE_S

FLAGS = (
    *("--served-model-name", "short-name", "--api-key", "k1", "--max-num-seqs", "2"),
    *("--dtype=float32", "--no-enable-prefix-caching", "--tensor-parallel-size", "1"),
)


def test_a_server_obeys_the_flags_of_vllm() -> None:
    with ServerProcess(*FLAGS) as server:
        line = next(line for line in server.output if line.startswith("run serve: "))
        assert "--served-model-name short-name is model.name=short-name" in line
        assert "--max-num-seqs 2 is scheduler.max_num_seqs=2" in line
        assert "k1" not in line
        assert HTTP.get(f"{server.url}/v1/models").status_code == 401
        client = httpx.Client(base_url=server.url, headers={"Authorization": "Bearer k1"})
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["short-name"]
        body = {"model": "short-name", "prompt": "Once upon a time", "max_tokens": 3}
        answers = [
            client.post("/v1/completions", json=body, timeout=PATIENCE_S).json() for _ in range(2)
        ]
        assert [each["usage"]["completion_tokens"] for each in answers] == [3, 3]
        assert "ostinato_prefix_cache_hits_total 0.0" in client.get("/metrics").text
