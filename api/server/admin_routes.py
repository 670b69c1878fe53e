"""The endpoints for operators: load, tokenizer, prefix cache, profiles."""

from __future__ import annotations

import msgspec
from litestar import Response

from ostinato.api.base.errors import ErrorBody
from ostinato.api.http.endpoints import get_endpoint, post_endpoint
from ostinato.api.http.handlers import SharedService, json_response
from ostinato.runtime.text.tokenizer import tokenizer_facts

__all__ = ("HANDLERS",)

_CALLS: dict[int, type[msgspec.Struct]] = {409: ErrorBody, 503: ErrorBody}


class Load(msgspec.Struct, frozen=True):
    server_load: int  # requests in progress


class Success(msgspec.Struct, frozen=True):
    success: bool = True


class ProfileStarted(msgspec.Struct, frozen=True):
    directory: str


class ProfileStopped(msgspec.Struct, frozen=True):
    trace_file: str  # on the server's machine


@get_endpoint("/load", answer=Load)
async def load(service: SharedService) -> Response[bytes]:
    """The number of requests in progress."""
    return json_response(Load(service.runner.num_open))


@get_endpoint("/tokenizer_info", errors={400: ErrorBody, 503: ErrorBody})
async def tokenizer_info(service: SharedService) -> Response[bytes]:
    """The tokenizer's configuration, special tokens and chat template."""
    service.admission.check_started()
    tokenizer = service.encoder.tokenizer("tokenizer")
    return json_response(tokenizer_facts(service.client.model.tokenizer, tokenizer))


@post_endpoint("/reset_prefix_cache", answer=Success, errors=_CALLS)
async def reset_prefix_cache(service: SharedService) -> Response[bytes]:
    """Drop all cached blocks; 409 while a sequence uses some."""
    service.admission.check_started()
    await service.client.reset_prefix_cache()
    return json_response(Success())


@post_endpoint("/start_profile", answer=ProfileStarted, errors=_CALLS)
async def start_profile(service: SharedService) -> Response[bytes]:
    """Profile the engine's steps, into `server.profile_dir`."""
    service.admission.check_started()
    return json_response(ProfileStarted(await service.client.start_profile()))


@post_endpoint("/stop_profile", answer=ProfileStopped, errors=_CALLS)
async def stop_profile(service: SharedService) -> Response[bytes]:
    """End the profile; answers with the path of the trace."""
    service.admission.check_started()
    return json_response(ProfileStopped(await service.client.stop_profile()))


HANDLERS = [load, tokenizer_info, reset_prefix_cache, start_profile, stop_profile]
