"""The reader against files that the `gguf` package writes, and against broken and hostile ones."""

from __future__ import annotations

import contextlib
import os
import resource
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.models.gguf.gguf_config import read_gguf_config, read_gguf_generation_config
from ostinato.models.gguf.gguf_file import (
    TENSOR_TYPES,
    GGUFFile,
    open_gguf,
    read_first_keys,
)
from ostinato.models.gguf.gguf_paths import GGUFError, find_gguf
from ostinato.models.gguf.gguf_tensors import read_tensors
from ostinato.models.gguf.gguf_tokenizer import gguf_tokenizer_config, gguf_tokenizer_json

TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "<0x0A>"]


def write(file: Path, *, alignment: int | None = None, split: int = 0) -> Path:
    """A model of one block that the config reader accepts."""
    writer = gguf.GGUFWriter(file, "llama", split_max_tensors=split)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv([1])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_sampling_temp(0.25)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0, 0.0, 0.0, -1.0, -2.0, -3.0, 0.0])
    writer.add_token_types([2, 3, 3, 1, 1, 1, 6])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    generator = np.random.default_rng(0)
    sizes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    sizes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    for name, size in {"token_embd": (7, 32)}.items() | {
        (f"blk.0.{name}", size) for name, size in sizes.items()
    }:
        value = generator.standard_normal(size).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(value, kind), raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf")


def read_all(path: Path) -> None:
    """Read everything that the engine reads of a file."""
    file = open_gguf(path)
    read_gguf_config(file)
    read_gguf_generation_config(file)
    gguf_tokenizer_config(file)
    gguf_tokenizer_json(file)
    for _ in read_tensors(file, torch.float32):
        pass


@pytest.mark.parametrize("alignment", [None, 64])
def test_metadata_and_tensors_are_those_of_the_package(
    tmp_path: Path, alignment: int | None
) -> None:
    path = write(tmp_path / "model.gguf", alignment=alignment)
    theirs, ours = gguf.GGUFReader(path), open_gguf(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert np.array_equal(ours.metadata[key], field.contents()), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert (found.type, found.num_bytes) == (tensor.tensor_type.name, tensor.n_bytes)
        stored = path.read_bytes()[found.offset : found.offset + found.num_bytes]
        assert stored == tensor.data.tobytes()


def test_an_opened_file_is_shared_until_it_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    first = open_gguf(path)
    assert open_gguf(path) is first
    os.utime(path, ns=(0, 0))
    assert open_gguf(path) is not first


def test_the_first_keys_end_before_the_vocabulary(whole: Path) -> None:
    first, every = read_first_keys(whole), open_gguf(whole).metadata
    names = list(every)
    assert list(first) == names[: names.index("tokenizer.ggml.tokens")]
    assert all(np.array_equal(value, every[name]) for name, value in first.items())


def test_types_have_the_sizes_of_the_package() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert theirs == TENSOR_TYPES


def test_a_split_model_is_one_model(tmp_path: Path, whole: Path) -> None:
    write(tmp_path / "model.gguf", split=4)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) > 2
    expected = open_gguf(whole)
    for file in files:
        found = open_gguf(file)
        assert found.path == files[0]
        assert found.files == tuple(files)
        assert found.tensors.keys() == expected.tensors.keys()
        assert found.metadata.keys() >= expected.metadata.keys()
    assert find_gguf(tmp_path) == files[0]
    read_all(files[0])
    files[1].rename(tmp_path / "elsewhere")
    with pytest.raises(GGUFError, match=f"lacks {files[1].name}"):
        open_gguf(files[0])
    files[0].rename(files[1])
    with pytest.raises(GGUFError, match="one of"):
        open_gguf(files[2])


def test_a_file_under_another_number_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", split=4)
    first, second, *_ = sorted(tmp_path.glob("*.gguf"))
    swapped = first.read_bytes(), second.read_bytes()
    first.write_bytes(swapped[1])
    second.write_bytes(swapped[0])
    with pytest.raises(GGUFError, match="its metadata says that it is file 1"):
        open_gguf(first)


@pytest.mark.parametrize("numbers", ["00004-of-00003", "00000-of-00003", "00001-of-00000"])
def test_a_file_with_an_impossible_number_is_refused(tmp_path: Path, numbers: str) -> None:
    with pytest.raises(GGUFError, match="the number in its name must be 1 to"):
        open_gguf(tmp_path / f"model-{numbers}.gguf")


def test_the_only_model_of_a_directory_is_found(tmp_path: Path, whole: Path) -> None:
    assert find_gguf(tmp_path) is None
    one = tmp_path / "one.gguf"
    one.write_bytes(whole.read_bytes())
    (tmp_path / "mmproj-one.gguf").write_bytes(b"")
    assert find_gguf(tmp_path) == one
    (tmp_path / "two.gguf").write_bytes(b"")
    with pytest.raises(GGUFError, match=r"several GGUF models \(one.gguf, two.gguf\)"):
        find_gguf(tmp_path)


def _changed(place: int, form: str, value: int) -> Callable[[bytes], bytes]:
    data = struct.pack(form, value)
    return lambda stored: stored[:place] + data + stored[place + len(data) :]


def _after(text: bytes, form: str, value: int, skip: int = 0) -> Callable[[bytes], bytes]:
    """A function that replaces the number that begins `skip` bytes after `text`."""
    return lambda stored: _changed(stored.index(text) + len(text) + skip, form, value)(stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored: b"", "begins with b''"),
        (lambda stored: b"GG", "begins with b'GG'"),
        (lambda stored: b"PK\3\4" + stored[4:], "is not a GGUF file"),
        (_changed(4, "<I", 1), "of GGUF version 1"),
        (_changed(4, ">I", 3), "big-endian"),
        (_changed(8, "<Q", 1 << 60), "states 1152921504606846976 tensors"),
        (_changed(16, "<Q", 1 << 40), "states 1099511627776 keys"),
        (_changed(24, "<Q", 1 << 50), "a name of 1125899906842624 bytes"),
        (_after(b"general.architecture", "<I", 77), "unknown type 77"),
        (_after(b"tokenizer.ggml.tokens", "<Q", 1 << 55, 8), "strings"),
        (_after(b"tokenizer.ggml.tokens", "<I", 9, 4), "an array of the type 9"),
        (_after(b"tokenizer.ggml.scores", "<Q", 1 << 55, 8), "needs 144115188075855872 bytes"),
        (_after(b"llama.embedding_length", "<I", 33, 4), "embedding_length is 33"),
        (_after(b"llama.block_count", "<I", 1 << 30, 4), "tensors of 1 blocks"),
        (_after(b"llama.attention.head_count", "<I", 3, 4), "gives 30 rows"),
        (_after(b"llama.attention.head_count", "<I", 0, 4), "at least 1"),
        (_after(b"tokenizer.ggml.bos_token_id", "<I", 900, 4), "bos_token_id=900 is not a token"),
        (_after(b"token_embd.weight", "<I", 9), "9 dimensions"),
        (_after(b"token_embd.weight", "<Q", 0, 4), "has the shape"),
        (_after(b"token_embd.weight", "<Q", 1 << 61, 12), "has the shape"),
        (_after(b"token_embd.weight", "<Q", 33, 4), "not a multiple of 32"),
        (_after(b"token_embd.weight", "<Q", 1 << 30, 12), "begin at a multiple of 32"),
        (_after(b"token_embd.weight", "<I", 99, 20), "unknown type 99; known: F32"),
        (_after(b"token_embd.weight", "<I", 4, 20), "unknown type 4"),
        (_after(b"token_embd.weight", "<Q", 1 << 40, 24), "begin at a multiple of 32"),
        (_after(b"token_embd.weight", "<Q", 1, 24), "begin at a multiple of 32"),
        (lambda stored: stored[:-40], "begin at a multiple of 32"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(
    tmp_path: Path, whole: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(change(whole.read_bytes()))
    with pytest.raises(GGUFError, match=message) as refused:
        read_all(file)
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)


@given(data=st.data())
def test_no_file_makes_the_reader_fail(
    tmp_path_factory: pytest.TempPathFactory, whole: Path, data: st.DataObject
) -> None:
    """Cut and changed files are read or refused, with little memory."""
    stored = bytearray(whole.read_bytes())
    header = stored.index(b"blk.0.ffn_norm.weight") + 64
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, header - 8))
        value = data.draw(
            st.sampled_from([0, 1, 255, 1 << 31, (1 << 63) - 1, (1 << 64) - 1])
            | st.integers(0, (1 << 64) - 1)
        )
        size = data.draw(st.sampled_from([1, 4, 8]))
        stored[place : place + size] = value.to_bytes(8, "little")[:size]
    end = data.draw(st.just(len(stored)) | st.integers(0, len(stored)))
    file = tmp_path_factory.getbasetemp() / "mutated.gguf"
    file.write_bytes(bytes(stored[:end]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal = ""
    with contextlib.suppress(GGUFError):
        read_first_keys(file)
    try:
        read_all(file)
    except GGUFError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


VALUES = [
    *("text", -1, 0, 1, 1 << 40, 0.5, float("nan"), True, [], ["text"], [1, 2]),
    *(np.array(values) for values in ([], [0], [1, 2], [0.5], [-1] * len(TOKENS))),
]


def test_wrong_values_are_refused_or_served(whole: Path) -> None:
    """Any key may have a value of any type."""
    file = open_gguf(whole)
    more = {
        f"llama.{key}": 2
        for key in ("attention.key_length", "attention.value_length", "expert_count")
    }
    more |= {"llama.rope.freq_base": 1e4, "llama.rope.dimension_count": 16}
    more |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    for key in {**file.metadata, **more}:
        for value in VALUES:
            changed = GGUFFile(file.path, {**file.metadata, key: value}, file.tensors, file.files)
            with contextlib.suppress(GGUFError):
                read_gguf_config(changed)
            with contextlib.suppress(GGUFError):
                read_gguf_generation_config(changed)
            with contextlib.suppress(GGUFError):
                gguf_tokenizer_config(changed)
            with contextlib.suppress(GGUFError):
                tokenizers.Tokenizer.from_str(gguf_tokenizer_json(changed))


@pytest.mark.parametrize("kind", [None, "linear", "none"])
@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_rotary_scaling_without_a_type_is_linear(whole: Path, key: str, kind: str | None) -> None:
    file = open_gguf(whole)
    stated = {f"llama.{key}": 4.0} | ({"llama.rope.scaling.type": kind} if kind else {})
    changed = GGUFFile(file.path, {**file.metadata, **stated}, file.tensors, file.files)
    expected = None if kind == "none" else {"rope_type": "linear", "factor": 4.0}
    assert read_gguf_config(changed).get("rope_scaling") == expected


def test_tensors_of_rope_factors_allow_no_linear_scaling(whole: Path) -> None:
    """Files of Llama 3.1 have these tensors and no type of scaling."""
    file = open_gguf(whole)
    factors = replace(file.tensors["output_norm.weight"], name="rope_freqs.weight")
    tensors = {**file.tensors, factors.name: factors}
    scaling = read_gguf_config(GGUFFile(file.path, file.metadata, tensors, file.files))
    assert scaling["rope_scaling"]["long_factor"] == [1.0] * 32
    stated = {**file.metadata, "llama.rope.scaling.factor": 4.0}
    with pytest.raises(GGUFError, match=r"is 'linear' with the factor 4\.0, and the file has ten"):
        read_gguf_config(GGUFFile(file.path, stated, tensors, file.files))
