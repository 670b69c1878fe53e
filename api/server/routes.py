"""The endpoints about the server itself: models, health, version, metrics."""

from __future__ import annotations

from typing import Literal

import msgspec
from litestar import Response
from litestar.params import FromPath
from litestar.response import Stream

from ostinato import __version__
from ostinato.api.base.errors import ErrorBody
from ostinato.api.http.endpoints import get_endpoint
from ostinato.api.http.handlers import SharedService, Status, json_response, status_response
from ostinato.api.observability.metrics_registry import CONTENT_TYPE
from ostinato.api.preparation.generation import check_model
from ostinato.api.service.service import Service
from ostinato.runtime.types.engine_info import RankInfo

__all__ = ("HANDLERS", "ping")


class Version(msgspec.Struct, frozen=True):
    """The server's version, and what determines the speed and the tokens of its answers."""

    version: str
    # How a layer runs in a small step, such as a decode step (captured | fx | inductor | eager) ->
    # number of such layers. See `LayerProgram` (graphs/compiler/programs.py).
    layers: dict[str, int]
    isa: str  # instruction set of the CPU kernels; empty = none are used
    # Instruction set -> rows of the input -> time of the matrix products of one layer. It is empty
    # if no instruction sets were compared.
    isa_microseconds: dict[str, dict[str, float]]
    determinism: str  # bitwise | none, see docs/determinism.md
    system_fingerprint: str  # the `system_fingerprint` of answers
    # Ranks of the first engine; empty if the model is not divided or the engine does not run.
    ranks: tuple[RankInfo, ...]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The served model, or an adapter of it."""

    id: str  # requests name it as their `model`
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ostinato"
    root: str  # of an adapter: the directory of its files
    parent: str | None = None  # of an adapter: the id of the served model
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


@get_endpoint("/v1/models", answer=ModelList, errors={503: ErrorBody})
async def models(service: SharedService) -> Response[bytes] | Stream:
    """The served model, then the loaded adapters."""
    return json_response(ModelList(data=_cards(service)))


@get_endpoint("/v1/models/{name:path}", answer=ModelCard, errors={404: ErrorBody, 503: ErrorBody})
async def model(service: SharedService, name: FromPath[str]) -> Response[bytes] | Stream:
    """The served model or one adapter."""
    cards = {card.id: card for card in _cards(service)}
    name = name.removeprefix("/")
    check_model(name, service.client.model, service.adapter_names)
    return json_response(cards[name])


@get_endpoint("/health", answer=Status, errors={503: Status}, is_open=True)
async def health(service: SharedService) -> Response[bytes]:
    """Whether the engine works: 200, or 503 with the reason.

    Lists the engines if there are several, or if one has ranks or runs on another machine.
    """
    return _health(service)


@get_endpoint("/ping", answer=Status, errors={503: Status}, is_open=True)
async def ping(service: SharedService) -> Response[bytes]:
    """The same as `/health`, under the path that SageMaker probes."""
    return _health(service)


@get_endpoint("/live", answer=Status, errors={503: Status}, is_open=True)
async def live(service: SharedService) -> Response[bytes]:
    """Whether this process works: 200, or 503 if a supervisor should restart it."""
    problem = service.admission.liveness_problem()
    return status_response("ok" if problem is None else "stuck", problem)


@get_endpoint("/ready", answer=Status, errors={503: Status}, is_open=True)
async def ready(service: SharedService) -> Response[bytes]:
    """Whether the server would serve a new request now: 200, or 503 with the reason."""
    refusal = service.admission.unreadiness()
    return status_response("ready" if refusal is None else refusal.code, refusal and str(refusal))


@get_endpoint("/version", answer=Version)
async def version(service: SharedService) -> Response[bytes] | Stream:
    """The server's version, how the model's layers run, and whether answers are deterministic."""
    model, layers = service.client.model, service.client.stats.layers_by_program
    return json_response(
        Version(
            version=__version__,
            layers=layers,
            isa=model.isa,
            isa_microseconds=model.isa_microseconds,
            determinism=model.determinism,
            system_fingerprint=model.system_fingerprint,
            ranks=service.client.replicas[0].status.ranks,
        )
    )


@get_endpoint("/metrics", media_type="text/plain")
async def metrics(service: SharedService) -> Response[bytes]:
    """Metrics for Prometheus."""
    return Response(service.metrics.render(), media_type=CONTENT_TYPE)


HANDLERS = [models, model, health, ping, live, ready, version, metrics]


def _health(service: Service) -> Response[bytes]:
    problem = service.admission.health_problem()
    engines = [replica.status for replica in service.client.replicas]
    return status_response("ok" if problem is None else "unhealthy", problem, engines)


def _cards(service: Service) -> list[ModelCard]:
    service.admission.check_started()
    model, length = service.client.model, service.client.model.max_model_len
    base = ModelCard(id=model.name, created=model.created, root=model.name, max_model_len=length)
    return [
        base,
        *(
            ModelCard(
                id=adapter.name,
                created=adapter.created,
                root=adapter.path,
                parent=model.name,
                max_model_len=length,
            )
            for adapter in service.client.adapters.served
        ),
    ]
