"""Endpoints that other servers have and this one does not, and the hint that their 404 gives."""

from __future__ import annotations

__all__ = ("hint_for",)

_INSTEAD = {
    "/classify": "/v1/score or /v1/rerank",
    "/embeddings": "/v1/embeddings",
    "/flush_cache": "/reset_prefix_cache",
    "/generate": "/v1/completions",
    "/generate_stream": "/v1/completions with stream=true",
    "/get_model_info": "/v1/models",
    "/health_generate": "/ready",
    "/inference/v1/generate": "/v1/completions, which takes token ids and gives them with"
    " return_token_ids",
    "/ping": "/health",
    "/pooling": "/v1/embeddings",
    "/server_info": "/v1/models, /version and /metrics",
    "/v1/batches": "`run batch`, which works on OpenAI's batch files",
    "/v1/chat/completions/render": "/tokenize with messages",
    "/v1/classify": "/v1/score or /v1/rerank",
    "/v1/completions/render": "/tokenize",
    "/v1/detokenize": "/detokenize",
    "/v1/files": "`run batch`, which works on OpenAI's batch files",
    "/v1/tokenize": "/tokenize",
    "/v2/embed": "/v1/embeddings",
}
_NEEDS = {
    "/collective_rpc": "calls into workers",
    "/generative_scoring": "log-probabilities of chosen tokens",
    "/invocations": "the dialect of another host; name the endpoint itself",
    "/is_paused": "pauses",
    "/is_sleeping": "models that sleep",
    "/pause": "pauses",
    "/resume": "pauses",
    "/scale_elastic_ep": "several engines",
    "/sleep": "models that sleep",
    "/update_weights": "weights that change while it runs",
    "/v1/audio/speech": "models that speak",
    "/v1/audio/transcriptions": "models that hear",
    "/v1/audio/translations": "models that hear",
    "/v1/images/generations": "models that draw",
    "/v1/load_lora_adapter": "adapters",
    "/v1/moderations": "models that moderate",
    "/v1/realtime": "models that hear",
    "/v1/unload_lora_adapter": "adapters",
    "/wake_up": "models that sleep",
}


def hint_for(path: str) -> str | None:
    """What to use instead of `path`, or what it needs; None for a path that no server has."""
    path = path.rstrip("/")
    if path in _INSTEAD:
        return f"use {_INSTEAD[path]}"
    if path in _NEEDS:
        return f"it needs {_NEEDS[path]}, which this server does not have"
    return None
