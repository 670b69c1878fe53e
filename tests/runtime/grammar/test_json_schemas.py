"""How schemas are prepared: numbers, formats, and each limit at its value and past it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ostinato.benchmarks.grammars.schema_suite import DocumentWriter, demo_builder
from ostinato.runtime.grammar.json_schemas import (
    MAX_OPTIONAL_OF_SOME,
    MAX_OPTIONAL_PROPERTIES,
    JsonForm,
    prepare,
)
from ostinato.runtime.grammar.matcher import build_matcher
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams

BUILDER = demo_builder()
WRITER = DocumentWriter(BUILDER.tokenizer)
EXACT = 2**53


def error_of(schema: Any, **options: Any) -> str:
    return BUILDER.answer(StructuredOutputsParams(json=schema, **options)).error


def check(schema: Any, valid: list[Any], invalid: list[Any], **options: Any) -> None:
    answer = BUILDER.answer(StructuredOutputsParams(json=schema, **options))
    assert not answer.error
    matcher = build_matcher(BUILDER.tokenizer, answer.grammar)
    assert [one for one in valid if WRITER.write(matcher, one) is None] == []
    assert [one for one in invalid if WRITER.write(matcher, one) is not None] == []


class TestNumbers:
    @pytest.mark.parametrize(
        ("schema", "valid", "invalid"),
        [
            ({"const": EXACT - 1}, [EXACT - 1], [EXACT - 2, EXACT]),
            ({"const": 10**18}, [10**18], [10**18 + 1]),
            ({"const": 0.9007199254740991}, [0.9007199254740991], [0.900719925474099]),
            ({"enum": [1.0, 1e22]}, [1, 10**22], [2]),
            ({"type": "integer", "maximum": EXACT - 1}, [EXACT - 1], [EXACT]),
            ({"type": "integer", "exclusiveMinimum": -EXACT + 1}, [-EXACT + 2], [-EXACT + 1]),
            ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.1, 1], [0, 0.0, 1.1]),
            ({"type": "number", "minimum": -0.5, "maximum": 0.25}, [-0.5, 0, 0.25], [-0.51, 0.3]),
            ({"multipleOf": 100_000}, [300_000, 0], [100_001]),
            ({"multipleOf": 99991}, [3 * 99991, "text"], [3 * 99991 + 1, 5]),
            ({"multipleOf": 9.9991}, [9.9991, 19.9982, 0], [9.9992, 1]),
            ({"type": "array", "minItems": 2.0, "maxItems": 2e0}, [[1, 2]], [[1]]),
            ({"type": "string", "maxLength": 2**31}, ["a" * 99], [1]),
            ({"type": "string", "maxLength": 10**30}, ["a" * 99], [1]),
            ({"minimum": 2, "exclusiveMinimum": True}, [3], [2]),  # draft 4
        ],
    )
    def test_those_that_are_exact(self, schema, valid, invalid):
        check(schema, valid, invalid)

    @pytest.mark.parametrize(
        "schema",
        [
            {"const": EXACT + 1},
            {"enum": ["a", {"b": [2**60]}]},
            {"const": 0.9007199254740993},
            {"const": 1e23},
            {"maximum": EXACT},
            {"minimum": -EXACT},
            {"exclusiveMinimum": 1e300},
            {"minimum": 0.12345678901234567},
            {"multipleOf": 100_001},
            {"multipleOf": 0.07},
            {"allOf": [{"multipleOf": 316}, {"multipleOf": 317}]},
            {"exclusiveMinimum": 0, "maximum": 0.5},
            {"allOf": [{"exclusiveMaximum": 3}, {"minimum": 2.5}]},
        ],
    )
    def test_those_that_are_not(self, schema):
        """Such numbers are refused when `strict` is true. Otherwise they are not enforced."""
        assert "#/" in error_of(schema)
        assert error_of({"items": schema}).count("#/items/")
        assert error_of(schema, strict=False) == ""

    @pytest.mark.parametrize(
        "schema",
        [
            {"minLength": 2**31},
            {"minItems": 10**30},
            {"minItems": -1},
            {"maxItems": 1.5},
            {"maxLength": True},
            {"maxProperties": "2"},
            {"multipleOf": 0},
            {"multipleOf": -2},
            {"maximum": "2"},
            {"maximum": None},
        ],
    )
    @pytest.mark.parametrize("strict", [True, False])
    def test_those_that_are_wrong(self, schema, strict):
        ((keyword, value),) = schema.items()
        error = error_of({"properties": {"a": schema}}, strict=strict)
        assert f"#/properties/a/{keyword} must be" in error
        assert json.dumps(value) in error


class TestFormats:
    @pytest.mark.parametrize(
        ("name", "valid", "invalid"),
        [
            ("date", ["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29", "2024-04-31"]),
            (
                "time",
                ["23:59:60Z", "00:29:60.5+00:30", "15:59:60-08:00", "08:30:06z"],
                ["22:59:60Z", "23:59:60+00:30", "23:58:60Z", "24:00:00Z", "08:30:06"],
            ),
            (
                "date-time",
                ["1998-12-31T23:59:60Z", "1998-12-31t15:59:60.1-08:00"],
                ["1998-12-31T22:59:60Z", "1998-02-29T00:00:00Z", "1998-12-31"],
            ),
            ("email", ["a.b@c.d", '"a b"@c', "a@[127.0.0.1]", "a@[IPv6:::1]"], ["a", "a..b@c"]),
            ("hostname", ["a.b-c", "a" * 63], ["-a", "a" * 64, ".".join(["a" * 63] * 4) + "a"]),
            ("ipv4", ["127.0.0.1"], ["256.0.0.1", "01.0.0.1"]),
            ("ipv6", ["::1", "1::d6:192.168.0.1", "1:2:3:4:5:6:7::"], ["1:2:3", "::1%a"]),
            ("uri", ["http://[::1.2.3.4]/a?b#c", "urn:a:b"], ["//a", "http://a b"]),
            ("uri-reference", ["//a", "a/b", "", "#c"], ["\\a", "a b"]),
            ("json-pointer", ["", "/a~0b/~1", "/"], ["a", "/~2"]),
            ("relative-json-pointer", ["0", "1/a", "12#"], ["/a", "01", ""]),
            ("uuid", ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08"]),
            ("duration", ["P1Y2M3DT4H5M6S", "P2W", "PT1S"], ["P", "PT", "P1D2H"]),
        ],
    )
    def test_texts(self, name, valid, invalid):
        check({"format": name, "type": "string"}, valid, [*invalid, 1])
        check({"format": name}, [*valid, 1, None], invalid)

    def test_with_a_pattern(self):
        schema = {"type": "string", "format": "time", "pattern": "^23"}
        check(schema, ["23:59:60Z"], ["22:59:60Z", "00:29:60+00:30"])

    def test_an_unknown_one(self):
        error = error_of({"format": "color"})
        assert '"color"' in error
        assert "date-time" in error
        check({"type": "string", "format": "color"}, ["any"], [1], strict=False)
        check({"type": "integer", "format": "int64"}, [1], ["1"])  # `format` concerns strings only


class TestNames:
    def test_a_listed_name_is_not_written_with_codes(self):
        schema = {"type": "object", "properties": {"foo": {"type": "integer"}}}
        answer = BUILDER.answer(StructuredOutputsParams(json=schema))
        matcher = build_matcher(BUILDER.tokenizer, answer.grammar)
        assert WRITER.after(matcher, '{"foo":1,"other":"x"}')
        assert not WRITER.after(matcher, '{"\\u0066oo":"x"}')
        assert not WRITER.after(matcher, '{"\\u0066oo":1}')

    def test_control_characters(self):
        text = "a\x01b"
        check({"const": text}, [text], ["ab"])
        closed = {"properties": {"a": {"const": text}}, "additionalProperties": False}
        check(closed, [{"a": text}], [{"a": "ab"}])
        assert "control character" in error_of({"properties": {"a": {"const": text}}})
        assert "control character" in error_of({"properties": {"a": {"pattern": r"\x01"}}})

    def test_a_property_that_is_called_properties(self):
        schema = {"type": "object", "properties": {"properties": {"type": "object"}}}
        options = {"disable_additional_properties": True}
        check(schema, [{"properties": {"a": 1}}], [{"additionalProperties": 1}], **options)


class TestLimits:
    @pytest.mark.parametrize(
        ("most", "more"),
        [
            (MAX_OPTIONAL_PROPERTIES, {}),
            (MAX_OPTIONAL_PROPERTIES, {"minProperties": 1, "maxProperties": 1}),
            (MAX_OPTIONAL_OF_SOME, {"minProperties": 1}),
        ],
    )
    def test_optional_properties(self, most, more):
        def schema(count: int) -> dict[str, Any]:
            properties = {f"p{index}": {"type": "integer"} for index in range(count)}
            closed = {"type": "object", "additionalProperties": False}
            return {**closed, "properties": properties, **more}

        check(schema(most), [{"p0": 1}, {f"p{most - 1}": 1}], [{"q": 1}])
        assert f"at most {most} are possible" in error_of(schema(most + 1))

    @pytest.mark.parametrize("required", [[], ["a", "b"]])
    def test_fewest_properties_of_an_open_object(self, required):
        def schema(fewest: int) -> dict[str, Any]:
            return {"type": "object", "required": required, "minProperties": fewest}

        most = len(required) + 1
        some = dict.fromkeys([*required, "c"], 1)
        check(schema(most), [some], [dict.fromkeys(required, 1)])
        assert f"required properties, got {most + 1}" in error_of(schema(most + 1))

    @pytest.mark.parametrize("keyword", ["minItems", "minLength"])
    def test_fewest_items_and_characters(self, keyword):
        kind = {"type": "array" if keyword == "minItems" else "string"}
        assert "must be less than" not in error_of({**kind, keyword: 2**31 - 1})
        assert "must be less than 2147483648" in error_of({**kind, keyword: 2**31})

    def test_alternatives(self):
        def grammar(count: int) -> str:
            return "start: " + " | ".join(f'"{index:x};"' for index in range(count))

        def error(count: int) -> str:
            return BUILDER.answer(StructuredOutputsParams(grammar=grammar(count))).error

        assert error(19_999) == ""
        assert "more than 20000 ways at one place" in error(20_000)

    def test_parts_of_a_schema(self):
        def schema(count: int) -> dict[str, Any]:
            values = [f"v{index}" for index in range(count)]
            return {"type": "string", "allOf": [{"enum": values}]}

        assert error_of(schema(49_994)) == ""
        assert "more than 50000 parts" in error_of(schema(49_995))

    def test_indentation(self):
        answer = BUILDER.answer(StructuredOutputsParams(json={"type": "array"}))
        matcher = build_matcher(BUILDER.tokenizer, answer.grammar)
        assert WRITER.after(matcher, "[\n" + " " * 40 + "1]")
        assert not WRITER.after(matcher, "[\n" + " " * 41 + "1]")
        assert not WRITER.after(matcher, "[  1]")

    def test_depth(self):
        def schema(depth: int) -> str:
            return '{"items":' * depth + "{}" + "}" * depth

        assert error_of(schema(100)) == ""
        assert "nested too deeply" in error_of(schema(1000))


def test_what_is_kept_in_a_schema():
    """The values of `default`, `examples`, `enum` and unknown keywords are not schemas."""
    schema = {
        "title": "T",
        "x-note": {"minLength": -1, "maximum": "no"},
        "default": {"minLength": -1},
        "examples": [{"pattern": "["}],
        "enum": [{"minLength": -1, "pattern": "["}],
    }
    prepared = prepare(schema, JsonForm())
    assert {name: value for name, value in prepared.items() if name != "x-guidance"} == schema


def test_beside_a_reference_nothing_counts_in_old_drafts():
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$ref": "#/definitions/a",
        "maxLength": 1,
        "definitions": {"a": {"type": "string"}},
    }
    check(schema, ["ab"], [1])
    new = {**schema, "$schema": "https://json-schema.org/draft/2020-12/schema"}
    check(new, ["a"], ["ab", 1])
