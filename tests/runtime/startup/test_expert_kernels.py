"""`graphs.experts=flashinfer`: what the plan refuses, and an engine with the op in plain torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato import LLM, SamplingParams
from ostinato.conf.root import RunConfig
from ostinato.conf.schema import ExpertKernels
from ostinato.ops.native import library
from ostinato.runtime.errors import StartupError
from ostinato.runtime.startup import loading
from ostinato.runtime.startup.loading import open_bundle
from ostinato.runtime.startup.plan import engine_plan
from ostinato.runtime.startup.plan.engine_plan import make_plan
from tests.runtime.tiny import MODEL, tiny_config

MOE = {
    **MODEL,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
CHOSEN = ("graphs.experts=flashinfer", "graphs.pack_weights=false")


def config(*words: str, model: dict[str, object] = MOE) -> RunConfig:
    return tiny_config(*words, model__config=model)


@pytest.mark.compiles_late
def test_the_plan_shows_kernels_that_the_configuration_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a quantised model of a hub, whose config.json is read after its download."""
    loaded: set[str] = set()
    load_whole = library.load

    def load(name: str) -> object:
        loaded.add(name)
        return load_whole(name)

    monkeypatch.setattr(loading, "kernel_libraries", lambda config: ("core",))
    monkeypatch.setattr(library, "load", load)
    LLM(config=config("model.quantization=int8", "device.name=cpu"))
    assert loaded == {"core", "quantized", "quantized_moe"}
    loaded.clear()
    LLM(config=config("model.quantization=int8", "device.name=cpu", model=MODEL))
    assert "quantized_moe" not in loaded


def refusal(run: RunConfig) -> str:
    with pytest.raises(StartupError) as error:
        make_plan(run.engine, 1)
    return str(error.value)


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the device is left out, so that the op runs on a CPU, in plain torch."""
    monkeypatch.setattr(engine_plan, "why_unsupported", lambda device, dtype, is_here: None)


def test_a_device_or_model_without_such_kernels_is_refused() -> None:
    assert refusal(config(*CHOSEN)) == (
        "graphs.experts=flashinfer needs a CUDA device, but the model is on cpu; leave it at auto"
    )
    assert refusal(config(*CHOSEN, model=MODEL)) == (
        "graphs.experts=flashinfer needs a mixture of experts, which LlamaForCausalLM is not; "
        "leave it at auto"
    )
    assert make_plan(config().engine, 1).experts is ExpertKernels.auto


@pytest.mark.compiles_late  # the plan traces a model; another test's engine may still be alive
@pytest.mark.usefixtures("any_device")
def test_weights_and_sizes_without_such_kernels_are_refused() -> None:
    start, end = "graphs.experts=flashinfer needs ", " (layers.0.mlp.experts); leave it at auto"
    assert refusal(config("graphs.experts=flashinfer", "model.quantization=int8")) == (
        f"{start}unquantized weights, but the model's are int8 in groups of 128{end}"
    )
    odd = {**MOE, "moe_intermediate_size": 36}
    assert refusal(config(*CHOSEN, model=odd)) == (
        f"{start}multiples of 8, and the intermediate size on this rank is 36{end}"
    )
    through = config(*CHOSEN, "model.implementation=transformers")
    assert refusal(through) == (
        "graphs.experts=flashinfer needs a native model, and Qwen3MoeForCausalLM runs through "
        "transformers; leave it at auto"
    )


@pytest.mark.usefixtures("any_device")
def test_a_draft_model_without_experts_needs_no_such_kernels(tmp_path: Path) -> None:
    for architecture, chosen in ((MODEL, "auto"), (MOE, "flashinfer")):
        (tmp_path / "config.json").write_text(json.dumps(architecture))
        drafts = ("speculation.method=draft", f"speculation.model={tmp_path}")
        plan = make_plan(config(*CHOSEN, *drafts).engine, 1)
        assert plan.experts is ExpertKernels.flashinfer
        assert plan.draft is not None
        assert plan.draft.experts == chosen


@pytest.mark.usefixtures("any_device")
def test_an_engine_with_the_op_gives_the_same_answers() -> None:
    prompts = [[5, 6, 7, 8, 9], [40, 41], list(range(2, 30))]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    found = []
    for words in (CHOSEN, CHOSEN[1:]):
        with LLM(config=config(*words)) as llm:
            outputs = llm.generate(prompts, params, use_progress=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            found.append([llm.model.system_fingerprint])
    assert found[0] == found[2]
    assert found[1] != found[3]


@pytest.mark.usefixtures("any_device")
def test_the_choice_has_a_bundle_of_its_own(tmp_path: Path) -> None:
    words = ("graphs.mode=captured", "graphs.bundle=true", f"graphs.bundle_dir={tmp_path}")
    bundles = [
        open_bundle(make_plan(config(*words, *more).engine, 1)) for more in (CHOSEN, CHOSEN[1:])
    ]
    first, second = bundles
    assert first is not None
    assert second is not None
    assert first.directory != second.directory
