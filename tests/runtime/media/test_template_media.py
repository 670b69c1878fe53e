"""How chat templates are shown images, videos and sounds."""

from __future__ import annotations

import msgspec
import pytest

from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.runtime.media.template_media import MEDIA_PARTS, text_part, with_media_shown
from ostinato.runtime.media_files.media_kinds import MediaKind
from ostinato.runtime.text.chat_template import ChatTemplate
from tests.api.media.sound_apps import SHOWN, sound_spec
from tests.runtime.video.video_files import video_spec

SPEC = ImageSpec(
    sizing=ImageSizing.dynamic,
    placeholder_id=9,
    placeholder="<i>",
    marked_placeholder="(<i>)",
    mean=(0, 0, 0),
    std=(1, 1, 1),
    patch_size=2,
)
CONVERSATION = [
    {"role": "system", "content": "s"},
    {
        "role": "user",
        "name": "n",
        "content": [
            {"type": "text", "text": "a"},
            {"type": "image"},
            {"type": "text", "text": "b"},
        ],
    },
    {"role": "assistant", "tool_calls": []},
]


@pytest.mark.parametrize(
    ("template", "system", "user"),
    [
        ("{{ m.content }}", "s", "a\n(<i>)\nb"),
        ("{% if m.content is string %}{% if p.type == 'image' %}", "s", None),
        ("{% if m.content is not string %}{% if p['type'] == \"image\" %}", "s", None),
        ("{% for p in m.content | selectattr('type', 'equalto', 'image') %}", [], None),
    ],
)
def test_the_form_that_a_template_reads(template, system, user):
    shown = with_media_shown(CONVERSATION, template, SPEC)
    assert shown[0]["content"] == (system or [{"type": "text", "text": "s"}])
    assert shown[1] == {**CONVERSATION[1], "content": user or CONVERSATION[1]["content"]}
    assert shown[2] == CONVERSATION[2]


VIDEO_PARTS = [
    {"type": "text", "text": "a"},
    {"type": "image"},
    {"type": "video"},
    {"type": "text", "text": "b"},
]
VIDEO_SPEC = msgspec.structs.replace(SPEC, video=video_spec(marked_placeholder="(<v>)"))


@pytest.mark.parametrize(
    ("template", "user"),
    [
        ("{{ m.content }}", "a\n(<i>)\n(<v>)\nb"),
        ("{% if p.type == 'image' %}{% elif 'video' in p %}", VIDEO_PARTS),
        ("{% if p.type == 'image' %}", [*VIDEO_PARTS[:2], text_part("(<v>)"), VIDEO_PARTS[3]]),
        ("{% if p.type == 'video' %}", [VIDEO_PARTS[0], text_part("(<i>)"), *VIDEO_PARTS[2:]]),
    ],
)
def test_what_a_template_does_not_read_is_a_text(template, user):
    messages = [{"role": "user", "content": VIDEO_PARTS}, {"role": "system", "content": "s"}]
    shown = with_media_shown(messages, template, VIDEO_SPEC)
    assert shown[0]["content"] == user
    assert shown[1]["content"] == ("s" if isinstance(user, str) else [text_part("s")])


PART = dict(MEDIA_PARTS[MediaKind.sound])
SOUND_PARTS = [text_part("a"), PART, text_part("b")]


@pytest.mark.parametrize(
    ("template", "user"),
    [
        ("{{ m.content }}", f"a\n{SHOWN}\nb"),
        ("{% if m.content is string %}{% if c['type'] == 'audio' %}", SOUND_PARTS),
        ('{% if c["type"] == "audio" %}', SOUND_PARTS),
        ("{% if 'audio_url' in c %}", SOUND_PARTS),
        ("{% if p.type == 'image' %}", [text_part("a"), text_part(SHOWN), text_part("b")]),
    ],
)
def test_the_form_in_which_a_template_reads_sounds(template, user):
    messages = [{"role": "user", "content": SOUND_PARTS}, {"role": "system", "content": "s"}]
    shown = with_media_shown(messages, template, sound_spec(9))
    assert shown[0]["content"] == user
    reads_texts = isinstance(user, str) or "is string" in template
    assert shown[1]["content"] == ("s" if reads_texts else [text_part("s")])


@pytest.mark.parametrize(
    "condition",
    [
        "c['type'] == 'audio'",
        "c.get('type') == 'audio'",
        "'audio' in c",
        "'audio_url' in c",
        # Of Qwen2-Audio.
        "'audio' in c or 'audio_url' in c or m['type'] == 'audio' or c['type'] == 'audio'",
    ],
)
def test_all_conditions_of_templates_see_a_sound(condition: str):
    source = (
        "{% for m in messages %}{% for c in m['content'] %}{% if "
        f"{condition} %}}<sound>{{% else %}}{{{{ c['text'] }}}}{{% endif %}}"
        "{% endfor %}{% endfor %}"
    )
    messages = [{"role": "user", "content": SOUND_PARTS}]
    shown = with_media_shown(messages, source, sound_spec(9))
    assert ChatTemplate(source, {}).render(shown) == "a<sound>b"
