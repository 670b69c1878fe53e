"""The tags of the call formats that look like XML: one layout for each family of models.

Sources: the chat templates and the documentation of the models' publishers.
"""

from __future__ import annotations

import msgspec

from ostinato.api.parsing.bodies.tagged_bodies import TagLayout

__all__ = ("DSML", "FUNCTION_TAGS", "GLM", "MINIMAX", "SEED", "STEP")

GLM = TagLayout(
    key_begin="<arg_key>",
    key_end="</arg_key>",
    value_begin="<arg_value>",
    value_end="</arg_value>",
    function_end="</tool_call>",
)
FUNCTION_TAGS = TagLayout(
    function_begin="<function=",
    name_end=">",
    key_begin="<parameter=",
    key_end=">",
    value_end="</parameter>",
    function_end="</function>",
    own_lines=True,
)
SEED = msgspec.structs.replace(FUNCTION_TAGS, own_lines=False)
MINIMAX = TagLayout(
    function_begin='<invoke name="',
    name_end='">',
    key_begin='<parameter name="',
    key_end='">',
    value_end="</parameter>",
    function_end="</invoke>",
)
STEP = TagLayout(
    before=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>"),
    function_begin='<steptml:invoke name="',
    name_end='">',
    key_begin='<steptml:parameter name="',
    key_end='">',
    value_end="</steptml:parameter>",
    function_end="</steptml:invoke>",
)
DSML = TagLayout(
    function_begin='<｜DSML｜invoke name="',
    name_end='">',
    key_begin='<｜DSML｜parameter name="',
    key_end='" string="true">',
    json_key_end='" string="false">',
    value_end="</｜DSML｜parameter>",
    function_end="</｜DSML｜invoke>",
)
