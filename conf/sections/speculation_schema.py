"""The section `speculation`: which drafters guess the next tokens, and how many."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ostinato.conf.schema import Section, refuse, setting

__all__ = ("NO_DRAFTS", "SpeculationConfig", "SpeculationMethod")


class SpeculationMethod(StrEnum):
    """Where drafts come from. All but `none` also use the `prediction` of a request."""

    none = "none"
    auto = "auto"  # grammar, ngram, history, and `speculation.model` if there is one
    grammar = "grammar"  # tokens that the grammar of a structured output forces
    ngram = "ngram"  # text that followed the last tokens earlier in the same prompt and output
    history = "history"  # text that followed the last tokens in answers with the same cache salt
    draft = "draft"  # a second, smaller model: `speculation.model`
    eagle3 = "eagle3"  # an EAGLE-3 head, which reads hidden states: `speculation.model`
    mtp = "mtp"  # a layer of the model's own checkpoint that predicts one token more

    @property
    def uses_grammar(self) -> bool:
        """Whether tokens that a grammar forces are drafts."""
        return self in (SpeculationMethod.auto, SpeculationMethod.grammar)

    @property
    def uses_ngram(self) -> bool:
        """Whether the text of the sequence itself is searched."""
        return self in (SpeculationMethod.auto, SpeculationMethod.ngram)

    @property
    def uses_history(self) -> bool:
        """Whether earlier answers are searched."""
        return self in (SpeculationMethod.auto, SpeculationMethod.history)

    @property
    def needs_model(self) -> bool:
        """Whether a second checkpoint makes the drafts: a draft model, or a head."""
        return self in (SpeculationMethod.draft, SpeculationMethod.eagle3)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig(Section):
    """Draft tokens, which a step verifies beside the last token; they never change an output."""

    key = "speculation"
    method: SpeculationMethod | None = setting(
        None,
        "where drafts come from; auto = grammar, ngram, history, and the model if there is one; "
        "none = no drafts; null = auto on a CPU if drafts change no bit of an answer, else none",
    )
    model: str = setting(
        "",
        "the draft model of method=draft, the head of method=eagle3, or either for auto: a local "
        "directory, a GGUF file or a hub id",
    )
    max_tokens: int = setting(7, "draft tokens of one sequence in one step", at_least=1, at_most=31)
    adaptive: bool = setting(
        True,
        "choose by measured step costs how many drafts are verified; false = all drafts",
    )
    min_match: int = setting(
        3,
        "ngram and history: how many of the last tokens must occur in earlier text for a draft",
        at_least=1,
        at_most=16,
    )
    history_tokens: int = setting(
        1 << 20,
        "tokens of answers that history keeps; each takes 16 bytes",
        at_least=1024,
        at_most=1 << 26,
    )

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        method = self.drafter
        if method.needs_model and not self.model:
            refuse("speculation.model", f"set with speculation.method={method}", self.model)
        if self.model and not (method.needs_model or method is SpeculationMethod.auto):
            refuse(
                "speculation.model",
                "left out unless speculation.method is draft, eagle3 or auto",
                self.model,
            )

    @property
    def drafter(self) -> SpeculationMethod:
        """`method`, or `none` if `method` is None. An engine's plan never has None."""
        return SpeculationMethod.none if self.method is None else self.method

    @property
    def uses_model(self) -> bool:
        """Whether there is a draft model, an EAGLE-3 head or an MTP layer."""
        return bool(self.model) or self.method is SpeculationMethod.mtp

    @property
    def max_drafts(self) -> int:
        """Draft tokens of one sequence in one step, at most; 0 without a drafter."""
        return 0 if self.drafter is SpeculationMethod.none else self.max_tokens


NO_DRAFTS = SpeculationConfig(method=SpeculationMethod.none)
"""The section of an engine without drafts, whatever its device and model are."""
