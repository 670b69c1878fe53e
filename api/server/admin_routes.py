"""The endpoints for whoever runs the server: its load, its tokenizer, its cache, a profile."""

from __future__ import annotations

import msgspec
from litestar import Response, get, post

from ostinato.api.base.errors import ErrorBody
from ostinato.api.http.handlers import SharedService, json_response
from ostinato.api.http.openapi import answer_of
from ostinato.runtime.text.tokenizer import tokenizer_facts

__all__ = ("ADMIN_HANDLERS",)

_CALLS: dict[int, type[msgspec.Struct]] = {409: ErrorBody, 503: ErrorBody}


class Load(msgspec.Struct, frozen=True):
    server_load: int  # requests that are being answered


class Success(msgspec.Struct, frozen=True):
    success: bool = True


class ProfileStarted(msgspec.Struct, frozen=True):
    directory: str


class ProfileStopped(msgspec.Struct, frozen=True):
    trace_file: str  # on the server's machine


@get("/load", operation_class=answer_of(Load, "/load"))
async def load(service: SharedService) -> Response[bytes]:
    """How many requests are being answered."""
    return json_response(Load(service.num_open))


@get(
    "/tokenizer_info",
    operation_class=answer_of(None, "/tokenizer_info", errors={400: ErrorBody, 503: ErrorBody}),
)
async def tokenizer_info(service: SharedService) -> Response[bytes]:
    """The tokenizer's configuration, special tokens and chat template."""
    service.check_started()
    tokenizer = service.tokenizer("tokenizer")
    return json_response(tokenizer_facts(service.client.model.tokenizer, tokenizer))


@post(
    "/reset_prefix_cache",
    status_code=200,
    operation_class=answer_of(Success, "/reset_prefix_cache", method="post", errors=_CALLS),
)
async def reset_prefix_cache(service: SharedService) -> Response[bytes]:
    """Forget cached blocks; 409 while sequences use some."""
    service.check_started()
    await service.client.reset_prefix_cache()
    return json_response(Success())


@post(
    "/start_profile",
    status_code=200,
    operation_class=answer_of(ProfileStarted, "/start_profile", method="post", errors=_CALLS),
)
async def start_profile(service: SharedService) -> Response[bytes]:
    """Record the engine's steps, into `server.profile_dir`."""
    service.check_started()
    return json_response(ProfileStarted(await service.client.start_profile()))


@post(
    "/stop_profile",
    status_code=200,
    operation_class=answer_of(ProfileStopped, "/stop_profile", method="post", errors=_CALLS),
)
async def stop_profile(service: SharedService) -> Response[bytes]:
    """End the recording; where the trace is."""
    service.check_started()
    return json_response(ProfileStopped(await service.client.stop_profile()))


ADMIN_HANDLERS = [load, tokenizer_info, reset_prefix_cache, start_profile, stop_profile]
