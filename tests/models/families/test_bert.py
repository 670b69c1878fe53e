"""BERT against transformers: random weights, eager and compiled, and a real checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from ostinato.conf.schema import GraphForm, ModelSection
from ostinato.graphs.compiler.compile import compile_model
from ostinato.graphs.compiler.programs import LayerProgram
from ostinato.models.base import EncoderModel
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.checkpoints.weights import load_weights
from ostinato.models.choose_weights import choose_weights
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.model_kind import ENCODER
from ostinato.models.kv_cache import KVCache
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.step_tensors import ForwardBatch
from tests.models.minilm import minilm_directory

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
    "initializer_range": 0.15,
    "pad_token_id": None,
}
TEXTS = [
    "The scheduler packs sequences.",
    "A cat sat on the mat and looked at the moon for a long time, until the morning came.",
    "no",
]


def load(directory: Path, *, packed: bool = False) -> tuple[EncoderModel, ModelConfig]:
    section = ModelSection(path=str(directory))
    checkpoint = open_checkpoint(section)
    config = read_model_config(checkpoint)
    weights = choose_weights(section, checkpoint, pack=packed, device=CPU, dtype=torch.float32)
    model = build_model(
        config, dtype=torch.float32, device=CPU, attention_backend="", weights=weights
    )
    load_weights(model, checkpoint)
    assert isinstance(model, EncoderModel)
    return model, config


def pack(sequences: list[list[int]], num_padding: int = 0) -> ForwardBatch:
    """One packed batch, with rows past the last sequence as padding."""
    lengths = [len(ids) for ids in sequences]
    flat = [token for ids in sequences for token in ids] + [0] * num_padding
    positions = [place for length in lengths for place in range(length)] + [0] * num_padding
    starts = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    return ForwardBatch(
        token_ids=torch.tensor(flat),
        positions=torch.tensor(positions),
        slot_mapping=torch.zeros(len(flat), dtype=torch.int64),
        logits_indices=torch.arange(len(flat)),
        sampled_rows=torch.arange(len(flat)),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.zeros(len(lengths), 1, dtype=torch.int32),
        plan=torch.zeros(1, dtype=torch.int64),
    )


def no_cache(config: ModelConfig) -> KVCache:
    return config.kv_cache_spec(16, torch.float32).allocate(2, CPU)


def reference_states(model: transformers.PreTrainedModel, ids: list[int], second: int) -> Tensor:
    types = torch.tensor([[0] * (len(ids) - second) + [1] * second])
    with torch.no_grad():
        return model(torch.tensor([ids]), token_type_ids=types).last_hidden_state[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[transformers.PreTrainedModel, Path]:
    torch.manual_seed(0)
    reference = transformers.BertModel(transformers.BertConfig(**TINY)).eval()
    directory = tmp_path_factory.mktemp("bert")
    reference.save_pretrained(directory)
    return reference, directory


SEQUENCES = [[(7 * i * i + 13 * i + n) % 199 for i in range(n)] for n in (5, 31, 1, 12)]


@pytest.mark.parametrize(
    ("packed", "form"),
    [
        (False, None),
        pytest.param(False, GraphForm.layer, marks=pytest.mark.slow),
        pytest.param(False, GraphForm.model, marks=pytest.mark.slow),  # as in test_parity.py
        (True, None),
        (True, GraphForm.layer),
        pytest.param(True, GraphForm.model, marks=pytest.mark.slow),
    ],
)
def test_hidden_states_of_a_packed_batch(tiny, packed, form):
    reference, directory = tiny
    model, config = load(directory, packed=packed)
    cache = no_cache(config)
    program = model
    if form is not None:
        program = compile_model(model, form, pack([[1, 2], [3, 4]]), cache)(model)
    with torch.inference_mode():
        hidden = program(pack(SEQUENCES, num_padding=3), cache)
    begin = 0
    for ids in SEQUENCES:
        expected = reference_states(reference, ids, 0)
        torch.testing.assert_close(hidden[begin : begin + len(ids)], expected, atol=2e-5, rtol=1e-4)
        begin += len(ids)


def test_bits_of_a_sequence_do_not_depend_on_its_batch(tiny):
    model, config = load(tiny[1], packed=True)
    cache = no_cache(config)
    with torch.inference_mode():
        together = model(pack(SEQUENCES), cache)
        alone = torch.cat([model(pack([ids]), cache) for ids in SEQUENCES])
    assert torch.equal(together, alone)


@torch.inference_mode()
def test_layers_run_on_our_kernels_alone_and_are_captured(tiny):
    """The program has no OpenMP loop.

    A replay in C++ gives the same bits as calls from Python, and as the eager model.
    """
    model, config = load(tiny[1], packed=True)
    cache = no_cache(config)
    program = compile_model(model, GraphForm.layer, pack([[1, 2], [3, 4]]), cache)(model)
    assert not program.has_loops
    batch = pack(SEQUENCES, num_padding=3)
    called = program(batch, cache)
    assert torch.equal(called, model(batch, cache))
    with program.recording():
        program(batch, cache)
    assert program.layers_by_program == {LayerProgram.captured: config.num_layers}
    for _ in range(3):
        assert torch.equal(program(batch, cache), called)


def test_the_second_text_of_a_pair_is_a_segment_of_its_own(tiny):
    reference, directory = tiny
    model, config = load(directory)
    ids, second = SEQUENCES[1], 14
    given = ids[:-second] + [token + config.vocab_size for token in ids[-second:]]
    with torch.inference_mode():
        hidden = model(pack([given]), no_cache(config))
    torch.testing.assert_close(
        hidden, reference_states(reference, ids, second), atol=2e-5, rtol=1e-4
    )


def test_classification(tmp_path):
    torch.manual_seed(1)
    settings = transformers.BertConfig(**{**TINY, "num_labels": 3})
    reference = transformers.BertForSequenceClassification(settings).eval()
    reference.save_pretrained(tmp_path)
    model, config = load(tmp_path)
    assert (config.num_labels, config.kind) == (3, ENCODER)
    with torch.inference_mode():
        first = model(pack([SEQUENCES[3]]), no_cache(config))[:1]
        logits = model.classify(first)
        expected = reference(torch.tensor([SEQUENCES[3]])).logits
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


def test_an_encoder_keeps_no_keys_and_values(tiny):
    _, config = load(tiny[1])
    spec = config.kv_cache_spec(16, torch.float32)
    assert spec.bytes_per_block == 0
    assert [side.numel() for layer in spec.allocate(9, CPU) for side in layer] == [0] * 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type=relative_key"),
        ({"is_decoder": True}, "is_decoder=True is not supported"),
        ({"hidden_size": 66}, "not a multiple of num_attention_heads=4"),
    ],
)
def test_what_is_not_served_is_named(tiny, settings, message):
    section = ModelSection(path=str(tiny[1]), config=settings)
    with pytest.raises(ValueError, match=message):
        read_model_config(open_checkpoint(section))


def test_a_real_model():
    directory = minilm_directory()
    reference = transformers.AutoModel.from_pretrained(directory).eval()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    sequences = [tokenizer.encode(text).ids for text in TEXTS]
    model, config = load(directory)
    with torch.inference_mode():
        hidden = model(pack(sequences), no_cache(config))
    begin = 0
    for ids in sequences:
        expected = reference_states(reference, ids, 0)
        torch.testing.assert_close(hidden[begin : begin + len(ids)], expected, atol=5e-5, rtol=1e-3)
        begin += len(ids)
