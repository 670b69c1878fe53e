"""The web page at `/`, and the state of the engine at `/debug`.

The page needs only files of this package. The Content-Security-Policy header forbids the browser to
load other files or to run inline scripts. So text of a model cannot run code.
"""

from __future__ import annotations

import asyncio
import time
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import msgspec
from litestar import Response, get
from litestar.params import FromPath, FromQuery
from litestar.response import Stream

from ostinato.api.base.errors import ErrorBody
from ostinato.api.http.auth import OPEN
from ostinato.api.http.endpoints import get_endpoint
from ostinato.api.http.handlers import SharedService, json_response
from ostinato.api.observability.engine_metrics import ReplicaView
from ostinato.api.observability.recent_latency import Percentiles
from ostinato.api.observability.resource_usage import MachineUse
from ostinato.api.service.service import Service
from ostinato.runtime.engine.engine_state import EngineState
from ostinato.runtime.engine.flight_recorder import as_json
from ostinato.runtime.errors import EngineDeadError, InvalidRequestError
from ostinato.runtime.types.engine_info import RankInfo, ReplicaStatus, ServedTask

__all__ = ("HANDLERS",)

_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
        " connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_INSPECT_S = 2.0


class PageModel(msgspec.Struct, frozen=True):
    """Facts about the model for the page's chat."""

    name: str
    max_model_len: int
    can_generate: bool
    can_chat: bool  # whether there is a chat template


class PageEngine(msgspec.Struct, frozen=True):
    """One of the engines."""

    status: ReplicaStatus
    num_running: int
    num_waiting: int
    kv_cache_usage: float  # share of the KV blocks in use
    resident_bytes: int | None  # memory of the process; None = no process runs


class PageRank(msgspec.Struct, frozen=True):
    """One rank of the shown engine."""

    plan: RankInfo
    resident_bytes: int | None  # memory of the process; None = no process runs


class PageState(msgspec.Struct, frozen=True):
    """The answer of `/debug/state`."""

    time: float  # seconds of time.monotonic()
    problem: str | None  # why the engine does not serve, or why its state cannot be read
    model: PageModel | None  # None until the engine has started
    stats: dict[str, Any]  # `EngineStats` as an object with names
    engine: dict[str, Any] | None  # `EngineState` as an object with names, without its stats
    engine_pid: int | None
    engines: list[PageEngine]  # empty if there is only one engine
    ranks: list[PageRank]  # ranks of the shown engine; empty = the model is not divided
    live: dict[str, Percentiles | None]  # latencies of the last 10 s
    use: MachineUse


@get("/", include_in_schema=False, opt={OPEN: True})
async def page() -> Response[bytes]:
    """The page."""
    return _file("index.html")


@get("/page/{name:str}", include_in_schema=False, opt={OPEN: True})
async def page_file(name: FromPath[str]) -> Response[bytes]:
    """A file of the page."""
    return _file(name)


@get_endpoint("/debug/state", answer=PageState, errors={400: ErrorBody})
async def debug_state(
    service: SharedService, engine: FromQuery[int] = 0
) -> Response[bytes] | Stream:
    """The present state of one engine. It contains no text and no tokens of requests."""
    return json_response(await _state(service, _checked(service, engine)))


@get_endpoint("/debug/flight", errors={400: ErrorBody})
async def debug_flight(
    service: SharedService, engine: FromQuery[int] = 0
) -> Response[bytes] | Stream:
    """The last steps of an engine, from the flight recorder. Works even if the engine hangs."""
    number = _checked(service, engine)
    records = await asyncio.to_thread(service.client.flight_records, number)
    return json_response(as_json(records))


HANDLERS = [page, page_file, debug_state, debug_flight]


@cache
def _files() -> dict[str, Traversable]:
    """The files of the page, by name."""
    folder = resources.files("ostinato.api.server") / "static"
    return {one.name: one for one in folder.iterdir() if _suffix(one.name) in _TYPES}


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]


def _file(name: str) -> Response[bytes]:
    file = _files().get(name)
    if file is None:
        raise InvalidRequestError(
            f"the page has no file {name[:100]!r}", code="not_found", status=404
        )
    return Response(file.read_bytes(), media_type=_TYPES[_suffix(name)], headers=_HEADERS)


def _checked(service: Service, engine: int) -> int:
    """The number of an engine; raises InvalidRequestError if there is no such engine."""
    last = len(service.client.replicas) - 1
    if not 0 <= engine <= last:
        raise InvalidRequestError(f"engine={engine}; it must be in [0, {last}]", param="engine")
    return engine


async def _state(service: Service, number: int) -> PageState:
    refusal = service.admission.unreadiness()
    problem = None if refusal is None else str(refusal)
    engine: EngineState | None = None
    if refusal is None or service.admission.is_draining:
        try:
            engine = await service.client.inspect(_INSPECT_S, number)
        except TimeoutError:
            problem = (
                problem or f"the engine has not answered for {_INSPECT_S:g} s: it is busy or hangs"
            )
        except EngineDeadError as error:
            problem = str(error)
    replicas = service.client.replicas
    stats = replicas[number].stats if engine is None else engine.stats
    statuses = [one.status for one in replicas]
    use = service.metrics.probe.read(
        [one.local_pid for one in statuses], [one.local_rank_pids for one in statuses]
    )
    drafts = None if stats.speculation is None else _by_name(stats.speculation)
    tiers = {name: _by_name(tier) for name, tier in stats.tiers.items()}
    return PageState(
        time=time.monotonic(),
        problem=problem,
        model=_model(service),
        stats=_by_name(stats) | {"speculation": drafts, "tiers": tiers},
        engine=None if engine is None else _engine(engine),
        engine_pid=statuses[number].pid,
        engines=[_one_of(one, use) for one in replicas] if len(replicas) > 1 else [],
        ranks=_ranks(statuses[number], use, len(replicas)),
        live=service.metrics.recent_latency.snapshot(),
        use=use,
    )


def _model(service: Service) -> PageModel | None:
    if service.admission.phase is not None:
        return None
    model, tokenizer = service.client.model, service.client.tokenizer
    return PageModel(
        name=model.name,
        max_model_len=model.max_model_len,
        can_generate=ServedTask.generate in model.tasks and tokenizer is not None,
        can_chat=tokenizer is not None and tokenizer.chat_template is not None,
    )


def _one_of(replica: ReplicaView, use: MachineUse) -> PageEngine:
    stats, status = replica.stats, replica.status
    process = use.processes.get(f"engine {status.engine}")
    return PageEngine(
        status=status,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        kv_cache_usage=(stats.num_blocks - stats.num_free_blocks) / max(1, stats.num_blocks),
        resident_bytes=None if process is None else process.resident_bytes,
    )


def _ranks(status: ReplicaStatus, use: MachineUse, num_engines: int) -> list[PageRank]:
    engine = "engine" if num_engines == 1 else f"engine {status.engine}"
    found: list[PageRank] = []
    for one in status.ranks:
        process = use.processes.get(f"{engine} rank {one.rank}" if one.rank else engine)
        found.append(PageRank(one, None if process is None else process.resident_bytes))
    return found


def _engine(state: EngineState) -> dict[str, Any]:
    return {
        "rows": [_by_name(row) for row in state.rows],
        "num_rows": state.num_rows,
        "waiting": [_by_name(one) for one in state.waiting],
        "blocks": _by_name(state.blocks),
        "steps": [_by_name(step) for step in state.steps],
        "bucket_tokens": state.bucket_tokens,
        "max_num_seqs": state.stats.max_num_seqs,
        "seconds": state.seconds,
    }


def _by_name(struct: msgspec.Struct) -> dict[str, Any]:
    """Convert a struct that would be encoded as an array to an object with names."""
    return {name: getattr(struct, name) for name in struct.__struct_fields__}
