"""A bundle holds the compiled kernels that its model calls; a start loads them or builds them."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.schema import (
    DeviceConfig,
    DeviceName,
    DType,
    GraphConfig,
    HeadQuantization,
    ModelImplementation,
    ModelSection,
    Quantization,
)
from ostinato.conf.sections.cache_schema import CacheConfig, CacheDType
from ostinato.conf.sections.lora_schema import LoraConfig
from ostinato.conf.sections.server_schema import ParallelConfig
from ostinato.conf.sections.speculation_schema import SpeculationConfig, SpeculationMethod
from ostinato.graphs.bundle import Bundle
from ostinato.ops.native import build as native
from ostinato.ops.native.instruction_sets import detect_isa
from ostinato.runtime.startup.bundles import (
    add_kernels,
    core_part,
    kernel_libraries,
    prepare_kernels,
)

IS_COMPRESSED = detect_isa() in ("amx", "avx2")
BFLOAT16 = "core-bfloat16-compressed" if IS_COMPRESSED else "core-bfloat16"
DENSE = ModelSection()
DRAFT = SpeculationConfig(method=SpeculationMethod.draft, model="a-hub/draft")
INT4 = ModelSection(quantization=Quantization.int4)


# These tests compile kernels, which the compile monitor of another test's engine may count.
pytestmark = pytest.mark.compiles_late


@pytest.fixture(autouse=True)
def _small_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each library is one line of C++, so that the real compiler builds it at once."""
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in native.LIBRARIES:
        (sources / f"{name}.cpp").write_text(f"int {name}() {{ return 1; }}\n")
        monkeypatch.setitem(native.LIBRARIES, name, ((name,),))
    for name, part in native.PARTS.items():
        monkeypatch.setitem(native.PARTS, name, part._replace(units=((part.library,),)))
    monkeypatch.setattr(native, "_SOURCE_DIR", sources)
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path / "cache"))
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        monkeypatch.setenv(variable, str(tmp_path / "cache" / variable))


def prepare(model: ModelSection, graphs: GraphConfig) -> list[str]:
    """Prepare the kernels and wait; returns the libraries that were compiled."""
    device = DeviceConfig(name=DeviceName.cpu)
    prepare_kernels(EngineConfig(model=model, device=device, graphs=graphs))
    builders = [each for each in threading.enumerate() if each.name.startswith("build-")]
    for builder in builders:
        builder.join(60)
    return sorted(builder.name.removeprefix("build-") for builder in builders)


def there() -> list[str]:
    isa = detect_isa()
    names = (*native.LIBRARIES, *native.PARTS)
    return [name for name in names if native.intact_libraries(name, isa)]


@pytest.mark.parametrize(
    "settings",
    [{"mamba_n_heads": 8}, {"conv_L_cache": 3}, {"text_config": {"linear_num_value_heads": 4}}],
)
def test_a_model_with_recurrent_layers_has_their_kernels_built(settings: dict[str, Any]) -> None:
    model = ModelSection(config=settings)
    assert kernel_libraries(EngineConfig(model=model)) == ("core", "recurrent")


def test_only_a_quantised_model_has_the_quantised_kernels_built() -> None:
    assert kernel_libraries(EngineConfig(model=DENSE)) == ("core",)
    assert kernel_libraries(EngineConfig(model=INT4)) == ("core", "quantized")
    for head, libraries in (
        (HeadQuantization.int8, ("core", "quantized")),
        (HeadQuantization.none, ("core",)),
    ):
        assert (
            kernel_libraries(EngineConfig(model=ModelSection(quantization_head=head))) == libraries
        )
    experts = replace(INT4, config={"num_experts": 8})
    assert kernel_libraries(EngineConfig(model=experts)) == ("core", "quantized", "quantized_moe")
    adapted = EngineConfig(model=DENSE, lora=LoraConfig(max_adapters=1))
    assert kernel_libraries(adapted) == ("core", "adapters")
    graphs = GraphConfig(bundle=False)
    assert prepare(DENSE, graphs) == [BFLOAT16]
    assert there() == [BFLOAT16]
    assert prepare(INT4, graphs) == ["quantized"]
    assert there() == ["quantized", BFLOAT16]
    assert prepare(INT4, graphs) == []


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (EngineConfig(), BFLOAT16),
        (EngineConfig(model=INT4), BFLOAT16),
        (EngineConfig(graphs=GraphConfig(compress_weights=True)), "core-bfloat16-compressed"),
        (EngineConfig(graphs=GraphConfig(compress_weights=False)), "core-bfloat16"),
        (EngineConfig(model=ModelSection(dtype=DType.float32)), "core-float32"),
        (EngineConfig(model=ModelSection(dtype=DType.float16)), None),
        (EngineConfig(model=ModelSection(config={"dtype": "float32"})), "core-float32"),
        (EngineConfig(model=ModelSection(config={"num_experts": 8})), None),
        (EngineConfig(model=ModelSection(config={"architectures": ["BertModel"]})), None),
        *(
            (EngineConfig(model=ModelSection(config={"architectures": value})), None)
            for value in (5, {"0": "LlamaForCausalLM"}, [5], ["LlamaForCausalLM", None], [], None)
        ),
        (EngineConfig(model=ModelSection(path="a-hub/model", dtype=DType.float32)), None),
        (EngineConfig(cache=CacheConfig(dtype=CacheDType.int8)), None),
        (EngineConfig(parallel=ParallelConfig(tensor=2)), None),
        (EngineConfig(speculation=DRAFT), None),
        (
            EngineConfig(model=ModelSection(implementation=ModelImplementation.transformers)),
            None,
        ),
    ],
)
def test_a_decoder_that_runs_alone_needs_a_part_of_the_kernels(
    config: EngineConfig, part: str | None
) -> None:
    assert core_part(config) == part


@pytest.mark.parametrize(
    ("keys", "libraries", "dtype"),
    [
        ({}, ("core", "quantized"), "bfloat16"),
        ({"general.file_type": 2}, ("core", "quantized"), "bfloat16"),
        ({"llama.expert_count": 0}, ("core", "quantized"), "bfloat16"),
        ({"general.file_type": 1}, ("core",), "float32"),
        ({"general.file_type": 32}, ("core",), "bfloat16"),
        ({"general.file_type": 0}, ("core",), "float32"),
        (
            {"general.file_type": 2, "llama.expert_count": 8},
            ("core", "quantized", "quantized_moe"),
            None,
        ),
    ],
)
def test_the_first_keys_of_a_gguf_file_name_its_kernels(
    tmp_path: Path, keys: dict[str, int], libraries: tuple[str, ...], dtype: str | None
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in keys.items():
        writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    config = EngineConfig(
        model=ModelSection(path=str(tmp_path / "model.gguf")),
        graphs=GraphConfig(compress_weights=False),
    )
    assert kernel_libraries(config) == libraries
    assert core_part(config) == (None if dtype is None else f"core-{dtype}")


def test_a_part_is_not_compiled_where_the_whole_library_is() -> None:
    native.build("core", detect_isa())
    assert prepare(DENSE, GraphConfig(bundle=False)) == []


def test_kernels_are_taken_from_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "bundles"
    graphs = GraphConfig(bundle_dir=str(root))
    prepare(INT4, graphs)
    for model in (DENSE, INT4):
        bundle = Bundle(root, "model", {"quantization": model.quantization.value})
        config = EngineConfig(model=model)
        add_kernels(bundle, config, detect_isa())
        bundle.save()
        names = [entry.name.split("-")[1] for entry in bundle.entries]
        assert names == list(kernel_libraries(config))
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert there() == []
    assert prepare(INT4, graphs) == [], "a kernel that the bundle has is compiled again"
    assert there() == ["quantized", BFLOAT16]


def test_nothing_is_built_that_is_not_called() -> None:
    assert prepare(INT4, replace(GraphConfig(bundle=False), pack_weights=False)) == []
    assert there() == []
