"""Reads a checkpoint's config with transformers, and builds its model without weights.

transformers takes seconds to import, so it is imported only for models that need it.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ostinato.conf.errors import first_line
from ostinato.models.config.hf_fields import architecture_of
from ostinato.models.config.hf_source import HFModelSource

__all__ = ("ATTENTION", "find_source", "hf_model", "source_files")

ATTENTION = "ostinato"
"""The name under which transformers calls the tracing attention function."""

# Keys that a config.json may have although the code below does not find them in the model's code:
# they do not change the results, or other code reads them.
_IRRELEVANT = frozenset(
    (
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_from_model_config",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "eos_token_id",
        "model_type",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "quantization_config",  # models/choose_weights.py reads it
        "rope_scaling",  # older names, which transformers reads for every model
        "rope_theta",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    )
)


def find_source(hf_config: Mapping[str, Any]) -> HFModelSource:
    """Find the code of a model in transformers. Code in a checkpoint is never run.

    Args:
        hf_config: the parsed config.json.

    Raises:
        ValueError: there is no such code, it is for another kind of model, or the config has a key
            that the code does not read.
    """
    stated = dict(hf_config)
    text = json.dumps(stated, sort_keys=True)
    config = _config_of(stated)
    model_class = _class_of(stated, config)
    files = source_files(model_class)
    _refuse_unknown_keys(stated, config, files)
    digest = hashlib.sha256(version("transformers").encode())
    for file in files:
        digest.update(file.read_bytes())
    return HFModelSource(text, digest.hexdigest()[:20])


@lru_cache(maxsize=2)
def hf_model(source: HFModelSource, dtype: torch.dtype) -> Any:
    """The transformers model: parameters on the meta device, buffers with their values.

    Args:
        source: from `find_source`.
        dtype: the dtype of the parameters.

    Raises:
        ValueError: the model cannot be built from its config.
    """
    config = _config_of(source.hf_config)
    model_class = _class_of(source.hf_config, config)
    try:
        with torch.device("meta"):
            model = model_class._from_config(config, attn_implementation=ATTENTION, dtype=dtype)
    # a model's code can raise any exception for a config that it refuses
    except Exception as error:
        raise ValueError(
            f"transformers cannot build {model_class.__name__}: {first_line(error)}"
        ) from error
    model.eval()
    _widen(model, dtype)
    _compute_buffers(model)
    return model


def _config_of(stated: Mapping[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = str(stated.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"transformers {version('transformers')} has no model_type={model_type!r}")
    # A copy, because transformers writes into nested objects.
    settings = copy.deepcopy({key: stated[key] for key in stated if key != "model_type"})
    try:
        return CONFIG_MAPPING[model_type].from_dict(settings)
    except Exception as error:  # the classes check their values with several libraries
        raise ValueError(f"transformers refuses config.json: {first_line(error)}") from error


def _class_of(stated: Mapping[str, Any], config: Any) -> Any:
    """The model's class, which must be the one under `architectures`.

    Raises:
        ValueError: transformers has no such class, it is not a causal language model, or it has no
            interface for attention.
    """
    import transformers

    name = architecture_of(stated)
    found = getattr(transformers, name, None)
    if found is None:
        raise ValueError(f"transformers {version('transformers')} has no class {name}")
    if config.is_encoder_decoder:
        raise ValueError("it is an encoder-decoder")
    if not name.endswith(("ForCausalLM", "LMHeadModel")):
        raise ValueError("it is not a causal language model")
    if not found.is_backend_compatible():
        raise ValueError(
            "its class computes attention itself and has no interface for another implementation"
        )
    return found


def source_files(model_class: Any) -> list[Path]:
    """The files with a model's code: its own, and those of its base classes."""
    names = {base.__module__ for base in model_class.__mro__}
    modules = [sys.modules[name] for name in sorted(names) if name.startswith("transformers.")]
    return sorted({Path(inspect.getsourcefile(module) or "") for module in modules})


def _refuse_unknown_keys(stated: Mapping[str, Any], config: Any, files: list[Path]) -> None:
    """Refuse keys that occur neither in the config's class nor in the model's code.

    No code reads such a key.

    Args:
        stated: the parsed config.json.
        config: the config that transformers made of it.
        files: the files of the model's code.
    """
    from transformers import PreTrainedConfig

    known = PreTrainedConfig().to_dict().keys() | type(config).attribute_map.keys() | _IRRELEVANT
    classes = [Path(inspect.getfile(base)) for base in type(config).__mro__[:-1]]
    text = "\n".join(file.read_text(encoding="utf-8") for file in {*files, *classes})
    words = set(re.findall(r"\w+", text))
    unknown = sorted(
        key
        for key, value in stated.items()
        if value is not None and key not in known and key not in words
    )
    if unknown:
        raise ValueError(
            f"{type(config).__name__} of transformers {version('transformers')} does not read "
            f"{', '.join(unknown)} in config.json; if the results do not depend on it, set "
            f"model.config.{unknown[0]}=null"
        )


def _widen(model: Any, dtype: torch.dtype) -> None:
    """Convert to float32 what transformers loads in float32, such as the biases of routers."""
    from transformers.core_model_loading import build_glob_alternation

    wide = build_glob_alternation(list(model._get_dtype_plan(dtype)))[0]
    if not wide.pattern:
        return
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if wide.search(f"{name}.{key}"):
                setattr(module, key, nn.Parameter(parameter.float(), requires_grad=False))
        for key, buffer in module.named_buffers(recurse=False):
            if wide.search(f"{name}.{key}") and buffer.is_floating_point():
                setattr(module, key, buffer.float())


@torch.no_grad()
def _compute_buffers(model: Any) -> None:
    """Compute the buffers that no checkpoint holds, such as rotary frequencies.

    Raises:
        ValueError: the model's code does not say how they are computed.
    """
    for name, module in list(model.named_modules()):
        buffers = {
            key: buffer
            for key, buffer in module._buffers.items()
            if buffer is not None and key in module._non_persistent_buffers_set
        }
        if not buffers:
            continue
        for key, buffer in buffers.items():
            fill = float("nan") if buffer.is_floating_point() else 0
            module._buffers[key] = torch.full_like(buffer, fill, device="cpu")
        model._init_weights(module)
        for key in buffers:
            value = module._buffers[key]
            if value.is_meta or (value.is_floating_point() and value.isnan().any()):
                raise ValueError(f"the buffer {name}.{key} has no value before it is loaded")
