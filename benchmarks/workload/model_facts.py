"""A model's vocabulary, context length and tokenizer, read without loading weights."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.conf.root import RunConfig
from ostinato.models.checkpoints.checkpoint import CheckpointError, resolve_directory
from ostinato.runtime.errors import StartupError
from ostinato.runtime.text.tokenizer import Tokenizer

__all__ = ("ModelFacts", "model_facts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Of the model that the configuration names."""

    name: str
    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer | None


def model_facts(config: RunConfig) -> ModelFacts:
    """Read the model's small files.

    Raises:
        StartupError: they can not be found or read.
    """
    from ostinato.runtime.startup.planning import open_model

    source = open_model(config)
    section, directory = config.model, source.checkpoint.directory
    try:
        # Dummy weights without a directory borrow the demo model's tokenizer, as the engine does.
        if section.tokenizer or directory is None:
            directory = resolve_directory(
                section.tokenizer, section.revision, weights=False, key="model.tokenizer"
            )
        tokenizer = None if directory is None else Tokenizer.from_directory(directory)
    except CheckpointError as error:
        raise StartupError(str(error)) from error
    limit = section.max_model_len or source.config.max_model_len
    return ModelFacts(
        name=section.name or section.path or "ostinato-demo",
        vocab_size=source.config.vocab_size,
        max_model_len=limit,
        tokenizer=tokenizer,
    )
