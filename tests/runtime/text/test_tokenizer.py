"""The tokenizer of a model directory and its chat template, compared with transformers'."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ostinato.runtime.errors import InvalidRequestError, StartupError
from ostinato.runtime.text.tokenizer import Tokenizer
from tests.runtime.text import tokenizer_builders as build

WITH_TOOLS = "{% set ns = namespace(n=0) %}\n{{ tools | tojson }}\n{{ messages[0].content }}"
CHATML = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|begin|>system\\nBe kind.<|end|>\\n' }}
    {%- endif %}
    {{- '<|begin|>' + message.role + '\\n' + message.content + '<|end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|begin|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA_3 = """{{- bos_token }}
{% set loop_messages = messages %}{% for message in loop_messages %}
{% set content = '[' + message['role'] + ']\n\n' + message['content'] | trim + '<|end|>' %}
{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '[assistant]\n\n' }}{% endif %}"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"""

GENERATION_TAG = """{% for message in messages %}{% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message | tojson }}
{% endif %}{% if loop.index > 4 %}{% break %}{% endif %}{% endfor %}
{{ {'b': 1, 'a': '<é>'} | tojson(indent=2, sort_keys=true) }}"""

NAMESPACE = """{% set ns = namespace(count=0) %}{% for message in messages %}
    {% set ns.count = ns.count + 1 %}
{{ ns.count }}: {{ message.content[:5] | upper }}
{% endfor %}"""

TEMPLATES = {
    "chatml": CHATML,
    "llama_3": LLAMA_3,
    "mistral": MISTRAL,
    "generation_tag": GENERATION_TAG,
    "namespace": NAMESPACE,
}

ONE = [{"role": "user", "content": "  Hello <world> & é\n"}]
THREE = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi, you  "},
    {"role": "user", "content": "naïve 🎉?"},
]
WITH_SYSTEM = [{"role": "system", "content": "Be terse."}, *ONE]
CONVERSATIONS = {"one": ONE, "three": THREE, "with_system": WITH_SYSTEM}
ACCEPTED = [
    pytest.param(template, messages, id=f"{template}-{name}")
    for template in TEMPLATES
    for name, messages in CONVERSATIONS.items()
    if (template, name) != ("mistral", "with_system")  # Mistral's template refuses a system message
]


def save(
    path: Path,
    *,
    template: str | dict[str, str] | None = None,
    save_jinja_files: bool = True,
    backend=None,
    **config: object,
) -> PreTrainedTokenizerFast:
    """Writes a model directory's tokenizer files, as transformers does."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend or build.byte_level_bpe(),
        bos_token="<|begin|>",
        eos_token="<|end|>",
        **config,
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path, save_jinja_files=save_jinja_files)
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(ours, theirs) for a template's name, each loaded once."""

    @cache
    def load(name: str) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
        path = tmp_path_factory.mktemp(name)
        theirs = save(path, template=TEMPLATES[name])
        return Tokenizer.from_path(path), theirs

    return load


class TestChatTemplateParity:
    @pytest.mark.parametrize("add_generation_prompt", [True, False])
    @pytest.mark.parametrize(("name", "messages"), ACCEPTED)
    def test_same_text_as_transformers(self, both, name, messages, add_generation_prompt):
        ours, theirs = both(name)
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        got = ours.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
        assert got == expected
        assert ours.encode(got, add_special_tokens=False) == theirs.encode(
            expected, add_special_tokens=False
        )

    def test_same_refusal_as_transformers(self, both):
        ours, theirs = both("mistral")
        refusal = "Conversation roles must alternate"
        with pytest.raises(Exception, match=refusal):
            theirs.apply_chat_template(WITH_SYSTEM, tokenize=False)
        with pytest.raises(InvalidRequestError, match=refusal) as refused:
            ours.apply_chat_template(WITH_SYSTEM)
        assert refused.value.param == "messages"

    @pytest.mark.parametrize("name", ["chatml", "llama_3"])
    def test_continuing_the_last_message(self, both, name):
        ours, theirs = both(name)
        messages = THREE[:2]
        assert ours.apply_chat_template(
            messages, add_generation_prompt=False, continue_final_message=True
        ) == theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)

    def test_continuing_list_content(self, tmp_path):
        template = (
            "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
        )
        theirs = save(tmp_path, template=template)
        messages = [
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            }
        ]
        got = Tokenizer.from_path(tmp_path).apply_chat_template(
            messages, add_generation_prompt=False, continue_final_message=True
        )
        assert got == "<a><b"
        assert got == theirs.apply_chat_template(
            messages, tokenize=False, continue_final_message=True
        )

    def test_variables_of_the_template(self, tmp_path):
        theirs = save(tmp_path, template=CHATML)
        got = Tokenizer.from_path(tmp_path).apply_chat_template(
            ONE, variables={"enable_thinking": False}
        )
        assert got.endswith("assistant\n<think>\n\n</think>\n\n")
        assert got == theirs.apply_chat_template(
            ONE, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )

    @pytest.mark.parametrize("in_files", [True, False])
    @pytest.mark.parametrize("edge", ["", "\n", "\n\n", " \n  "])
    def test_a_template_of_its_own_for_tools(self, tmp_path, in_files: bool, edge: str):
        """Line breaks and spaces at the edges of both are kept, as if each were alone."""
        named = {"default": f"{edge}{CHATML}{edge}", "tool_use": f"{edge}{WITH_TOOLS}{edge}"}
        theirs = save(tmp_path, template=named, save_jinja_files=in_files)
        assert (tmp_path / "chat_template.jinja").exists() == in_files
        ours = Tokenizer.from_path(tmp_path)
        tool = {"type": "function", "function": {"name": "add"}}
        for tools in (None, [tool]):
            assert ours.apply_chat_template(
                ONE, tools=tools, add_generation_prompt=False
            ) == theirs.apply_chat_template(ONE, tools=tools, tokenize=False)

    def test_the_date(self, tmp_path):
        save(tmp_path, template="{{ strftime_now('%Y') }}")
        before = datetime.now().year
        got = int(Tokenizer.from_path(tmp_path).apply_chat_template(ONE))
        assert before <= got <= datetime.now().year


class TestChatTemplateRefusals:
    def test_no_template(self, tmp_path):
        save(tmp_path)
        with pytest.raises(InvalidRequestError, match="has no chat template") as refused:
            Tokenizer.from_path(tmp_path).apply_chat_template(ONE)
        assert refused.value.code == "no_chat_template"

    def test_both_ways_to_end(self, tmp_path):
        save(tmp_path, template=CHATML)
        with pytest.raises(InvalidRequestError, match="add_generation_prompt=false"):
            Tokenizer.from_path(tmp_path).apply_chat_template(
                ONE, add_generation_prompt=True, continue_final_message=True
            )

    def test_a_last_message_that_the_template_drops(self, tmp_path):
        save(tmp_path, template="{{ messages[0].content }}")
        with pytest.raises(InvalidRequestError, match="drops the last message"):
            Tokenizer.from_path(tmp_path).apply_chat_template(
                THREE[:2], add_generation_prompt=False, continue_final_message=True
            )

    @pytest.mark.parametrize("name", ["messages", "bos_token", "add_generation_prompt"])
    def test_variables_that_the_server_sets(self, tmp_path, name):
        save(tmp_path, template=CHATML)
        with pytest.raises(InvalidRequestError, match=f"cannot set {name}"):
            Tokenizer.from_path(tmp_path).apply_chat_template(ONE, variables={name: "x"})

    def test_the_sandbox(self, tmp_path):
        save(tmp_path, template="{{ messages.__class__.__mro__ }}")
        with pytest.raises(InvalidRequestError, match="unsafe"):
            Tokenizer.from_path(tmp_path).apply_chat_template(ONE)

    def test_a_template_that_is_not_jinja(self, tmp_path):
        save(tmp_path, template="{% for %}")
        with pytest.raises(StartupError, match="not valid Jinja"):
            Tokenizer.from_path(tmp_path)


class TestWhereTheTemplateComesFrom:
    def test_the_users_file_goes_first(self, tmp_path):
        save(tmp_path, template="model's")
        mine = tmp_path / "mine.jinja"
        mine.write_text("user's")
        ours = Tokenizer.from_path(tmp_path, chat_template_file=str(mine))
        assert ours.apply_chat_template(ONE) == "user's"

    def test_a_users_file_that_is_not_there(self, tmp_path):
        save(tmp_path)
        with pytest.raises(StartupError, match=r"model\.chat_template: there is no file"):
            Tokenizer.from_path(tmp_path, chat_template_file=str(tmp_path / "no.jinja"))

    @pytest.mark.parametrize("template", ["plain", [{"name": "default", "template": "plain"}]])
    def test_tokenizer_config(self, tmp_path, template):
        save(tmp_path)
        file = tmp_path / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
        assert Tokenizer.from_path(tmp_path).apply_chat_template(ONE) == "plain"

    def test_chat_template_json(self, tmp_path):
        save(tmp_path)
        (tmp_path / "chat_template.json").write_text('{"chat_template": "from json"}')
        assert Tokenizer.from_path(tmp_path).apply_chat_template(ONE) == "from json"


class TestEncoding:
    @pytest.mark.parametrize("text", ["Hello <|begin|>you<|end|>", "naïve 🎉", "", "a\n\n b"])
    @pytest.mark.parametrize("family", ["byte_level_bpe", "byte_fallback_bpe"])
    @pytest.mark.parametrize("add_special_tokens", [True, False])
    def test_same_ids_as_transformers(self, tmp_path, family, text, add_special_tokens):
        theirs = save(tmp_path, backend=getattr(build, family)())
        ours = Tokenizer.from_path(tmp_path)
        expected = theirs.encode(text, add_special_tokens=add_special_tokens)
        assert ours.encode(text, add_special_tokens=add_special_tokens) == expected

    def test_bos_is_added_where_the_model_wants_it(self, tmp_path):
        save(tmp_path, backend=build.byte_fallback_bpe())
        ours = Tokenizer.from_path(tmp_path)
        assert ours.encode("the")[0] == ours.token_id("<s>")
        assert ours.token_id("<s>") not in ours.encode("the", add_special_tokens=False)

    def test_truncation_and_padding_of_the_file_are_ignored(self, tmp_path):
        save(tmp_path)
        file = tmp_path / "tokenizer.json"
        content = json.loads(file.read_text())
        content["truncation"] = {
            "direction": "Right",
            "max_length": 2,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        file.write_text(json.dumps(content))
        assert len(Tokenizer.from_path(tmp_path).encode("the quick brown fox")) > 2

    def test_token_bytes_are_exact_for_half_a_character(self, tmp_path):
        save(tmp_path)
        ours = Tokenizer.from_path(tmp_path)
        token_ids = ours.encode("🦆")
        assert len(token_ids) > 1
        assert b"".join(map(ours.token_bytes, token_ids)) == "🦆".encode()

    @pytest.mark.parametrize("special", [True, False])
    def test_named_special_tokens_keep_their_settings(self, tmp_path, special):
        """Phi-3 drops the white space after `<|end|>`, masks drop that before them."""
        save(tmp_path)
        file = tmp_path / "tokenizer.json"
        content = json.loads(file.read_text())
        for token in content["added_tokens"]:
            token |= {"rstrip": True, "lstrip": True, "special": special}
        file.write_text(json.dumps(content))
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        ours = Tokenizer.from_path(tmp_path)
        assert ours.is_special(theirs.eos_token)
        text = f"the {theirs.eos_token}\n fox"
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text) == ours.encode(text.replace(" ", "").replace("\n", ""))

    def test_named_special_tokens_are_skipped_even_if_the_file_forgot(self, tmp_path):
        theirs = save(tmp_path)
        file = tmp_path / "tokenizer.json"
        content = json.loads(file.read_text())
        for token in content["added_tokens"]:
            token["special"] = False
        file.write_text(json.dumps(content))
        ours = Tokenizer.from_path(tmp_path)
        token_ids = theirs.encode("the<|end|>")
        assert ours.decode(token_ids) == "the"
        assert ours.decode(token_ids, skip_special_tokens=False) == "the<|end|>"


class TestLoading:
    def test_older_directories_are_converted(self, tmp_path):
        backend = json.loads(build.byte_level_bpe().to_str())
        (tmp_path / "vocab.json").write_text(json.dumps(backend["model"]["vocab"]))
        merges = [" ".join(pair) for pair in backend["model"]["merges"]]
        (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
        (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
        ours = Tokenizer.from_path(tmp_path)
        assert ours.decode(ours.encode("the quick brown fox")) == "the quick brown fox"

    def test_no_tokenizer(self, tmp_path):
        with pytest.raises(StartupError, match=r"no tokenizer\.json") as refused:
            Tokenizer.from_path(tmp_path)
        assert "\n" not in str(refused.value)

    def test_no_directory(self, tmp_path):
        with pytest.raises(StartupError, match="is not a directory"):
            Tokenizer.from_path(tmp_path / "nowhere")

    @pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
    def test_a_broken_file_is_named(self, tmp_path, file):
        save(tmp_path)
        (tmp_path / file).write_text('{"version":')
        with pytest.raises(StartupError, match=file):
            Tokenizer.from_path(tmp_path)

    def test_neither_torch_nor_transformers_is_imported(self, tmp_path):
        save(tmp_path, template=CHATML)
        program = (
            "import sys\n"
            "from ostinato.runtime.text.tokenizer import Tokenizer\n"
            f"Tokenizer.from_path({str(tmp_path)!r}).apply_chat_template([])\n"
            "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240
        )
        assert done.stdout == "[]\n"


@pytest.mark.parametrize("lowers", [True, False])
def test_texts_become_lower_case_if_sentence_transformers_says_so(lowers: bool, tmp_path: Path):
    demo = Path(__file__).parents[3] / "models" / "demo"
    (tmp_path / "tokenizer.json").write_bytes((demo / "tokenizer.json").read_bytes())
    settings = {"max_seq_length": 99, "do_lower_case": lowers}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    plain, ours = Tokenizer.from_path(demo), Tokenizer.from_path(tmp_path)
    text = "An Ostinato REPEATS"
    assert ours.encode(text) == plain.encode(text.lower() if lowers else text)
    assert plain.encode(text) != plain.encode(text.lower())
