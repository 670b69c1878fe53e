"""Translates structural tags into a Lark grammar: free text with constrained parts.

Two notations are accepted: vLLM's `structures` and `triggers`, and xgrammar's `format`. A `format`
is a tree of parts of these types: const_string, json_schema, regex, grammar, any_text, sequence,
or, tag, triggered_tags, tags_with_separator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from llguidance import grammar_from, regex_to_lark

from ostinato.runtime.grammar.json_schemas import JsonForm, prepare
from ostinato.runtime.grammar.library_errors import explain
from ostinato.runtime.types.structured_outputs import Preamble

__all__ = ("behind", "tags_to_lark", "to_grammar")

_TEXT = r"/(.|\n)*/"


def tags_to_lark(tag: object, special_tokens: Mapping[str, int], form: JsonForm) -> str:
    """The grammar of a structural tag.

    Args:
        tag: `{"type": "structural_tag", ...}`.
        special_tokens: text -> id. Plain text in a grammar does not match special tokens.
        form: how the JSON of every schema in the tag is written and checked.

    Raises:
        ValueError: the tag is not well formed, or has a part that is not supported.
    """
    if not isinstance(tag, dict):
        raise ValueError(f"structural_tag must be an object, got {tag!r:.40}")  # noqa: TRY004
    builder = _Builder(special_tokens, form)
    if "structures" in tag:
        body = builder.triggered_tags(
            {
                "triggers": _list(tag, "triggers"),
                "tags": [
                    {
                        "begin": _text(one, "begin"),
                        "content": {"type": "json_schema", "json_schema": one.get("schema", True)},
                        "end": one.get("end"),
                    }
                    for one in _list(tag, "structures")
                ],
            }
        )
    else:
        body = builder.part(tag.get("format"))
    return builder.text(body)


def behind(preamble: Preamble, grammar: str, special_tokens: Mapping[str, int]) -> str:
    """The grammar of an answer after free text between two markers, such as reasoning.

    The answer may begin without the free text, unless the prompt ends with the first marker.

    Args:
        preamble: the markers.
        grammar: the grammar of the answer, as Lark or as llguidance's JSON.
        special_tokens: as in `tags_to_lark`.
    """
    is_lark = not grammar.startswith("{")
    grammars = [{"lark_grammar": grammar}] if is_lark else json.loads(grammar)["grammars"]
    first = {key: value for key, value in grammars[0].items() if value is not None}
    builder = _Builder(special_tokens, JsonForm())
    text = builder.part(
        {
            "type": "tag",
            "begin": "" if preamble.is_open else preamble.begin,
            "content": {"type": "any_text"},
            "end": preamble.end,
        }
    )
    text = f"({text} BREAK)"
    outer = builder.text(f"{text if preamble.is_open else text + '?'} @answer")
    (lark,) = json.loads(outer)["grammars"]
    lark["lark_grammar"] += "BREAK: /\\n{0,2}/\n"
    return json.dumps({"grammars": [lark, {**first, "name": "answer"}, *grammars[1:]]})


def to_grammar(form: Literal["regex", "grammar"], text: str) -> str:
    """Translate a regular expression, or a grammar in Lark or GBNF, into a Lark grammar.

    Raises:
        ValueError: the text is neither Lark nor GBNF. Errors within Lark and within regular
            expressions appear when the grammar is built.
    """
    try:
        return grammar_from(form, text)
    except (ValueError, RecursionError) as error:
        raise ValueError(explain(str(error))) from error


class _Builder:
    """Collects the rules of one grammar.

    Each type of part has a method, which adds rules and returns the expression of the part.
    """

    def __init__(self, special_tokens: Mapping[str, int], form: JsonForm) -> None:
        self._special_tokens = special_tokens
        self._form = form
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._special = (
            re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        )
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []
        self._parts: dict[str, Callable[[dict[str, Any]], str]] = {
            "const_string": lambda part: self._literal(_text(part, "value")),
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": lambda part: self._rule(_TEXT),
            "sequence": self._sequence,
            "or": lambda part: self._either([self.part(one) for one in _list(part, "elements")]),
            "tag": self._tag,
            "triggered_tags": self.triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def text(self, body: str) -> str:
        """The grammar whose start is `body`."""
        lark = "\n".join((f"start: {body}", "TEXT: " + _TEXT, *self._rules)) + "\n"
        grammars = [{"name": "structural_tag", "lark_grammar": lark}, *self._grammars]
        return json.dumps({"grammars": grammars}, ensure_ascii=False)

    def part(self, part: object) -> str:
        """The Lark expression of one part of a `format` tree."""
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind not in self._parts:
            raise ValueError(
                f"structural_tag: a part's type must be one of {', '.join(self._parts)}, got "
                f"{kind!r}"
            )
        return self._parts[kind](part)

    def triggered_tags(self, part: dict[str, Any]) -> str:
        """Free text in which a trigger begins one of the tags."""
        at_least_one, only_one = _flag(part, "at_least_one"), _flag(part, "stop_after_first")
        tags = _list(part, "tags")
        by_trigger = _by_trigger(tags, _list(part, "triggers"))
        # `at_least_one`: the answer begins with a tag. After free text, a tag might never begin.
        first = self._either([self._tag(tag) for tag in tags]) if at_least_one else ""
        if at_least_one and only_one:
            return first
        calls = self._either(
            [self._after_text(trigger, group) for trigger, group in by_trigger.items()]
        )
        return f"({calls} | TEXT)" if only_one else f"{first} {calls}* TEXT"

    def _after_text(self, trigger: str, tags: list[dict[str, Any]]) -> str:
        """Text up to a trigger, then the rest of one of the tags that begin with that trigger."""
        special = self._special.search(trigger) if self._special else None
        if special is None:
            # The rule is lazy: the text ends where the trigger occurs first.
            head = self._rule(f"TEXT {_quoted(trigger)}", "[lazy]")
        elif special.start() == 0:
            head = f"TEXT {self._literal(trigger)}"
        else:
            raise ValueError(
                f"structural_tag: the trigger {trigger!r} has a special token within it; begin the "
                "trigger with the token"
            )
        rests = [
            self._tag({**tag, "begin": _text(tag, "begin").removeprefix(trigger)}) for tag in tags
        ]
        return f"({head} {self._either(rests)})"

    def _tags_with_separator(self, part: dict[str, Any]) -> str:
        tag = self._either([self._tag(one) for one in _list(part, "tags")])
        more = f"({self._literal(_text(part, 'separator'))} {tag})*"
        several = tag if _flag(part, "stop_after_first") else f"({tag} {more})"
        return several if _flag(part, "at_least_one") else f"{several}?"

    def _tag(self, part: dict[str, Any]) -> str:
        begin, content, ends = _text(part, "begin"), part.get("content"), part.get("end")
        given = ends if isinstance(ends, list) and ends else [ends]
        texts = [end for end in given if isinstance(end, str)]
        if len(texts) < len(given):
            raise ValueError(
                f"structural_tag: end must be a string or a list of strings, got {ends!r}"
            )
        if isinstance(content, dict) and content.get("type") == "any_text":
            inner = self._either([self._text_until(end) for end in texts])
        else:
            inner = f"{self.part(content)} {self._either([self._literal(end) for end in texts])}"
        return f"({self._literal(begin)} {inner})"

    def _text_until(self, end: str) -> str:
        if not end:
            return self._rule(_TEXT)
        if self._special and self._special.search(end):
            return f"TEXT {self._literal(end)}"
        return self._rule(f"TEXT {_quoted(end)}", "[lazy]")

    def _sequence(self, part: dict[str, Any]) -> str:
        elements = _list(part, "elements")
        for one in elements[:-1]:
            if isinstance(one, dict) and one.get("type") in ("any_text", "triggered_tags"):
                raise ValueError(
                    f"structural_tag: {one['type']} has no end, so it must be the last part"
                    " of a sequence or the content of a tag"
                )
        return f"({' '.join(self.part(one) for one in elements)})"

    def _json_schema(self, part: dict[str, Any]) -> str:
        schema = part.get("json_schema", part.get("schema"))
        name = f"json{len(self._grammars)}"
        self._grammars.append({"name": name, "json_schema": prepare(schema, self._form)})
        return f"@{name}"

    def _regex(self, part: dict[str, Any]) -> str:
        return self._rule(f"/{regex_to_lark(_text(part, 'pattern'))}/")

    def _grammar(self, part: dict[str, Any]) -> str:
        name = f"grammar{len(self._grammars)}"
        lark = to_grammar("grammar", _text(part, "grammar"))
        self._grammars.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def _rule(self, body: str, attribute: str = "") -> str:
        name = f"part{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def _either(self, parts: list[str]) -> str:
        if not parts:
            raise ValueError("structural_tag: a list of parts is empty")
        return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"

    def _literal(self, text: str) -> str:
        """The expression of a text. Special tokens in the text become token ids."""
        if self._special is None:
            return _quoted(text)
        pieces: list[str] = []
        done = 0
        for match in self._special.finditer(text):
            pieces += [_quoted(text[done : match.start()])] if match.start() > done else []
            pieces.append(f"<[{self._special_tokens[match[0]]}]>")
            done = match.end()
        pieces += [_quoted(text[done:])] if done < len(text) or not pieces else []
        return " ".join(pieces)


def _by_trigger(tags: list[dict[str, Any]], triggers: list[str]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for tag in tags:
        begin = _text(tag, "begin")
        own = next(
            (one for one in triggers if isinstance(one, str) and one and begin.startswith(one)),
            None,
        )
        if own is None:
            raise ValueError(f"structural_tag: {begin!r} begins with none of the triggers")
        groups.setdefault(own, []).append(tag)
    unused = [one for one in triggers if one not in groups]
    if unused:
        raise ValueError(f"structural_tag: no tag begins with the trigger {unused[0]!r}")
    return groups


def _quoted(text: str) -> str:
    return json.dumps(text)


def _text(part: object, name: str) -> str:
    value = part.get(name) if isinstance(part, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"structural_tag: {name} must be a string, got {value!r}")  # noqa: TRY004
    return value


def _list(part: dict[str, Any], name: str) -> list[Any]:
    value = part.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"structural_tag: {name} must be a non-empty list, got {value!r}")
    return value


def _flag(part: dict[str, Any], name: str) -> bool:
    value = part.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"structural_tag: {name} must be true or false, got {value!r}")  # noqa: TRY004
    return value
