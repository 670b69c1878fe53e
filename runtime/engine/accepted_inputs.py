"""The images and the audio that the model of an engine takes, and the checks of requests."""

from __future__ import annotations

from typing import NamedTuple

from ostinato.models.audio.audio_spec import AudioSpec
from ostinato.models.audio.sound_spec import FRAMES_OF_STATE, STATES_OF_EMBEDDING, SoundSpec
from ostinato.models.vision.video_spec import EXTRA_POSITIONS
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.audio import PromptSound
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.images import count_extra_positions
from ostinato.runtime.types.request import Request

__all__ = ("AcceptedInputs", "accepted_inputs")


class AcceptedInputs(NamedTuple):
    """What a model takes besides text."""

    num_rows: int = 0  # rows for encodings besides row 0; 0 = the model takes text only
    audio: AudioSpec | None = None  # how the model transcribes audio; None = it does not
    sounds: SoundSpec | None = None  # how the model takes sounds; None = it takes none

    def check(self, request: Request) -> None:
        """Check that the model takes the inputs of a request, and has rows for all at once.

        Raises:
            InvalidRequestError: it does not.
        """
        if self.audio is not None or request.audio is not None:
            self._check_audio(request)
        if request.images:
            self._check_images(request)
        if request.sounds:
            self._check_sounds(request)

    def _check_images(self, request: Request) -> None:
        name = _name(request)
        if not self.num_rows or self.audio is not None or self.sounds is not None:
            raise InvalidRequestError(
                f"{name} has images, and this model takes none; send text alone",
                param="messages",
                code="unsupported_parameter",
            )
        num_rows = sum({image.digest: image.num_rows for image in request.images}.values())
        if num_rows > self.num_rows:
            raise InvalidRequestError(
                f"the images of {name} have {num_rows} embeddings together, and at most "
                f"{self.num_rows} fit (images.cache_tokens); send fewer or smaller images",
                param="messages",
                code="too_many_embeddings",
            )
        # The model's table of positions has no more than these.
        if (extra := count_extra_positions(request.images)) > EXTRA_POSITIONS:
            raise InvalidRequestError(
                f"the videos of {name} take {extra} more positions in time than they have tokens, "
                f"and at most {EXTRA_POSITIONS} are possible; send shorter videos",
                param="messages",
                code="video_too_long",
            )

    def _check_sounds(self, request: Request) -> None:
        name, spec = _name(request), self.sounds
        if spec is None:
            raise InvalidRequestError(
                f"{name} has audio in its messages, and this model takes none there; send text "
                "alone",
                param="messages",
                code="unsupported_parameter",
            )
        for sound in request.sounds:
            _check_sound(sound, spec, name)
        num_tokens = sum({sound.digest: sound.num_tokens for sound in request.sounds}.values())
        if num_tokens > self.num_rows:
            raise InvalidRequestError(
                f"the audio of {name} has {num_tokens} tokens together, and at most "
                f"{self.num_rows} fit (audio.cache_tokens); send less or shorter audio",
                param="messages",
                code="too_many_embeddings",
            )

    def _check_audio(self, request: Request) -> None:
        name, audio, spec = _name(request), request.audio, self.audio
        code = "unsupported_parameter"
        if audio is None:
            raise InvalidRequestError(
                f"{name} has no audio file, and this model transcribes audio; send a file to "
                "/v1/audio/transcriptions",
                param="audio",
                code=code,
            )
        if spec is None:
            raise InvalidRequestError(
                f"{name} has an audio file, and this model takes none; send text alone",
                param="audio",
                code=code,
            )
        wanted = spec.num_bins, spec.num_frames
        if audio.shape != wanted:
            raise InvalidRequestError(
                f"the spectrogram of {name} has the shape {list(audio.shape)}, and this model takes"
                f" {list(wanted)}, mel bins and frames",
                param="audio",
                code="invalid_value",
            )


def accepted_inputs(model: ServedModel) -> AcceptedInputs:
    """What a served model takes besides text."""
    num_rows = model.media_cache_tokens or model.audio_windows
    return AcceptedInputs(num_rows, model.audio, model.sounds)


def _check_sound(sound: PromptSound, spec: SoundSpec, name: str) -> None:
    """Check the sizes of one window of a sound."""
    num_states = sound.num_frames // FRAMES_OF_STATE
    num_frames = min(FRAMES_OF_STATE * num_states + 1, spec.num_frames)
    if sound.shape != (spec.num_bins, num_frames) or num_states < STATES_OF_EMBEDDING:
        raise InvalidRequestError(
            f"the spectrogram of audio of {name} has the shape {list(sound.shape)}, and this model "
            f"takes {spec.num_bins} mel bins, and an odd number of frames from "
            f"{FRAMES_OF_STATE * STATES_OF_EMBEDDING + 1}, or {spec.num_frames} frames",
            param="messages",
            code="invalid_value",
        )
    num_tokens = num_states // STATES_OF_EMBEDDING
    if sound.num_tokens != num_tokens:
        raise InvalidRequestError(
            f"audio of {name} with {sound.num_frames} frames has {sound.num_tokens} placeholder "
            f"tokens, and must have {num_tokens}",
            param="messages",
            code="invalid_value",
        )


def _name(request: Request) -> str:
    return f"request {request.request_id.rpartition('#')[0] or request.request_id}"
