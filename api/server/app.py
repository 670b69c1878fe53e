"""The ASGI application: Litestar with all handlers, error handlers and limits."""

from __future__ import annotations

from litestar import Litestar, Router
from litestar.config.cors import CORSConfig
from litestar.di import Provide
from litestar.middleware import DefineMiddleware
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.plugins import PluginProtocol
from litestar.plugins.core import MsgspecDIPlugin
from litestar.types import Message, Scope

from ostinato import __version__
from ostinato.api.anthropic import routes as anthropic
from ostinato.api.audio import routes as audio
from ostinato.api.base.errors import exception_handlers, status_of
from ostinato.api.base.request_context import (
    REQUEST_ID_HEADER,
    request_id_headers,
    request_id_of,
)
from ostinato.api.http.adapter_holds import AdapterHolds
from ostinato.api.http.admitted_requests import AdmittedRequests
from ostinato.api.http.api_keys import KeyRing, with_keys
from ostinato.api.http.auth import AccessControl
from ostinato.api.openai import routes as openai
from ostinato.api.pooling import routes as pooling
from ostinato.api.responses import routes as responses
from ostinato.api.server import adapter_routes, admin_routes, invocations, page, routes
from ostinato.api.server.schema_page import schema_router
from ostinato.api.service.service import Client, Service
from ostinato.conf.root import RunConfig

__all__ = ("create_app", "make_service")

_FORM_BYTES = 1 << 20  # the most bytes of a form without its file


class _App(Litestar):
    """Litestar without its plugins for pydantic and attrs. No handler uses their types.

    Litestar adds the plugins if the packages are installed. Importing them takes longer than
    registering all handlers.
    """

    @staticmethod
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        return [*plugins, MsgspecDIPlugin()]


def make_service(client: Client, config: RunConfig) -> Service:
    """The state of a server, with the keys of `server.api_key_file`.

    Args:
        client: the engine's client. It need not have started yet.
        config: the configuration of the server and its engines.

    Raises:
        StartupError: the file of keys is wrong.
    """
    return Service(
        client,
        with_keys(config.server),
        config.sampling,
        config.lora,
        config.images,
        config.audio,
        config.video,
    )


def create_app(service: Service) -> Litestar:
    """Make the application for `service`. The caller starts and stops the engine."""

    async def count_refusal(error: Exception, _scope: Scope) -> None:
        service.metrics.count_refusal(status_of(error))

    async def begin_reply(message: Message, scope: Scope) -> None:
        """Count the response, and add the request id to its headers."""
        if message["type"] != "http.response.start":
            return
        template = scope.get("path_template") or "none"  # an unknown path must not become a label
        service.metrics.count_reply(template, scope.get("method", ""), message["status"])
        names = request_id_headers(request_id_of(scope), scope["path"])
        message["headers"] = [*message["headers"], *names]

    server = service.server
    middleware = [DefineMiddleware(AdmittedRequests, admission=service.admission)]
    if server.api_keys:
        keys, limit = KeyRing(server.api_keys), server.max_requests_per_key
        middleware.append(DefineMiddleware(AccessControl, keys=keys, max_requests=limit))
    if service.lora.num_slots:
        middleware.append(DefineMiddleware(AdapterHolds))
    cors = None
    if server.cors_origins:
        cors = CORSConfig(allow_origins=server.cors_origins, expose_headers=[REQUEST_ID_HEADER])
    return _App(
        middleware=middleware,
        cors_config=cors,
        route_handlers=[
            *routes.HANDLERS,
            *admin_routes.HANDLERS,
            *adapter_routes.HANDLERS,
            *invocations.HANDLERS,
            *openai.HANDLERS,
            *anthropic.HANDLERS,
            *responses.HANDLERS,
            *pooling.HANDLERS,
            _audio_router(service),
            *(page.HANDLERS if service.server.page else ()),
        ],
        dependencies={"service": Provide(lambda: service, sync_to_thread=False)},
        exception_handlers=exception_handlers(f"server.max_body_mib={server.max_body_mib:g} MiB"),
        after_exception=[count_refusal],
        before_send=[begin_reply],
        request_max_body_size=int(service.server.max_body_mib * (1 << 20)),
        openapi_config=OpenAPIConfig(
            title="Ostinato",
            version=__version__,
            use_handler_docstrings=True,
            # Litestar's own pages load their scripts from another host.
            render_plugins=[JsonRenderPlugin()],
            openapi_router=schema_router(),
        ),
        logging_config=None,
    )


def _audio_router(service: Service) -> Router:
    """The endpoints for audio. Their bodies have a limit of their own."""
    max_mib = service.audio.max_mib
    limit = f"audio.max_mib={max_mib:g} MiB and {_FORM_BYTES >> 20} MiB for the other fields"
    return Router(
        "/",
        route_handlers=audio.HANDLERS,
        request_max_body_size=int(max_mib * (1 << 20)) + _FORM_BYTES,
        exception_handlers=exception_handlers(limit),
    )
