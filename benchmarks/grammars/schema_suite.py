"""Counts the documents of the JSON-Schema-Test-Suite that can be produced under their schemas.

    python -m ostinato.benchmarks.grammars.schema_suite DIRECTORY [OUT.json]

DIRECTORY is a checkout of the suite, or the folder `json` of the source archive of `jsonschema`
(`pip download --no-deps --no-binary jsonschema jsonschema==4.26.0`). A schema becomes a grammar as
in the server. A document can be produced if the mask allows every token of one of its texts. Its
texts differ in the order of properties, and in the spelling of numbers and strings.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterator
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ostinato
from ostinato.runtime.grammar.compiler import GrammarModel
from ostinato.runtime.grammar.matcher import build_matcher
from ostinato.runtime.grammar.process import GrammarBuilder
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ("DocumentWriter", "count", "demo_builder", "main")

DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
# Files of the suite that assume one of two allowed behaviours, while this engine has the other.
OTHER_CHOICE = {
    "format.json": "`format` is an annotation there; here it is enforced",
    "optional/content.json": "`contentEncoding` is enforced there; here it is an annotation",
    "optional/zeroTerminatedFloats.json": "1.0 is not an integer there; here it is one",
}
# "accepted" counts the schemas that are enforced. "produced" counts the valid documents that their
# grammars allow, "written" the invalid ones.
COUNTS = ("schemas", "accepted", "valid", "produced", "invalid", "written")


def demo_builder() -> GrammarBuilder:
    """A builder of grammars for the bundled model."""
    directory = Path(ostinato.__file__).parents[1] / "models" / "demo"
    return GrammarBuilder(
        GrammarModel(tokenizer=str(directory), vocab_size=3072, eos_token_ids=(0, 2))
    )


class DocumentWriter:
    """Writes given JSON documents under a grammar, as a model could.

    Args:
        tokenizer: the tokenizer of the grammar.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer

    def write(self, matcher: LLMatcher, value: Any) -> str | None:
        """A text of the document that the grammar allows; None = it allows none.

        Args:
            matcher: at the beginning of the grammar; it stays there.
        """
        for end, text in self._value(matcher, value):
            # `_value` tokenises part by part. The tokens of the whole text can differ, so they are
            # tested too.
            if end.is_accepting() and self.after(matcher, text) is not None:
                return text
        return None

    def after(self, matcher: LLMatcher, text: str) -> LLMatcher | None:
        """The matcher after the tokens of a text; None if the mask does not allow one of them."""
        matcher = matcher.deep_copy()
        for token_id in self._tokenizer.tokenize_str(text):
            mask = matcher.compute_bitmask()
            if not mask[token_id >> 3] >> (token_id & 7) & 1:
                return None
            if not matcher.consume_token(token_id):
                return None
        return matcher

    def _value(self, matcher: LLMatcher, value: Any) -> Iterator[tuple[LLMatcher, str]]:
        """All ways to write a value: the matcher afterwards, and the text."""
        if isinstance(value, list | dict):
            begin, end = "[]" if isinstance(value, list) else "{}"
            inner = self.after(matcher, begin)
            parts = list(value.items()) if isinstance(value, dict) else value
            if inner is not None:
                yield from self._parts(inner, begin, parts, end, isinstance(value, dict))
            return
        for text in _spellings(value):
            after = self.after(matcher, text)
            if after is not None:
                yield after, text

    def _parts(
        self, matcher: LLMatcher, text: str, parts: list[Any], end: str, are_properties: bool
    ) -> Iterator[tuple[LLMatcher, str]]:
        """All ways to write the rest of a list or an object; properties in any order."""
        if not parts:
            after = self.after(matcher, end)
            if after is not None:
                yield after, text + end
            return
        comma = "" if text.endswith(("[", "{")) and len(text) == 1 else ","
        for index in range(len(parts) if are_properties else 1):
            begun = self.after(matcher, comma)
            if begun is None:
                return
            rest = [*parts[:index], *parts[index + 1 :]]
            part = parts[index]
            for after, written in (
                self._property(begun, *part) if are_properties else self._value(begun, part)
            ):
                yield from self._parts(after, text + comma + written, rest, end, are_properties)

    def _property(
        self, matcher: LLMatcher, name: str, value: Any
    ) -> Iterator[tuple[LLMatcher, str]]:
        for spelling in _spellings(name):
            after = self.after(matcher, f"{spelling}:")
            if after is not None:
                for end, text in self._value(after, value):
                    yield end, f"{spelling}:{text}"


def _spellings(value: Any) -> list[str]:
    """JSON texts of a value that is not a list or an object."""
    texts = [json.dumps(value, ensure_ascii=False)]
    if isinstance(value, str):
        codes = struct.iter_unpack("<H", value.encode("utf-16-le"))
        texts += [json.dumps(value), '"' + "".join(f"\\u{code:04x}" for (code,) in codes) + '"']
    elif isinstance(value, float) and math.isfinite(value):
        plain = format(Decimal(repr(value)), "f")
        whole = [str(int(value)), f"{int(value)}.0"] if value == int(value) else []
        texts += [*whole, plain, *(plain + "0" * zeros for zeros in range(1, 4) if "." in plain)]
    return list(dict.fromkeys(texts))


class Case(NamedTuple):
    """A schema of the suite with its documents."""

    file: str
    name: str
    schema: Any
    documents: list[tuple[Any, bool]]  # (document, whether it is valid)


def read_suite(directory: Path, draft: str) -> Iterator[Case]:
    """The cases of a draft, the optional ones too."""
    root = directory / "tests" / draft
    for file in sorted(root.rglob("*.json")):
        name = file.relative_to(root).as_posix()
        if name in OTHER_CHOICE:
            continue
        for group in json.loads(file.read_text(encoding="utf-8")):
            schema = group["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            documents = [(test["data"], test["valid"]) for test in group["tests"]]
            yield Case(name, group["description"], schema, documents)


def count(directory: Path) -> dict[str, Any]:
    """Counts for each draft of JSON Schema; `wrong` lists the documents with a wrong result."""
    builder = demo_builder()
    writer = DocumentWriter(builder.tokenizer)
    drafts: dict[str, dict[str, int]] = {}
    wrong: list[str] = []
    for draft in DRAFTS:
        counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        for case in read_suite(directory, draft):
            counts["schemas"] += 1
            answer = builder.answer(StructuredOutputsParams(json=case.schema))
            if answer.error:
                continue
            counts["accepted"] += 1
            matcher = build_matcher(builder.tokenizer, answer.grammar)
            for document, is_valid in case.documents:
                text = writer.write(matcher, document)
                counts["valid" if is_valid else "invalid"] += 1
                counts["produced" if is_valid else "written"] += text is not None
                if (text is not None) != is_valid:
                    what = "cannot be written" if is_valid else "is written, and not valid"
                    wrong.append(f"{draft}/{case.file}: {case.name}: {document!r:.80} {what}")
        drafts[draft] = counts
    return {"llguidance": version("llguidance"), "drafts": drafts, "wrong": wrong}


def main(directory: str, out: str = "") -> int:
    """Count, and print the counts as JSON."""
    text = json.dumps(count(Path(directory)), indent=1)
    print(text)
    if out:
        Path(out).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
