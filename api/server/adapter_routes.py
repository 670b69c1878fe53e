"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`: vLLM's endpoints to change adapters."""

from __future__ import annotations

import logging
import time

import msgspec
from litestar import Response

from ostinato.api.base.errors import ErrorBody
from ostinato.api.http.endpoints import post_endpoint
from ostinato.api.http.handlers import HttpRequest, SharedService, json_body
from ostinato.api.schemas.body_decoding import decode
from ostinato.api.service.service import Service
from ostinato.runtime.client.adapter_loading import check_runtime_loading

__all__ = ("HANDLERS",)

_LOG = logging.getLogger("ostinato.api")
_TEXT = "text/plain"
_REFUSED: dict[int, type[msgspec.Struct]] = {403: ErrorBody, 409: ErrorBody}


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/load_lora_adapter`."""

    lora_name: str  # requests name the adapter so
    lora_path: str  # a directory in `lora.directory`; a relative path begins there
    load_inplace: bool = False  # replace a loaded adapter of this name


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str


@post_endpoint("/v1/load_lora_adapter", body=LoadAdapterRequest, errors=_REFUSED, media_type=_TEXT)
async def load_adapter(request: HttpRequest, service: SharedService) -> Response[bytes]:
    """Load an adapter from a directory in `lora.directory`. Other requests go on meanwhile."""
    data = await json_body(request)
    _check_allowed(service)
    body = decode(data, LoadAdapterRequest, {})
    begin = time.monotonic()
    adapter = await service.client.load_adapter(
        body.lora_name, body.lora_path, in_place=body.load_inplace
    )
    seconds = time.monotonic() - begin
    _LOG.info(
        "adapter %r is loaded: %s, slot %d, %.3f s",
        adapter.name,
        adapter.path,
        adapter.slot,
        seconds,
    )
    return _success(f"LoRA adapter '{adapter.name}' added successfully.")


@post_endpoint(
    "/v1/unload_lora_adapter", body=UnloadAdapterRequest, errors=_REFUSED, media_type=_TEXT
)
async def unload_adapter(request: HttpRequest, service: SharedService) -> Response[bytes]:
    """Unload an adapter. Requests that have named it end as if it were still loaded."""
    data = await json_body(request)
    _check_allowed(service)
    body = decode(data, UnloadAdapterRequest, {})
    adapter = service.client.adapters.get(body.lora_name)
    begin = time.monotonic()
    await service.client.unload_adapter(body.lora_name)
    seconds = time.monotonic() - begin
    if adapter is not None:
        _LOG.info(
            "adapter %r is unloaded: %s, slot %d, %.3f s",
            adapter.name,
            adapter.path,
            adapter.slot,
            seconds,
        )
    return _success(f"LoRA adapter '{body.lora_name}' removed successfully.")


HANDLERS = [load_adapter, unload_adapter]


def _success(text: str) -> Response[bytes]:
    return Response(f"Success: {text}".encode(), media_type=_TEXT)


def _check_allowed(service: Service) -> None:
    check_runtime_loading(service.lora)
    service.admission.check_started()
