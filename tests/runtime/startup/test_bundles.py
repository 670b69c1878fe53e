"""A bundle holds the compiled kernels that its model calls; a start loads them or builds them."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ostinato.conf.schema import DeviceConfig, DeviceName, GraphConfig, ModelSection, Quantization
from ostinato.graphs.bundle import Bundle
from ostinato.ops.native import build as native
from ostinato.ops.native.instruction_sets import detect_isa
from ostinato.runtime.startup.bundles import add_kernels, kernel_libraries, prepare_kernels

DENSE = ModelSection()
INT4 = ModelSection(quantization=Quantization.int4)


# These tests compile kernels, which the compile monitor of another test's engine may count.
pytestmark = pytest.mark.compiles_late


@pytest.fixture(autouse=True)
def _small_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each library is one line of C++, so that the real compiler builds it at once."""
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("core", "quantized"):
        (sources / f"{name}.cpp").write_text(f"int {name}() {{ return 1; }}\n")
        monkeypatch.setitem(native.LIBRARIES, name, ((name,),))
    monkeypatch.setattr(native, "_SOURCE_DIR", sources)
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path / "cache"))
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        monkeypatch.setenv(variable, str(tmp_path / "cache" / variable))


def prepare(model: ModelSection, graphs: GraphConfig) -> list[str]:
    """Prepare the kernels and wait; returns the libraries that were compiled."""
    prepare_kernels(model, DeviceConfig(name=DeviceName.cpu), graphs)
    builders = [each for each in threading.enumerate() if each.name.startswith("build-")]
    for builder in builders:
        builder.join(60)
    return sorted(builder.name.removeprefix("build-") for builder in builders)


def there() -> list[str]:
    isa = detect_isa()
    return [name for name in native.LIBRARIES if native.intact_libraries(name, isa)]


def test_only_a_quantised_model_has_the_quantised_kernels_built() -> None:
    assert kernel_libraries(DENSE) == ("core",)
    assert kernel_libraries(INT4) == ("core", "quantized")
    graphs = GraphConfig(bundle=False)
    assert prepare(DENSE, graphs) == ["core"]
    assert there() == ["core"]
    assert prepare(INT4, graphs) == ["quantized"]
    assert there() == ["core", "quantized"]
    assert prepare(INT4, graphs) == []


def test_kernels_are_taken_from_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "bundles"
    graphs = GraphConfig(bundle_dir=str(root))
    prepare(INT4, graphs)
    for model in (DENSE, INT4):
        bundle = Bundle(root, "model", {"quantization": model.quantization.value})
        add_kernels(bundle, model, detect_isa())
        bundle.save()
        names = [entry.name.split("-")[1] for entry in bundle.entries]
        assert names == list(kernel_libraries(model))
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert there() == []
    assert prepare(INT4, graphs) == [], "nothing is compiled"
    assert there() == ["core", "quantized"]


def test_nothing_is_built_that_is_not_called() -> None:
    assert prepare(INT4, replace(GraphConfig(bundle=False), pack_weights=False)) == []
    assert there() == []
