"""The endpoints for operators: load, tokenizer, prefix cache, profiles, engines, weights."""

from __future__ import annotations

import time

import msgspec
from litestar import Response
from litestar.params import FromPath, FromQuery
from litestar.response import Stream

from ostinato.api.base.errors import ErrorBody
from ostinato.api.http.endpoints import get_endpoint, post_endpoint
from ostinato.api.http.handlers import SharedService, json_response
from ostinato.api.service.service import Service
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.text.tokenizer import tokenizer_facts

__all__ = ("HANDLERS",)

_LONGEST_DRAIN_S = 86400.0
_REFUSED: dict[int, type[msgspec.Struct]] = dict.fromkeys((400, 403, 404, 409, 503), ErrorBody)
_CALLS: dict[int, type[msgspec.Struct]] = {409: ErrorBody, 503: ErrorBody}


class Load(msgspec.Struct, frozen=True):
    server_load: int  # requests in progress


class Success(msgspec.Struct, frozen=True):
    success: bool = True


class ProfileStarted(msgspec.Struct, frozen=True):
    directory: str


class ProfileStopped(msgspec.Struct, frozen=True):
    trace_file: str  # one line for each rank of each engine: a path on its machine


class Drained(msgspec.Struct, frozen=True):
    num_moved: int  # requests that went to other engines after the timeout


class Reloaded(msgspec.Struct, frozen=True):
    seconds: float


@get_endpoint("/load", answer=Load)
async def load(service: SharedService) -> Response[bytes] | Stream:
    """The number of requests in progress."""
    return json_response(Load(service.runner.num_open))


@get_endpoint("/tokenizer_info", errors={400: ErrorBody, 503: ErrorBody})
async def tokenizer_info(service: SharedService) -> Response[bytes] | Stream:
    """The tokenizer's configuration, special tokens and chat template."""
    service.admission.check_started()
    tokenizer = service.encoder.tokenizer("tokenizer")
    return json_response(tokenizer_facts(service.client.model.tokenizer, tokenizer))


@post_endpoint("/reset_prefix_cache", answer=Success, errors=_CALLS)
async def reset_prefix_cache(service: SharedService) -> Response[bytes] | Stream:
    """Drop all cached blocks and the history of drafters.

    Answers 409 while a sequence holds blocks, or while `cache.disk_dir` is being prepared.
    """
    service.admission.check_started()
    await service.client.reset_prefix_cache()
    return json_response(Success())


@post_endpoint("/start_profile", answer=ProfileStarted, errors=_CALLS)
async def start_profile(service: SharedService) -> Response[bytes] | Stream:
    """Begin a profile of the engine's steps. The trace is written to `server.profile_dir`."""
    service.admission.check_started()
    return json_response(ProfileStarted(await service.client.start_profile()))


@post_endpoint("/stop_profile", answer=ProfileStopped, errors=_CALLS)
async def stop_profile(service: SharedService) -> Response[bytes] | Stream:
    """End the profile; answers with the paths of the traces, one a line."""
    service.admission.check_started()
    return json_response(ProfileStopped(await service.client.stop_profile()))


@post_endpoint("/engines/{engine:int}/drain", answer=Drained, errors=_REFUSED)
async def drain_engine(
    service: SharedService, engine: FromPath[int], timeout_s: FromQuery[float | None] = None
) -> Response[bytes] | Stream:
    """Take an engine out of service: it gets no new requests, and finishes those that it has.

    Requests that have not ended after `timeout_s` (default `server.drain_timeout_s`) move to other
    engines.
    """
    _check_admin(service)
    timeout_s = _timeout(service, timeout_s)
    return json_response(Drained(await service.client.drain_engine(engine, timeout_s)))


@post_endpoint("/engines/{engine:int}/resume", answer=Success, errors=_REFUSED)
async def resume_engine(service: SharedService, engine: FromPath[int]) -> Response[bytes] | Stream:
    """Put a drained engine into service again."""
    _check_admin(service)
    service.client.resume_engine(engine)
    return json_response(Success())


@post_endpoint("/reload_weights", answer=Reloaded, errors=_REFUSED)
async def reload_weights(
    service: SharedService, timeout_s: FromQuery[float | None] = None
) -> Response[bytes] | Stream:
    """Read the weights again from the same path, one engine after the other. No request is lost.

    If another engine takes requests, the engine that is to read its weights is drained first, for
    at most `timeout_s` (default `server.drain_timeout_s`). Otherwise its requests go on in its new
    process.
    """
    _check_admin(service)
    begin = time.monotonic()
    await service.client.reload_weights(_timeout(service, timeout_s))
    return json_response(Reloaded(round(time.monotonic() - begin, 3)))


HANDLERS = [
    load,
    tokenizer_info,
    reset_prefix_cache,
    start_profile,
    stop_profile,
    drain_engine,
    resume_engine,
    reload_weights,
]


def _check_admin(service: Service) -> None:
    if not service.server.admin:
        raise InvalidRequestError(
            "server.admin=false: start the server with server.admin=true to drain engines and "
            "reload weights",
            code="call_refused",
            status=403,
        )
    service.admission.check_started()


def _timeout(service: Service, asked_s: float | None) -> float:
    if asked_s is None:
        return service.server.drain_timeout_s
    if not 0 <= asked_s <= _LONGEST_DRAIN_S:
        raise InvalidRequestError(
            f"timeout_s={asked_s:g}; it must be in [0, {_LONGEST_DRAIN_S:g}]", param="timeout_s"
        )
    return asked_s
