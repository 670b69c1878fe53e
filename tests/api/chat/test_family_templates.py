"""Chat templates with tools, one in the syntax of each family.

`ChatTemplate` renders a conversation to the same text as transformers. From the text of the
assistant's turn, the parser reads the calls that the template was given.
"""

from __future__ import annotations

import json

import pytest
from transformers import PreTrainedTokenizerFast

from ostinato.api.chat.tools import explained, template_messages, tool_use
from ostinato.api.parsing.answer_parser import AnswerForm
from ostinato.api.parsing.bodies.parameter_schemas import types_of_parameters
from ostinato.api.parsing.detect import traits
from ostinato.api.parsing.events import Message as Parsed
from ostinato.api.parsing.formats import FORMATS
from ostinato.api.schemas.conversation import (
    CalledFunction,
    FunctionTool,
    Message,
    MessageToolCall,
    Tool,
)
from ostinato.conf.compose import load_config
from ostinato.conf.sections.server_schema import ReasoningParserName, ToolParserName
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.registry import read_model_config
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.text.chat_template import ChatTemplate
from ostinato.runtime.text.tokenizer import Tokenizer
from tests.runtime.text import tokenizer_builders

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
ARGUMENTS = {"city": "São Paulo", "days": 3}
HEAD = "{%- if tools %}{{- 'Tools: ' + tools | tojson + '\n' }}{%- endif %}{%- for m in messages %}"
TAIL = "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
CALL = "{%- for c in m.tool_calls %}{%- set f = c.function %}"
# Three parts of a template: the text before the assistant's call, the call of function `f`, and the
# text after it.
FAMILIES = {
    "hermes": (
        "<|im_start|>assistant\n",
        """{{- '<tool_call>\n{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson + '}\n</tool_call>' }}""",
        "<|im_end|>\n",
    ),
    "llama3_json": (
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        """{#- "parameters": dictionary #}{{- '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' }}""",
        "<|eot_id|>",
    ),
    "mistral_args": (
        "",
        "{{- '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments | tojson }}",
        "</s>",
    ),
    "granite": (
        "<|start_of_role|>assistant<|end_of_role|>",
        """{{- '<|tool_call|>[{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson + '}]' }}""",
        "<|end_of_text|>",
    ),
    "olmo3": (
        "<|im_start|>assistant\n",
        """{{- '<function_calls>\n' + f.name + '(' }}{%- for k, v in f.arguments.items() %}{{- k + '=' + v | tojson }}"""
        "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ')\n</function_calls>' }}",
        "<|im_end|>\n",
    ),
    "glm45": (
        "<|assistant|>\n",
        "{{- '<tool_call>' + f.name + '\n' }}{%- for k, v in f.arguments.items() %}{{- '<arg_key>' + k + '</arg_key>\n"
        "<arg_value>' + (v if v is string else v | tojson) + '</arg_value>\n' }}{%- endfor %}{{- '</tool_call>' }}",
        "<|user|>",
    ),
    "qwen3_coder": (
        "<|im_start|>assistant\n",
        "{{- '<tool_call>\n<function=' + f.name + '>\n' }}{%- for k, v in f.arguments.items() %}{{- '<parameter=' + k + '>\n'"
        " + (v if v is string else v | tojson) + '\n</parameter>\n' }}{%- endfor %}{{- '</function>\n</tool_call>' }}",
        "<|im_end|>\n",
    ),
    "deepseek_v31": (
        "<｜Assistant｜>",
        "{{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments | tojson"
        " + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}",
        "<｜end▁of▁sentence｜>",
    ),
    "kimi_k2": (
        "<|im_assistant|>assistant<|im_middle|>",
        "{{- '<|tool_calls_section_begin|><|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>'"
        " + f.arguments | tojson + '<|tool_call_end|><|tool_calls_section_end|>' }}",
        "<|im_end|>",
    ),
    "openai": (
        "<|start|>assistant",
        "{{- '<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|><|start|>assistant to=functions.' + f.name"
        " + '<|channel|>commentary json<|message|>' + f.arguments | tojson }}",
        "<|call|>",
    ),
}  # fmt: skip


def template_of(name: str) -> str:
    before, call, behind = (text.replace("\n", "\\n") for text in FAMILIES[name])
    answer = f"{{{{- '{before}' }}}}{CALL}{call}{{%- endfor %}}{{{{- '{behind}' }}}}"
    other = "{{- '<|' + m.role + '|>' + m.content + '\\n' }}"
    branch = "{%- if m.tool_calls %}" + answer + "{%- else %}" + other + "{%- endif %}"
    return HEAD + branch + TAIL


TOOL = Tool(function=FunctionTool(name="get_weather", description="weather", parameters=SCHEMA))
CONVERSATION = template_messages(
    [
        Message(role="user", content="What is the weather?"),
        Message(
            role="assistant",
            reasoning="Look it up.",
            tool_calls=[
                MessageToolCall(
                    id="functions.get_weather:0",
                    function=CalledFunction(name="get_weather", arguments=json.dumps(ARGUMENTS)),
                )
            ],
        ),
        Message(role="tool", tool_call_id="functions.get_weather:0", content="Sunny & <warm>"),
    ]
)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_with_tools_is_the_text_of_transformers(name):
    tools = tool_use([TOOL], None, None).for_template
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer_builders.byte_level_bpe())
    expected = theirs.apply_chat_template(
        CONVERSATION,
        tools=tools,
        chat_template=template_of(name),
        tokenize=False,
        add_generation_prompt=True,
    )
    assert ChatTemplate(template_of(name), {}).render(CONVERSATION, tools=tools) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_the_calls_of_a_template_are_read_as_they_were_given(name):
    before, _, behind = FAMILIES[name]
    template = template_of(name)
    shown = ChatTemplate(template, {}).render(CONVERSATION[:2], add_generation_prompt=False)
    shown = shown.partition("weather?\n")[2]
    assert shown.startswith(before)
    assert shown.endswith(behind)
    found = traits(template, ToolParserName.auto, ReasoningParserName.auto)
    assert found.calls is not None
    assert found.calls.name == name
    form = AnswerForm(
        reasoning=found.reasoning,
        call_format=name,
        tool_names=frozenset({"get_weather"}),
        parameter_types={"get_weather": types_of_parameters(SCHEMA)},
    )
    parser, parsed = form.parser(), Parsed()
    parsed.add(parser.feed(shown.removeprefix(before).removesuffix(behind)) + parser.finish())
    (call,) = parsed.calls
    assert (call.name, json.loads(call.arguments), parsed.content) == ("get_weather", ARGUMENTS, "")
    if name == "openai":
        assert parsed.reasoning == "Look it up."


# How templates read the text of a message with calls: the first of Qwen3, DeepSeek's and LFM2's.
READS_TEXT = (
    "{{ m.role + m.content }}",
    "{% if m.content is none %}{{ m.role }}{% else %}{{ m.role + m.content }}{% endif %}",
    "{% set text = m.content %}{% if text is not string %}{% set text = text | tojson %}{% endif %}"
    "{{ m.role + text }}",
)


@pytest.mark.parametrize("read", READS_TEXT)
def test_a_call_without_text_has_an_empty_text(read):
    template = ChatTemplate("{% for m in messages %}<" + read + ">{% endfor %}", {})
    shown = template.render(CONVERSATION)
    assert shown == "<userWhat is the weather?><assistant><toolSunny & <warm>>"
    with pytest.raises(InvalidRequestError, match="the last message has no text"):
        template.render(CONVERSATION[:2], add_generation_prompt=False, continue_final_message=True)


def test_half_of_a_surrogate_pair_in_arguments_is_a_replacement_character():
    text = r'{"\ude00": "a\ud83d", "pair": "\ud83d\ude00", "text": "\\ud83d"}'
    call = MessageToolCall(id="c", function=CalledFunction(name="f", arguments=text))
    [message] = template_messages([Message(role="assistant", tool_calls=[call])])
    (shown,) = message["tool_calls"]
    assert shown["function"]["arguments"] == {
        "\ufffd": "a\ufffd",
        "pair": "\U0001f600",
        "text": "\\ud83d",
    }


# Knows no tools, and refuses two messages of the user in a row, as those of Gemma and Mistral.
ALTERNATES = (
    "{% set said = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in said %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for p in m.content %}{{ p.text or p.type }}|{% endfor %}{% endif %}"
    "{% endfor %}"
)


def result(content, call_id="functions.get_weather:0"):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


@pytest.mark.parametrize(
    ("behind", "shown"),
    [
        ([result("Sunny")], "Result of get_weather: Sunny"),
        (
            [result("Sunny"), result("Warm", "x"), {"role": "user", "content": "And?"}],
            "Result of get_weather: Sunny\nResult of x: Warm\nAnd?",
        ),
        (
            [result([{"type": "image"}]), {"role": "user", "content": "And?"}],
            "Result of get_weather: |image|And?|",
        ),
        (
            [result("Sunny"), {"role": "assistant", "content": "It is sunny."}],
            "Result of get_weather: Sunny<assistant>It is sunny.",
        ),
    ],
)
def test_results_as_texts_keep_the_turns_of_user_and_assistant(behind, shown):
    tools = tool_use([TOOL], None, None).for_template
    messages = explained([*CONVERSATION[:2], *behind], tools, FORMATS["json"])
    assert ChatTemplate(ALTERNATES, {}).render(messages).partition("}}<user>")[2] == shown


# As those of Gemma 2 and of the first Mistral.
WITHOUT_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_a_template_that_refuses_the_system_has_the_tools_in_the_message_of_the_user(make_app):
    own = ChatTemplate(WITHOUT_SYSTEM, {})
    tokenizer = Tokenizer(tokenizer_builders.byte_level_bpe(), {}, own)
    app = make_app(tokenizer=tokenizer, max_model_len=4000)
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    answer = app.chat(messages=[*said, said[0]], tools=[tool])
    assert answer.status_code == 200, answer.text
    shown = tokenizer.decode(app.engine.requests[-1][0], skip_special_tokens=False)
    assert shown.startswith("<user>You can call functions.")
    assert shown.endswith("}}\n\nHi<assistant>Hello<user>Hi")
    refused = app.chat(messages=[{"role": "system", "content": "S"}, *said], tools=[tool])
    assert (refused.status_code, "no system role" in refused.text) == (400, True)


@pytest.mark.parametrize(
    ("option", "stops"),
    [
        # The ends of a text, of a message to a tool, and of a turn.
        ("llama-8b", (128001, 128008, 128009)),
        ("qwen3-8b", (151645,)),  # <|im_end|>
        ("gemma3-1b", (1, 106)),  # end of text, <end_of_turn>
        ("phi-4", (100265,)),  # <|im_end|>
        ("mistral-small-24b", (2,)),
        ("falcon3-7b", (11,)),
        ("gpt-oss-20b", (200002, 199999, 200012)),  # <|return|>, end of text, <|call|>
        ("glm-4.5-air", (151329, 151336, 151338)),  # end of text, <|user|>, <|observation|>
    ],
)
def test_the_tokens_that_end_a_turn(option, stops):
    section = load_config([f"model={option}", "model.load_format=dummy"]).model
    assert read_model_config(open_checkpoint(section)).eos_token_ids == stops
