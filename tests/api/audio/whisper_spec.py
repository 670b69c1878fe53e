"""How Whisper's multilingual checkpoints and its English ones take audio, with their token ids."""

from __future__ import annotations

from ostinato.models.audio.audio_spec import AudioSpec

__all__ = ("ENGLISH", "MULTILINGUAL")

MULTILINGUAL = AudioSpec(
    sampling_rate=16000,
    num_bins=80,
    fft_size=400,
    hop_size=160,
    window_s=30,
    end_id=50257,
    start_id=50258,
    languages={"en": 50259, "zh": 50260, "de": 50261},
    translate_id=50358,
    transcribe_id=50359,
    start_of_previous_id=50361,
    no_speech_id=50362,
    no_timestamps_id=50363,
    first_timestamp_id=50364,
    max_initial_timestamp=50,
    suppressed=(1, 2, 7, 50258),
    suppressed_first=(220, 50257),
)

ENGLISH = AudioSpec(
    sampling_rate=16000,
    num_bins=80,
    fft_size=400,
    hop_size=160,
    window_s=30,
    end_id=50256,
    start_id=50257,
    start_of_previous_id=50360,
    no_speech_id=50361,
    no_timestamps_id=50362,
    first_timestamp_id=50363,
)
