"""The process whose forks prepare requests: `python -m ostinato.api.server.preparation_main`.

The process has the model's tokenizer and chat template. Its forks render the templates of clients,
so it gets no secrets of the server's configuration.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

import msgspec

from ostinato.api.anthropic import preparation as anthropic
from ostinato.api.audio import preparation as audio
from ostinato.api.openai import preparation as openai
from ostinato.api.pooling import preparation as pooling
from ostinato.api.preparation.fork_messages import (
    ForkAnswer,
    ForkStart,
    Refusal,
    encode_result,
    read_job,
)
from ostinato.api.preparation.preparation import FetchNeededError, ForkNeededError, Preparation
from ostinato.api.preparation.preparer import Prepare
from ostinato.api.responses import preparation as responses
from ostinato.runtime.audio.audio_inputs import preload_audio
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.forks.fork_frames import BeginPart, Job
from ostinato.runtime.forks.serve_forks import serve_forks
from ostinato.runtime.images.image_inputs import preload_images
from ostinato.runtime.text.chat_template import ChatTemplate
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.video.video_inputs import preload_videos

__all__ = ("FUNCTIONS", "main")

FUNCTIONS: dict[str, Prepare[Any]] = {
    one.__name__: one
    for module in (openai, anthropic, responses, pooling, audio)
    for one in module.FUNCTIONS
}


class _Source:
    """The model and its tokenizer."""

    def __init__(self, start: ForkStart) -> None:
        self.model: ServedModel = start.model
        self.tokenizer: Tokenizer | None = None
        if start.model.tokenizer:
            self.tokenizer = Tokenizer.from_path(start.model.tokenizer)
            if start.chat_template is not None:
                # The server's template can differ from the model's own.
                self.tokenizer.chat_template = ChatTemplate(
                    start.chat_template, self.tokenizer.special_tokens
                )
            self.tokenizer.measure()


def begin(first: bytes) -> Job:
    """Load the tokenizer and template; returns the function that prepares one request."""
    start = msgspec.json.decode(first, type=ForkStart)
    source = _Source(start)
    if start.model.images is not None:
        preload_images()
        if start.model.images.video is not None:
            preload_videos()
    if start.model.audio is not None or start.model.sounds is not None:
        preload_audio()

    def prepare(job: bytes, begin_part: BeginPart) -> bytes:
        ordered, data = read_job(job)
        preparation = Preparation(source, start.settings, begin_part, granted=ordered.granted)
        try:
            result = FUNCTIONS[ordered.function](preparation, data, ordered.arrival)
        except InvalidRequestError as error:
            refusal = Refusal(
                message=str(error), param=error.param, code=error.code, status=error.status
            )
            return ForkAnswer.refusal + msgspec.json.encode(refusal)
        except ForkNeededError as error:
            return ForkAnswer.own_fork + bytes([error.needed])
        except FetchNeededError as error:
            return ForkAnswer.fetch + msgspec.json.encode(error.wanted)
        except MemoryError:
            raise
        except Exception:  # the boundary of the process: the parent logs it
            return ForkAnswer.failure + traceback.format_exc().encode()
        return encode_result(result)

    return prepare


def main() -> int:
    """Prepare requests in forks until the server ends."""
    return serve_forks(begin)


if __name__ == "__main__":
    sys.exit(main())
