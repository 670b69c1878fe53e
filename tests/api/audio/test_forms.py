"""The parser of forms: it agrees with a slow twin, and any bytes are a form or a 400."""

from __future__ import annotations

import email.parser
import email.policy
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import fields
from openai.types.audio import TranslationCreateParams, transcription_create_params
from openai.types.audio.transcription_create_params import TranscriptionCreateParamsStreaming

from ostinato.api.audio.form_fields import Form, parse_form
from ostinato.api.audio.preparation import prepare_transcription, prepare_translation
from ostinato.api.audio.transcription_fields import (
    UNSUPPORTED_IN_FORMS,
    TranscriptionForm,
    read_fields,
)
from ostinato.api.preparation.preparation import Arrival, Grant, Preparation, PreparationSettings
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.params import SamplingParams
from tests.api.audio.audio_apps import BOUNDARY, WhisperEngine, WhisperFiles, form_body, wav

KIND = f"multipart/form-data; boundary={BOUNDARY}"
names = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8).filter(
    lambda name: name != "file"
)
values = st.one_of(
    st.text(max_size=20), st.sampled_from([f"--{BOUNDARY}", f"\r\n--{BOUNDARY[:-1]}", "\r\n", "--"])
).filter(lambda text: f"\r\n--{BOUNDARY}" not in f"\r\n{text}\r\n")
files = st.binary(max_size=200).filter(lambda data: BOUNDARY.encode() not in data)


def refusal_of(data: bytes, kind: str = KIND) -> InvalidRequestError | None:
    """The error for a body; None = it is a form."""
    refused: InvalidRequestError | None = None
    try:
        parse_form(data, kind)
    except InvalidRequestError as error:
        refused = error
    if refused is None:
        return None
    assert (refused.status, refused.code) == (400, "invalid_form")
    return refused


@given(fields=st.dictionaries(names, values, max_size=5), file=st.none() | files)
def test_fields_and_file_come_back_as_they_were_sent(fields: dict[str, str], file: bytes | None):
    form = parse_form(form_body(fields, file), KIND)
    assert form == Form(file, {name: [value] for name, value in fields.items()})


@given(fields=st.dictionaries(names, values, max_size=3), file=files, data=st.data())
@settings(max_examples=300)
def test_a_body_that_is_cut_short_is_refused(fields: dict[str, str], file: bytes, data: Any):
    body = form_body(fields, file)
    cut = data.draw(st.integers(0, len(body) - 3))
    assert refusal_of(body[:cut]) is not None


@given(
    st.lists(
        st.sampled_from(
            [
                b"--" + BOUNDARY.encode(),
                b"\r\n",
                b"\n",
                b"--",
                b'Content-Disposition: form-data; name="file"; filename="a"',
                b'Content-Disposition: form-data; name="prompt"',
                b"Content-Disposition: attachment",
                b"Content-Length: 3",
                b"Content-Length: -1",
                b"Content-Type: text/plain; charset=utf-16",
                b": ",
                b" ",
                b"\0",
                b"\xff\xfe",
                b"x" * 5000,
            ]
        ),
        max_size=14,
    ),
    st.sampled_from([KIND, "multipart/form-data", 'multipart/form-data; boundary=""', "multipart"])
    | st.text(max_size=40).map(lambda text: f"multipart/form-data; boundary={text}"),
)
@settings(max_examples=500)
def test_any_bytes_are_a_form_or_refused(parts: list[bytes], kind: str):
    refusal_of(b"".join(parts), kind)


@given(st.binary(max_size=100))
def test_random_bytes_are_refused(data: bytes):
    assert refusal_of(data) is not None


def test_it_agrees_with_the_parser_of_emails():
    request = httpx.Request(
        "POST",
        "http://a",
        files={"file": ('spee"ch.wav', b"\0\r\n--x\r\n", "audio/wav")},
        data={"prompt": "ü\r\nx", "include[]": ["logprobs", "other"]},
    )
    kind = request.headers["content-type"]
    form = parse_form(request.read(), kind)
    head = f"MIME-Version: 1.0\r\nContent-Type: {kind}\r\n\r\n".encode()
    policy = email.policy.HTTP
    message = email.parser.BytesParser(policy=policy).parsebytes(head + request.read())
    sent = [
        (part.get_param("name", header="content-disposition"), part.get_payload(decode=True))
        for part in message.iter_parts()
    ]
    read = [("file", form.file)]
    read += [(name, one.encode()) for name, many in form.texts.items() for one in many]
    assert sorted(sent) == sorted(read)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (form_body({f"a{number}": "" for number in range(300)}, b""), "256 fields"),
        (form_body({"prompt": "a" * 70_000}, b""), "prompt has more than 65536 bytes"),
        (form_body({"file": "speech.wav"}, None), "curl: -F file=@speech.wav"),
        (form_body({}, b"a", end="") + form_body({}, b"b")[len(BOUNDARY) + 4 :], "several fields"),
        (form_body({"prompt": "?"}, b"").replace(b"?", b"\xff"), "UTF-8"),
        (form_body({}, b"").replace(b'"file"', b'"prompt"'), "prompt is a file"),
    ],
)
def test_errors_name_the_remedy(data: bytes, said: str):
    error = refusal_of(data)
    assert error is not None
    assert said in str(error)


@pytest.mark.parametrize(
    "data",
    [
        b"".join(
            f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{number}"\r\n\r\n\r\n'.encode()
            for number in range(300_000)
        ),
        b"x" * (26 << 20),
        form_body({}, b"\r\n--" * (6 << 20)),
        form_body({}, (b"\r\n--" + BOUNDARY.encode()[:-1]) * (2 << 20)),
        f"--{BOUNDARY}\r\n".encode() + b"a: b\r\n" * (4 << 20),
        f"--{BOUNDARY}\r\n".encode() + b" a" * (13 << 20),
        f"--{BOUNDARY}\r\n".encode() + b"\r" * (26 << 20),
    ],
    ids=["fields", "no boundary", "dashes", "near boundaries", "headers", "header", "returns"],
)
def test_hostile_bodies_take_less_than_a_second(data: bytes):
    begin = time.thread_time()
    refusal_of(data)
    assert time.thread_time() - begin < 1


own_values = st.one_of(st.text(max_size=6), st.integers().map(str), st.floats().map(repr))
OWN = [
    "model",
    "language",
    "prompt",
    "response_format",
    "timestamp_granularities[]",
    "timestamp_granularities",
    "include[]",
    "stream",
    "chunking_strategy",
    "chunking_strategy[type]",
    "max_completion_tokens",
    "temperature",
    "top_k",
    "seed",
    "deadline_ms",
    "request_id",
    *UNSUPPORTED_IN_FORMS,
]
LIKELY = ["true", "json", "verbose_json", "segment", "logprobs", "auto", "0.5", "1", "null", "{}"]


@given(
    st.dictionaries(
        st.sampled_from(OWN) | st.text(max_size=12),
        st.lists(st.sampled_from(LIKELY) | own_values, min_size=1, max_size=2),
        max_size=4,
    )
)
@settings(max_examples=500)
def test_any_fields_are_read_or_refused_by_name(texts: dict[str, list[str]]):
    refused = None
    try:
        read = read_fields(Form(b"", texts))
    except InvalidRequestError as error:
        refused = error
    if refused is None:
        known = {*OWN, "priority", "user", "cache_salt"}
        assert set(texts) <= known
        assert read.own.response_format in ("json", "text", "srt", "verbose_json", "vtt")
        return
    assert refused.status == 400
    asked = {one for name in texts for one in (name[:100], f"{name}[]", name.partition("[")[0])}
    assert refused.param in asked
    assert refused.param in str(refused)


@given(
    fields=st.dictionaries(st.sampled_from(OWN), st.sampled_from(LIKELY) | own_values, max_size=4),
    file=st.none() | st.sampled_from([wav(0.1), wav(31), b"", wav(1)[:100]]),
    prepare=st.sampled_from([prepare_transcription, prepare_translation]),
)
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_form_is_prepared_or_refused(files: WhisperFiles, fields, file, prepare):
    preparation = Preparation(WhisperEngine(files), PreparationSettings(), granted=Grant.audio)
    refused = prepared = None
    try:
        prepared = prepare(preparation, form_body(fields, file), Arrival(content_type=KIND))
    except InvalidRequestError as error:
        refused = error
    if prepared is None:
        assert refused is not None
        assert refused.status in (400, 404)
        assert refused.code
        return
    assert prepared.windows
    assert prepared.generation.sampling.transcript is not None


def test_the_fields_of_openais_client_are_known_and_documented():
    theirs = {
        name
        for params in (TranscriptionCreateParamsStreaming, TranslationCreateParams)
        for name in params.__annotations__
    } | set(transcription_create_params.TranscriptionCreateParamsBase.__annotations__)
    ours = {field.encode_name.removesuffix("[]") for field in fields(TranscriptionForm)}
    assert theirs - ours - UNSUPPORTED_IN_FORMS.keys() == set()
    page = (Path(__file__).parents[3] / "docs" / "audio.md").read_text(encoding="utf-8")
    assert [name for name in sorted(ours | theirs) if f"`{name}" not in page] == []


def test_a_form_has_every_number_of_the_sampling_parameters_that_one_text_can_have():
    names = {field.name for field in fields(TranscriptionForm)}
    others = {"best_of", "length_penalty", "max_tokens", "min_tokens", "n", "prompt_logprobs"}
    for field in fields(SamplingParams):
        is_number = field.type in (int, float, int | None, float | None)
        if is_number and field.name not in others | {"logprobs", "truncate_prompt_tokens"}:
            assert field.name in names
