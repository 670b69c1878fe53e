"""docs/models.md lists the refused values of keys.

The listed values are refused. Each key of which another value is refused as unsupported is listed,
or is in `MUST_BE`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from docs.list_models import REFUSED
from ostinato.models.checkpoints.checkpoint import Checkpoint
from ostinato.models.config_json.decoder_fields import MUST_BE
from ostinato.models.registry import ARCHITECTURES, model_class, read_model_config
from tests.models.audio.sound_models import ARCHITECTURES as SOUND_ARCHITECTURES
from tests.models.config_json.test_every_key import config_of, mutations, refusal
from tests.models.random_checkpoints import VARIANTS
from tests.models.vision.image_variants import VARIANTS as IMAGE_VARIANTS
from tests.models.vision.image_variants import hf_class_of


@cache
def config_named(name: str) -> dict[str, Any]:
    """The config.json of a variant; callers do not change it."""
    return config_of(VARIANTS[name])


def read(config: dict[str, Any]) -> object:
    return model_class(config["architectures"][0]).read_config(config)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_listed_is_refused_by_its_key(name: str) -> None:
    config = config_named(name)
    for key, value, _, beside in REFUSED.get(config["architectures"][0], ()):
        outer, _, inner = key.rpartition(".")
        changed = {**config[outer], inner: value} if outer else value
        message = refusal({**config, outer or key: changed, **dict([beside] if beside else [])})
        assert f"{inner}={value} is not supported" in message


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_refused_is_listed(name: str) -> None:
    config = config_named(name)
    entries = REFUSED.get(config["architectures"][0], ())
    listed = {one.key for one in entries} | {one.beside[0] for one in entries if one.beside}
    refused = {
        key for key, changed in mutations(config) if "is not supported, only" in refusal(changed)
    }
    assert refused - listed - MUST_BE.keys() == set()


def test_every_refused_value_belongs_to_a_family_that_is_tested() -> None:
    tested = {config["architectures"][0] for config in map(config_named, VARIANTS)}
    families = {ARCHITECTURES[name] for name in tested}  # some have several names
    tested |= {name for name, family in ARCHITECTURES.items() if family in families}
    # tests/models/vision/test_tower_keys.py and tests/models/audio/test_sound_keys.py test these.
    tested |= {hf_class_of(variant).__name__ for variant in IMAGE_VARIANTS.values()}
    tested |= set(SOUND_ARCHITECTURES)
    assert REFUSED.keys() <= tested


def test_code_of_a_checkpoint_is_never_run() -> None:
    config = {
        "architectures": ["SpiralForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_spiral.SpiralForCausalLM"},
    }
    checkpoint = Checkpoint(path=None, hf_config=config, generation_config={})
    with pytest.raises(ValueError) as error:
        read_model_config(checkpoint)
    assert "architecture 'SpiralForCausalLM' is not supported" in str(error.value)
    assert "modeling_spiral.SpiralForCausalLM" in str(error.value)
    assert "is never run" in str(error.value)
    # A known architecture is served by our implementation, even if its folder has remote code.
    known = {
        **config_named("falcon-7b"),
        "auto_map": {"AutoModelForCausalLM": "modeling_falcon.Falcon"},
    }
    assert read(known) == read(config_named("falcon-7b"))
