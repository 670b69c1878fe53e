"""The configuration sections of single commands: generate, batch, chat, plan and others."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.conf.schema import Section, setting

__all__ = (
    "BatchSection",
    "ChatSection",
    "CompileSection",
    "GenerateSection",
    "PlanSection",
    "QuantizeSection",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateSection(Section):
    """Sampling parameters of `run generate`."""

    key = "generate"
    max_tokens: int = setting(128, "tokens to generate at most", at_least=1)
    temperature: float | None = setting(
        None, "0 = the likeliest token; null = the model's default", at_least=0, at_most=2
    )
    top_p: float | None = setting(
        None, "nucleus; 1 = off, null = the model's default", above=0, at_most=1
    )
    top_k: int | None = setting(
        None, "the k likeliest; 0 = off, null = the model's default", at_least=0
    )
    seed: int | None = setting(
        None, "equal seeds give equal tokens; null = a random seed", at_least=0
    )
    stop: list[str] = setting([], "strings that end the text")
    chat: bool = setting(False, "send the prompt as a user's message through the chat template")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSection(Section):
    """Concurrency of `run batch`."""

    key = "batch"
    concurrency: int | None = setting(
        None, "concurrent requests; null = twice the sequences that can run", at_least=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSection(Section):
    """System message and sampling parameters of `run chat`."""

    key = "chat"
    system: str = setting("", "system message at the head of the conversation; empty = none")
    max_tokens: int | None = setting(
        None, "tokens of one answer at most; null = up to the context's end", at_least=1
    )
    temperature: float | None = setting(
        None, "0 = the likeliest token; null = the model's default", at_least=0, at_most=2
    )
    top_p: float | None = setting(
        None, "nucleus; 1 = off, null = the model's default", above=0, at_most=1
    )
    top_k: int | None = setting(
        None, "the k likeliest; 0 = off, null = the model's default", at_least=0
    )
    seed: int | None = setting(
        None, "equal seeds give equal tokens; null = a random seed", at_least=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSection(Section):
    """The output format of `run plan`, and the machine that it plans for."""

    key = "plan"
    json: bool = setting(False, "print the memory plan as JSON instead of a table")
    free_gib: float | None = setting(
        None, "plan for a device with this much free memory; null = this machine's", above=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileSection(Section):
    """The machine that `run compile` compiles for."""

    key = "compile"
    gpu: str = setting(
        "",
        "a100, b200, h100, h200, l40s or rtx4090: compile for that GPU, which this machine need "
        "not have; empty = for this machine",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSection(Section):
    """The settings of `run quantize`."""

    key = "quantize"
    output: str = setting("", "a new directory for the quantised checkpoint")
    format: str = setting(
        "compressed-tensors",
        "how the integers are stored",
        one_of=("gptq", "awq", "compressed-tensors"),
    )
    bits: int = setting(4, "bits of an integer", one_of=(4, 8))
    head_bits: int = setting(
        0,
        "with format=gptq: bits of the output head's integers; 0 = it stays floats",
        one_of=(0, 4, 8),
    )
    group_size: int = setting(128, "weights that share a scale", one_of=(32, 64, 128))
    symmetric: bool = setting(True, "false = every group has a zero point too")
    calibration: str = setting(
        "",
        "a text file; GPTQ rounds the weights for the activations of this text; empty = round each "
        "weight to the nearest quantised value",
    )
    scaling: bool = setting(
        True, "with a calibration text: scale inputs of matrices, then round the weights (AWQ)"
    )
    evaluation: str = setting("", "a text file whose perplexity is reported; empty = none")
    samples: int = setting(128, "largest number of rows of each text", at_least=1)
    length: int = setting(
        512, "tokens of a row, at most the model's positions", at_least=16, at_most=8192
    )
