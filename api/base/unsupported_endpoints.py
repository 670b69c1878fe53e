"""Endpoints of other servers that this server lacks, and the hint in the 404 for each."""

from __future__ import annotations

__all__ = ("INSTEAD", "hint_for")

INSTEAD = {
    "/classify": "/v1/score or /v1/rerank",
    "/embeddings": "/v1/embeddings",
    "/flush_cache": "/reset_prefix_cache",
    "/generate": "/v1/completions",
    "/generate_stream": "/v1/completions with stream=true",
    "/get_model_info": "/v1/models",
    "/health_generate": "/ready",
    "/inference/v1/generate": "/v1/completions, which takes token ids, and returns token ids if"
    " return_token_ids is true",
    "/pooling": "/v1/embeddings",
    "/server_info": "/v1/models, /version and /metrics",
    "/update_weights": "/reload_weights, which reads the weights again from the same path",
    "/v1/batches": "`run batch`, which works on OpenAI's batch files",
    "/v1/chat/completions/render": "/tokenize with messages",
    "/v1/classify": "/v1/score or /v1/rerank",
    "/v1/completions/render": "/tokenize",
    "/v1/conversations": "/v1/responses with previous_response_id",
    "/v1/detokenize": "/detokenize",
    "/v1/files": "`run batch`, which works on OpenAI's batch files",
    "/v1/tokenize": "/tokenize",
    "/v2/embed": "/v1/embeddings",
}
_MISSING_FEATURES = {
    "/collective_rpc": "calls into worker processes",
    "/generative_scoring": "scores of generated items",
    "/is_paused": "an engine that can be paused",
    "/is_sleeping": "models that can be unloaded while the server runs",
    "/pause": "an engine that can be paused",
    "/resume": "an engine that can be paused",
    "/scale_elastic_ep": "a number of engines that changes while the server runs",
    "/sleep": "models that can be unloaded while the server runs",
    "/v1/audio/speech": "text-to-speech models",
    "/v1/images/generations": "image generation",
    "/v1/moderations": "moderation models",
    "/v1/realtime": "audio models",
    "/wake_up": "models that can be unloaded while the server runs",
}


def hint_for(path: str) -> str | None:
    """The endpoint to use instead of `path`, or the feature that `path` needs, as a text.

    None for an unknown path.
    """
    path = path.rstrip("/")
    if path in INSTEAD:
        return f"use {INSTEAD[path]}"
    if path in _MISSING_FEATURES:
        return f"it needs {_MISSING_FEATURES[path]}, which this server does not have"
    return None
