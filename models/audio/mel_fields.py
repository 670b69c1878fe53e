"""Reads the spectrogram that a model takes from the file of its feature extractor.

The facts are those of `WhisperFeatureExtractor` in transformers 5.24: which key has which effect,
and which default. This module imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from ostinato.models.audio.mel_spec import MelSpec
from ostinato.models.audio.sound_spec import FRAMES_OF_STATE
from ostinato.models.media.processor_fields import ProcessorFields, read_processor_fields

__all__ = ("read_mel_spec",)

_KIND = "WhisperFeatureExtractor"
_DEFAULTS = {
    "feature_size": 80,
    "sampling_rate": 16000,
    "hop_length": 160,
    "chunk_length": 30,
    "n_fft": 400,
    "padding_value": 0.0,
    "padding_side": "right",
    "dither": 0.0,
}
_KNOWN = {
    *_DEFAULTS,
    *("feature_extractor_type", "processor_class", "auto_map"),
    # The keys below change no spectrogram. The class computes the first three from other keys.
    *("mel_filters", "n_samples", "nb_max_frames"),
    *("return_attention_mask", "return_tensors", "do_normalize", "device"),
}


def read_mel_spec(path: Path, *, num_positions: int, num_bins: int, place: str = "") -> MelSpec:
    """Read the sizes of spectrograms, which must be those that the encoder takes.

    Args:
        path: a directory with preprocessor_config.json, or with processor_config.json that has the
            key `feature_extractor`.
        num_positions: `max_source_positions` of config.json, the states of the encoder.
        num_bins: `num_mel_bins` of config.json.
        place: where config.json has both keys: "" = at the top level, else an object and a point.

    Raises:
        ValueError: the file is missing, or a key has a value that is not supported. The message
            names the file, the key and the value.
    """
    fields = _read_extractor(path)
    window_s, rate = fields.integer("chunk_length"), fields.integer("sampling_rate")
    hop_size = fields.integer("hop_length")
    num_frames = window_s * rate // hop_size
    if num_frames != FRAMES_OF_STATE * num_positions:
        raise ValueError(
            f"{fields.source}: chunk_length={window_s}, sampling_rate={rate} and hop_length="
            f"{hop_size} give {num_frames} frames, which must be {FRAMES_OF_STATE} times "
            f"config.json: {place}max_source_positions={num_positions}"
        )
    if fields.integer("feature_size") != num_bins:
        raise fields.refusal(
            "feature_size", f"it must be that of config.json: {place}num_mel_bins={num_bins}"
        )
    return MelSpec(
        sampling_rate=rate,
        num_bins=num_bins,
        fft_size=_read_fft_size(fields, window_s * rate),
        hop_size=hop_size,
        window_s=window_s,
    )


def _read_extractor(path: Path) -> ProcessorFields:
    """The fields of the feature extractor, of which those with one supported value are checked."""
    source, stated = read_processor_fields(
        path, "feature_extractor", medium="audio", auto_class="AutoFeatureExtractor"
    )
    fields = ProcessorFields(source=source, stated=stated, defaults=_DEFAULTS, medium="audio")
    name = fields.get("feature_extractor_type")
    if name is None and "AutoFeatureExtractor" in (fields.get("auto_map") or {}):
        raise fields.refusal(
            "auto_map",
            f"code of the checkpoint is not run; set feature_extractor_type={_KIND}",
        )
    if name not in (None, _KIND):
        raise fields.refusal("feature_extractor_type", f"supported: {_KIND}")
    fields.refuse_unknown(_KNOWN)
    for key in ("padding_value", "dither"):
        if type(fields.get(key)) not in (int, float) or fields.get(key) != 0:
            raise fields.refusal(key, "it must be 0")
    if fields.get("padding_side") != "right":
        raise fields.refusal("padding_side", 'it must be "right"')
    return fields


def _read_fft_size(fields: ProcessorFields, num_samples: int) -> int:
    fft_size = fields.integer("n_fft")
    if fft_size % 2 or fft_size > num_samples:
        raise fields.refusal(
            "n_fft", f"it must be even, and at most {num_samples}, the samples of a window"
        )
    return fft_size
