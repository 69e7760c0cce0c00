"""Contrastive losses of other packages through Microbatches: the same loss, the same gradients."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import brim

from .microbatches_cases import gradients

transformers = pytest.importorskip("transformers")


def close(found: Any, expected: Any, relative: float = 0) -> bool:
    def near(a: Any, b: Any) -> bool:
        return (a - b).abs().max() <= 1e-12 + relative * b.abs().max()

    return all(
        (a is None and b is None) or (a is not None and b is not None and near(a, b))
        for a, b in zip(found, expected, strict=True)
    )


class Sentences(nn.Module):
    """A small BERT with mean pooling, which adds to its features as sentence-transformers' do."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        self.bert = transformers.BertModel(config, add_pooling_layer=False)

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        mask = features["attention_mask"]
        tokens = self.bert(input_ids=features["input_ids"], attention_mask=mask).last_hidden_state
        mean = (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        features["sentence_embedding"] = mean
        return features


def features_of(count: int, length: int) -> dict[str, torch.Tensor]:
    lengths = torch.randint(2, length + 1, (count, 1))
    lengths[0] = length
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": torch.randint(50, (count, length)) * mask, "attention_mask": mask}


def columns_of(columns: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    return [dict(each) for each in columns]  # the model adds to them


@pytest.mark.slow  # to import
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_sentence_transformers(dropout: float) -> None:
    pytest.importorskip("sentence_transformers")
    losses: Any
    try:
        losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    except ImportError:  # before version 6
        losses = importlib.import_module("sentence_transformers.losses")
    torch.manual_seed(0)
    model = nn.Sequential(Sentences(dropout)).double().train()
    columns = [features_of(11, 5), features_of(11, 7), features_of(11, 7)]  # hard negatives, too
    plain = losses.MultipleNegativesRankingLoss(model)
    cached = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3)
    step = brim.Microbatches(
        encode=lambda part: [model(dict(each))["sentence_embedding"] for each in part],
        loss=lambda embeddings: plain.compute_loss_from_embeddings(embeddings, None),
        model=model,
        size=3,
    )
    found = step(columns)
    if dropout == 0:
        here = gradients(model)
        # Its cached losses computed in float32 before version 6.2, also those of double.
        doubles = Version(importlib.metadata.version("sentence-transformers")) >= Version("6.2")
        for other, relative in ((plain, 0), (cached, 0 if doubles else 2e-7)):
            model.zero_grad()
            loss = other(columns_of(columns), None)
            loss.backward()
            assert found.allclose(loss.detach(), 0, 1e-13)
            assert close(here, gradients(model), relative)
    else:  # the gradient of the loss, not of another draw: as a difference of losses shows
        torch.manual_seed(1)
        model.zero_grad()
        first = step(columns)
        here = gradients(model)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), here, strict=True):
                if gradient is not None:
                    parameter -= 1e-7 * gradient
        torch.manual_seed(1)
        second = step(columns)
        square = sum(float(g.square().sum()) for g in here if g is not None)
        assert float(first - second) == pytest.approx(1e-7 * square, rel=1e-3)


def test_clip() -> None:
    torch.manual_seed(0)
    small = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = transformers.CLIPModel(
        transformers.CLIPConfig(
            vision_config={**small, "image_size": 16, "patch_size": 8},
            text_config={**small, "vocab_size": 60, "eos_token_id": 59, "bos_token_id": 58},
            projection_dim=8,
        )
    ).double()
    tokens = torch.randint(1, 58, (9, 6))
    tokens[:, -1] = 59
    pixels = torch.rand(9, 3, 16, 16).double()

    def features(output: Any) -> torch.Tensor:
        return output if isinstance(output, torch.Tensor) else output.pooler_output

    def loss(rows: dict[str, torch.Tensor]) -> torch.Tensor:
        a, b = normalize(rows["image"]), normalize(rows["text"])
        scores, labels = model.logit_scale.exp() * b @ a.T, torch.arange(len(a))
        return (cross_entropy(scores, labels) + cross_entropy(scores.T, labels)) / 2

    whole = model(input_ids=tokens, pixel_values=pixels, return_loss=True).loss
    whole.backward()
    expected = gradients(model)
    model.zero_grad()
    step = brim.Microbatches(
        encode={
            "image": lambda part: features(model.get_image_features(pixel_values=part)),
            "text": lambda part: features(model.get_text_features(**part)),
        },
        loss=loss,
        model=model,
        size=4,
    )
    found = step({"image": pixels, "text": {"input_ids": tokens}})
    assert found.allclose(whole.detach(), 0, 1e-12)
    assert close(gradients(model), expected)
