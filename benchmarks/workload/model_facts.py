"""A model's vocabulary, context length and tokenizer, read without loading weights."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.conf.root import RunConfig
from ostinato.models.checkpoints.checkpoint import CheckpointError, resolve_path
from ostinato.runtime.errors import StartupError
from ostinato.runtime.text.tokenizer import Tokenizer

__all__ = ("ModelFacts", "model_facts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about the configured model."""

    name: str
    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer | None


def model_facts(config: RunConfig) -> ModelFacts:
    """Read the model's small files.

    Raises:
        StartupError: the files do not exist or cannot be read.
    """
    from ostinato.runtime.startup.plan.model_source import open_model

    source = open_model(config)
    section, directory = config.model, source.checkpoint.path
    try:
        # With dummy weights and no directory, the engine uses the demo model's tokenizer too.
        if section.tokenizer or directory is None:
            directory = resolve_path(
                section.tokenizer, section.revision, weights=False, key="model.tokenizer"
            )
        tokenizer = None if directory is None else Tokenizer.from_path(directory)
    except CheckpointError as error:
        raise StartupError(str(error)) from error
    limit = section.max_model_len or source.config.max_model_len
    return ModelFacts(
        name=section.name or section.path or "ostinato-demo",
        vocab_size=source.config.vocab_size,
        max_model_len=limit,
        tokenizer=tokenizer,
    )
