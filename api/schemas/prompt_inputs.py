"""Reads a field that is a text, token ids, a list of texts, or a list of lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.runtime.errors import InvalidRequestError

__all__ = ("read_inputs",)


def read_inputs(
    given: str | Sequence[str | int | list[int]], name: str
) -> list[str] | list[list[int]]:
    """The inputs: either all are texts, or all are lists of token ids.

    Args:
        given: a text, token ids, a list of texts, or a list of lists of token ids.
        name: name of the field, for error messages.

    Raises:
        InvalidRequestError: there is no input, or the list mixes texts, token ids or lists.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError(f"{name} is empty: send at least one", param=name)
    token_ids = [item for item in given if isinstance(item, int)]
    texts = [item for item in given if isinstance(item, str)]
    lists = [item for item in given if isinstance(item, list)]
    if len(token_ids) == len(given):
        return [token_ids]
    if len(texts) == len(given):
        return texts
    if len(lists) == len(given):
        return lists
    raise InvalidRequestError(
        f"{name} mixes texts, token ids or lists of token ids; send all of one kind", param=name
    )
