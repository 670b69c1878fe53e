"""`CallFormat`: the description of a format of tool calls. `formats.py` has a row for each format.

A format has markers that open and close a call. In some formats a bracket also opens a call, but
only at the beginning of an answer or after another call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from ostinato.api.parsing.bodies.body_reader import BodyReader, ParameterTypes
from ostinato.api.parsing.bodies.escaped_bodies import EscapedBody, EscapedLayout
from ostinato.api.parsing.bodies.json_bodies import ShapedBody
from ostinato.api.parsing.bodies.python_bodies import OnePythonBody, PythonLayout
from ostinato.api.parsing.bodies.tagged_bodies import TaggedBody, TagLayout
from ostinato.api.parsing.custom_tools import RAW_BEGIN, RAW_END
from ostinato.runtime.types.structured_outputs import ToolCallFormat

__all__ = ("ArgumentStyle", "CallFormat", "JsonArguments", "MakeReader")

# Makes a reader. Arguments: the marker before the body, the types of the functions' parameters.
MakeReader = Callable[[str, ParameterTypes], BodyReader]


class ArgumentStyle(Protocol):
    """How the arguments of a call are written."""

    def written(self, arguments: str) -> str:
        """Convert arguments from JSON to this style."""
        ...

    def part(self, function: str, schema: dict[str, Any] | None, *, strict: bool) -> dict[str, Any]:
        """The xgrammar format of the arguments of a function.

        Raises:
            InvalidRequestError: arguments of this schema cannot be written in this style. Or
                `strict` is true, and the schema cannot be enforced in this style.
        """
        ...

    def raw_ends(self, key: str) -> tuple[str, str]:
        """The texts before and after the only argument `key`, if its value is written verbatim."""
        ...


class JsonArguments:
    """Arguments as one JSON object."""

    def written(self, arguments: str) -> str:
        return arguments

    def part(self, function: str, schema: dict[str, Any] | None, *, strict: bool) -> dict[str, Any]:
        own = {"type": "object", **(schema or {"properties": {}})}
        return {"type": "json_schema", "json_schema": own}

    def raw_ends(self, key: str) -> tuple[str, str]:
        return RAW_BEGIN, RAW_END


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One format of tool calls."""

    name: str  # the format's key in FORMATS
    marks: tuple[str, ...] = ()  # a chat template of this format contains one of these texts
    also: str = ""  # a chat template of this format contains this text too
    # Model architectures that write this format. Used if a template has the marks of no format.
    architectures: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()  # markers that open a call anywhere in the answer
    brackets: str = ""  # characters that open a call without a marker
    # Markers and brackets that open a further call directly after a call.
    next_openings: tuple[str, ...] = ()
    next_brackets: str = ""
    closings: tuple[str, ...] = ()  # markers after a call; not part of the content
    reader: MakeReader
    style: ArgumentStyle = JsonArguments()
    inner: tuple[str, ...] = ()  # further markers within a body
    shape: ToolCallFormat  # how calls are written if a prompt or a grammar prescribes it
    is_single: bool = False  # an answer ends with its first call
    short_ids: bool = False  # templates need call ids of nine letters and digits

    @property
    def markers(self) -> tuple[str, ...]:
        return self.openings + self.next_openings + self.closings + self.inner

    @property
    def needs_types(self) -> bool:
        """Whether a reader needs the functions' schemas to tell strings from other values."""
        return isinstance(self.style, TagLayout)

    def written(self, name: str, arguments: str) -> str:
        """The text of an answer with one call in this format; `arguments` is JSON."""
        shape, text = self.shape, self.style.written(arguments)
        call = f"{shape.begin}{name}{shape.middle}{text}{shape.end}"
        return f"{shape.opening}{call}{shape.closing}"

    def constrained(self) -> CallFormat:
        """The format for answers whose grammar enforces `shape`. It streams arguments of calls."""
        shape, head = self.shape, self.shape.opening + self.shape.begin
        opening = next((one for one in self.openings if head.startswith(one)), "")
        between = (shape.separator.strip(), shape.closing.strip())
        return msgspec.structs.replace(
            self,
            openings=(opening,) if opening else (),
            next_openings=("",) if shape.opening else (),
            next_brackets="",
            closings=tuple(dict.fromkeys(filter(None, (*self.closings, *between)))),
            reader=self._shaped_reader,
        )

    def _shaped_reader(self, opening: str, types: ParameterTypes) -> BodyReader:
        if isinstance(self.style, TagLayout):
            return TaggedBody(self.style, opening, types, streams=True)
        if isinstance(self.style, PythonLayout):
            return OnePythonBody(self.shape, opening)
        if isinstance(self.style, EscapedLayout):
            return EscapedBody(streams=True)
        return ShapedBody(self.shape, opening)
