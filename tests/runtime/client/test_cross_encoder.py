"""Scores of a model that reads both texts together."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from ostinato import LLM
from ostinato.conf.compose import load_config
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.engine_info import ServedTask
from tests.models.minilm import minilm_directory
from tests.runtime.client.test_pooling import SMALL


@pytest.mark.parametrize(
    ("stated", "is_raw"),
    [
        ({}, False),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            True,
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            True,
        ),
    ],
)
def test_a_cross_encoder_scores_pairs_as_sentence_transformers_does(tmp_path, stated, is_raw):
    """The tokenizer is that of the real model. The model is a small BERT with random weights.

    The checkpoint may state that a score is the head's logit.
    """
    torch.manual_seed(2)
    settings_ = transformers.BertConfig(
        vocab_size=30522, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, num_labels=1, initializer_range=0.4,
    )  # fmt: skip
    reference = transformers.BertForSequenceClassification(settings_).eval()
    reference.save_pretrained(tmp_path)
    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | stated))
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (tmp_path / name).write_bytes((minilm_directory() / name).read_bytes())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with LLM(config=load_config(list(SMALL), values={"model.path": str(tmp_path)})) as llm:
        assert llm.model.tasks == (ServedTask.classify,)
        queries, texts = ["a cat"] * 2 + ["the sea"], ["a kitten sleeps", "stocks fell", "waves"]
        got = llm.score(queries, texts)
        with pytest.raises(InvalidRequestError, match="does not give embeddings"):
            llm.embed("text")
    inputs = tokenizer(queries, texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        logits = reference(**inputs).logits[:, 0]
        expected = logits if is_raw else logits.sigmoid()
    torch.testing.assert_close(torch.tensor(got), expected, atol=2e-5, rtol=1e-4)
