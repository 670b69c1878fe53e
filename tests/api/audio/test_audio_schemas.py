"""The responses are those that the types of the `openai` client describe."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from openai.types.audio import (
    Transcription as ClientTranscription,
)
from openai.types.audio import (
    TranscriptionTextDeltaEvent,
    TranscriptionTextDoneEvent,
    TranslationVerbose,
)
from openai.types.audio import (
    TranscriptionVerbose as ClientVerbose,
)
from openai.types.audio import (
    Translation as ClientTranslation,
)
from pydantic import BaseModel

from ostinato.api.audio.schemas import (
    InputTokenDetails,
    TextDelta,
    TextDone,
    TokenUsage,
    Transcription,
    TranscriptionLogprob,
    TranscriptionVerbose,
    Translation,
    duration_usage,
)
from ostinato.runtime.types.outputs import TranscriptionSegment

LOGPROBS = [TranscriptionLogprob(token=" a", bytes=[32, 97], logprob=-0.5)]
SEGMENT = TranscriptionSegment(
    id=0,
    seek=0,
    start=0.0,
    end=1.5,
    text=" a",
    tokens=[50364, 257],
    temperature=0.0,
    avg_logprob=-0.5,
    compression_ratio=0.9,
    no_speech_prob=0.1,
)
USAGE = TokenUsage(
    input_tokens=9,
    output_tokens=2,
    total_tokens=11,
    input_token_details=InputTokenDetails(audio_tokens=5, text_tokens=4),
)


@pytest.mark.parametrize(
    ("response", "form"),
    [
        (Transcription(text="a", usage=duration_usage(1.2)), ClientTranscription),
        (
            Transcription(text="a", usage=duration_usage(1.2), logprobs=LOGPROBS),
            ClientTranscription,
        ),
        (
            TranscriptionVerbose(
                task="transcribe",
                language="german",
                duration=1.5,
                text="a",
                segments=[SEGMENT],
                usage=duration_usage(1.5),
            ),
            ClientVerbose,
        ),
        (Translation(text="a"), ClientTranslation),
        (
            TranscriptionVerbose(
                task="translate", language="english", duration=1.5, text="a", segments=[SEGMENT]
            ),
            TranslationVerbose,
        ),
        (TextDelta(delta=" a"), TranscriptionTextDeltaEvent),
        (TextDelta(delta=" a", logprobs=LOGPROBS), TranscriptionTextDeltaEvent),
        (TextDone(text="a", usage=USAGE), TranscriptionTextDoneEvent),
        (TextDone(text="a", usage=USAGE, logprobs=LOGPROBS), TranscriptionTextDoneEvent),
    ],
)
def test_the_client_reads_every_field(response: msgspec.Struct, form: type[BaseModel]) -> None:
    body = msgspec.json.encode(response)
    read = form.model_validate_json(body, strict=True)
    fields: dict[str, Any] = msgspec.json.decode(body)
    # The client keeps fields that it does not know as extras; a task is one of them.
    assert set(read.model_extra or {}) <= {"task"}
    assert read.model_dump(exclude_unset=True) == fields


def test_seconds_are_rounded_up() -> None:
    assert [duration_usage(seconds).seconds for seconds in (0.01, 1.0, 1.01)] == [1, 1, 2]
