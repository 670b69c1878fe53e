"""The endpoints of models that write down speech."""

from __future__ import annotations

from litestar import Response
from litestar.response import Stream

from ostinato.api.audio.preparation import (
    PreparedTranscript,
    prepare_transcription,
    prepare_translation,
)
from ostinato.api.audio.reply import TranscriptReply
from ostinato.api.audio.schemas import (
    TextDelta,
    TextDone,
    Transcription,
    TranscriptionVerbose,
    Translation,
)
from ostinato.api.audio.transcription_fields import TranscriptionForm
from ostinato.api.base.errors import ErrorBody
from ostinato.api.base.request_context import RequestContext, context_of
from ostinato.api.http.endpoints import post_endpoint
from ostinato.api.http.handlers import (
    HttpRequest,
    SharedService,
    admit,
    choose_model,
    event_stream,
    form_body,
    prepare,
    respond_whole,
)
from ostinato.api.http.sse import DATA_EVENTS, sse, until_disconnect
from ostinato.api.preparation.preparation import Arrival
from ostinato.api.preparation.preparer import Prepare
from ostinato.api.service.service import Service
from ostinato.runtime.client.pooling import require_task
from ostinato.runtime.types.engine_info import ServedTask

__all__ = ("HANDLERS", "transcriptions", "translations")

_FORM, _TEXT = "multipart/form-data", "text/plain"


@post_endpoint(
    "/v1/audio/transcriptions",
    body=TranscriptionForm,
    body_media_type=_FORM,
    answer=(Transcription, TranscriptionVerbose),
    media_type=_TEXT,
    events=(TextDelta, TextDone, ErrorBody),
    form=DATA_EVENTS,
)
async def transcriptions(request: HttpRequest, service: SharedService) -> Response[bytes] | Stream:
    """Write down speech in its language."""
    context = context_of("/v1/audio/transcriptions", request)
    return await _answer(request, service, prepare_transcription, context)


@post_endpoint(
    "/v1/audio/translations",
    body=TranscriptionForm,
    body_media_type=_FORM,
    answer=(Translation, TranscriptionVerbose),
    media_type=_TEXT,
    events=(TextDelta, TextDone, ErrorBody),
    form=DATA_EVENTS,
)
async def translations(request: HttpRequest, service: SharedService) -> Response[bytes] | Stream:
    """Write down speech in English."""
    context = context_of("/v1/audio/translations", request)
    return await _answer(request, service, prepare_translation, context)


HANDLERS = [transcriptions, translations]


async def _answer(
    request: HttpRequest,
    service: Service,
    function: Prepare[PreparedTranscript],
    context: RequestContext,
) -> Response[bytes] | Stream:
    # The server refuses these before it stores a large body.
    service.admission.check()
    require_task(service.client.model, ServedTask.transcribe)
    header = request.headers.get("content-type", "")
    arrival = Arrival(request_id=context.request_id, content_type=header)
    prepared = await prepare(
        request, service, function, context, arrival=lambda body: arrival, read=form_body
    )
    choose_model(request, service, prepared.model, context)
    await admit(request, service, "", prepared.generations, context)
    reply = TranscriptReply(service, prepared, context)
    if prepared.stream:
        return event_stream(sse(reply.stream(), DATA_EVENTS))
    if prepared.response_format in ("json", "verbose_json"):
        return await respond_whole(request, reply.whole())
    work = reply.text()
    try:
        text = await until_disconnect(request.receive, work)
    finally:
        work.close()  # has an effect only if the work never began
    return Response(text.encode(), media_type=f"{_TEXT}; charset=utf-8")
