"""Missing files and broken configurations: each error names what is wrong."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.models.adapters.adapter_config import read_adapter_config
from ostinato.models.adapters.adapter_files import AdapterError, adapter_digest
from ostinato.models.adapters.peft_adapter import read_adapter
from ostinato.models.base import CausalLM
from tests.models.adapters.breaking import (
    Break,
    as_directory,
    as_pipe,
    check_refused,
    config,
    config_text,
    without,
)
from tests.models.adapters.peft_files import MAX_RANK

BROKEN: dict[str, tuple[Break, str]] = {
    # files
    "no directory": (shutil.rmtree, "copy is not a directory; name the directory of an adapter"),
    "no configuration": (
        without("adapter_config.json"),
        "copy has no file adapter_config.json; nam",
    ),
    "configuration is a directory": (
        as_directory("adapter_config.json"),
        "copy has no file adapter_config.json; name the directory that PEFT's save_pretrained wrote",
    ),
    "configuration is a pipe": (as_pipe("adapter_config.json"), "has no file adapter_config.json"),
    "no weights": (
        without("adapter_model.safetensors"),
        "copy has neither adapter_model.safetensors nor adapter_model.bin; copy the adapter's weigh",
    ),
    "weights are a pipe": (
        as_pipe("adapter_model.safetensors"),
        "has neither adapter_model.safete",
    ),
    "weights are a directory": (
        as_directory("adapter_model.safetensors"),
        "has neither adapter_mod",
    ),
    # configuration
    "not JSON": (config_text("{"), "adapter_config.json is not readable as JSON: Expecting"),
    "not UTF-8": (
        lambda directory: (directory / "adapter_config.json").write_bytes(b"\xff\xfe{"),
        "adapter_config.json is not readable as JSON",
    ),
    "too deep": (config_text("[" * 100_000), "adapter_config.json is not readable as JSON: "),
    "a long number": (config_text('{"r": ' + "9" * 5000 + "}"), "is not readable as JSON: Exceeds"),
    "too long": (
        config_text(" " * (2**24 + 1)),
        "must have at most 16777216 bytes, got 16777217; c",
    ),
    "a list": (
        config_text("[1]"),
        "adapter_config.json must hold a JSON object, got [1]; copy the",
    ),
    "no type": (
        config(peft_type=None),
        "peft_type must be 'LORA', got None; train a plain LoRA ada",
    ),
    "rank 0": (
        config(r=0),
        "adapter_config.json: r must be a positive integer, got 0; correct the",
    ),
    "rank is a boolean": (
        config(r=True),
        "r must be a positive integer, got True; correct the file",
    ),
    "rank is a fraction": (
        config(r=4.0),
        "r must be a positive integer, got 4.0; correct the file",
    ),
    "rank is null": (config(r=None), "r must be a positive integer, got None; correct the file"),
    "alpha is text": (
        config(lora_alpha="8"),
        "lora_alpha must be a finite number, got '8'; correct",
    ),
    "alpha is not a number": (
        config(lora_alpha=float("nan")),
        "lora_alpha must be a finite number",
    ),
    "alpha is infinite": (config(lora_alpha=1e39), "lora_alpha must be a finite number, got 1e+39"),
    "alpha is a large integer": (
        config(lora_alpha=10**400),
        "lora_alpha must be a finite number, go",
    ),
    "rsLoRA is text": (
        config(use_rslora="yes"),
        "use_rslora must be true or false, got 'yes'; corr",
    ),
    "targets are a number": (
        config(target_modules=3),
        "target_modules must be a list of names or a",
    ),
    "a target is a number": (
        config(target_modules=["a", 3]),
        "target_modules must be a list of nam",
    ),
    "broken expression": (
        config(target_modules="(q_proj"),
        "target_modules must be a regular expression (missing ), unterminated subpattern at positio",
    ),
    "broken excluded": (
        config(exclude_modules="*"),
        "exclude_modules must be a regular expression",
    ),
    "ranks are a list": (
        config(rank_pattern=[1]),
        "rank_pattern must be an object: regular express",
    ),
    "a rank of a pattern": (
        config(rank_pattern={"q_proj": -1}),
        "rank_pattern['q_proj'] must be a positive integer, got -1; correct the file",
    ),
    "an alpha of a pattern": (
        config(alpha_pattern={"q_proj": None}),
        "alpha_pattern['q_proj'] must be a finite number, got None; correct the file",
    ),
    "broken pattern": (
        config(alpha_pattern={"[": 1}),
        "alpha_pattern must be a regular expression",
    ),
    "layers are text": (
        config(layers_to_transform=["1"]),
        "layers_to_transform must be an integer or a list of integers, got ['1']; correct the file",
    ),
    "broken layers_pattern": (
        config(layers_to_transform=[0], layers_pattern=["("]),
        "layers_pattern must be a regular expression (",
    ),
    "layers_pattern is a number": (
        config(layers_to_transform=[0], layers_pattern=[1]),
        "layers_pattern must be a string or a list of strings, got [1]; correct the file",
    ),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_files_and_configurations(
    adapter: Path, model: CausalLM, change: Break, message: str
) -> None:
    change(adapter)
    check_refused(adapter, model, message)


@pytest.mark.parametrize("path", ["a\0b", "a\nb", "\ud800", "x" * 5000])
def test_paths_that_name_no_directory(path: str, model: CausalLM) -> None:
    for read in (adapter_digest, lambda directory: read_adapter(directory, model, MAX_RANK)):
        with pytest.raises(AdapterError, match=r"is not a directory|cannot be read") as refused:
            read(Path(path))
        assert str(refused.value).isprintable()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_files_without_permission(adapter: Path, model: CausalLM) -> None:
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (adapter / name).chmod(0)
        for read in (adapter_digest, lambda directory: read_adapter(directory, model, MAX_RANK)):
            with pytest.raises(AdapterError, match=f"{name} cannot be read: .*Permission denied"):
                read(adapter)


JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["(", "q_proj", ""])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["(", "q", "*"]), inner)
    ),
    max_leaves=4,
)
KEYS = ["r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"]
KEYS += ["use_rslora", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights", "x"]


@settings(max_examples=100, deadline=None)
@given(stated=st.dictionaries(st.sampled_from(KEYS), JSON))
def test_any_value_of_a_key_is_read_or_refused(stated: dict[str, object]) -> None:
    content = json.dumps({"peft_type": "LORA", **stated}).encode()
    name = "model.layers.0.self_attn.q_proj"
    with contextlib.suppress(AdapterError):
        config = read_adapter_config(content, Path("adapter_config.json"))
        assert isinstance(config.has_target(name), bool)
        assert config.rank_of(name) > 0
        if config.rank_of(name) <= MAX_RANK:
            assert math.isfinite(config.scale_of(name))
