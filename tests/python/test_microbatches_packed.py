"""Packed batches in parts, cut between documents; packed and unpacked training are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import brim
from brim.adapt._packed import is_packed, part_of
from brim.data import PackedBatch, PackedCollator

EVERYTHING = {
    name: name
    for name in (
        *("tokens", "labels", "shifted_labels", "loss_mask", "position_ids", "document_ids"),
        *("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "mask", "block_mask"),
    )
}


def samples(lengths: list[int]) -> list[dict[str, Any]]:
    random = np.random.default_rng(5)
    return [{"input_ids": random.integers(1, 50, n), "weight": random.random(n)} for n in lengths]


def plain(batch: Any) -> Any:
    return {
        key: value.to_dense().tolist() if hasattr(value, "kv_indices")
        else torch.as_tensor(value).tolist()
        for key, value in batch.items()
    }  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"document_multiple": 4, "row_multiple": 8}])
def test_a_part_is_what_the_collator_makes_of_its_documents(options: dict[str, int]) -> None:
    collate = PackedCollator(EVERYTHING, columns={"weight": 0.5}, pad_id=3, **options)
    given = samples([5, 1, 9, 3, 6])
    batch = collate(given)
    for start in range(5):
        for stop in range(start + 1, 6):
            if (start, stop) != (0, 5):
                part = part_of(batch, start, stop)
                assert plain(part) == plain(collate(given[start:stop]))
                assert part.layout == collate(given[start:stop]).layout
    again = part_of(part_of(batch, 1, 5), 1, 3)  # parts of parts
    assert plain(again) == plain(collate(given[2:4]))


@pytest.mark.parametrize("family", ["transformers", "flash_attn", "megatron"])
def test_a_dictionary_is_cut_by_its_offsets(family: str) -> None:
    collate = PackedCollator(family, document_multiple=4)
    given = [sample["input_ids"] for sample in samples([5, 1, 9, 3])]
    batch = dict(collate(given))
    assert is_packed(batch)
    assert plain(part_of(batch, 1, 3)) == plain(collate(given[1:3]))


def test_a_flattened_batch_of_transformers_is_cut() -> None:
    transformers = pytest.importorskip("transformers")
    flatten = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    given = [{"input_ids": sample["input_ids"].tolist()} for sample in samples([5, 1, 9, 3])]
    batch = flatten(given)
    assert plain(batch) == plain(PackedCollator()(given))
    assert plain(part_of(batch, 1, 3)) == plain(PackedCollator()(given[1:3]))


def test_what_cannot_be_cut_is_an_error() -> None:
    batch = dict(PackedCollator("flash_attn")([[1, 2], [3]]))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"cu_seqlens_k": torch.tensor([0, 1, 3])}, "bounds of the same documents"),
        ({"cu_seqlens_q": torch.tensor([1, 3])}, "must be ascending from 0"),
        ({"input_ids": torch.zeros(1, 4)}, "input_ids has 4 places, but the documents take 3"),
        ({"more": torch.zeros(2)}, "more has shape .* a value for each of its 3 places"),
        ({"more": torch.zeros(3, 3)}, "more has shape"),
        ({"more": object()}, "more is a object, which cannot be cut"),
    ]
    for changed, message in cases:
        with pytest.raises(ValueError, match=message):
            part_of({**batch, **changed}, 0, 1)


class Model(torch.nn.Module):
    """A causal model whose attention goes by document ids or by bounds."""

    def __init__(self, leaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(50, 8)
        self.position = torch.nn.Embedding(64, 8)
        self.project = torch.nn.Linear(8, 24)
        self.out = torch.nn.Linear(8, 50)
        self.leaks = leaks
        self.double()

    def forward(self, tokens: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(positions)
        q, k, v = self.project(x).chunk(3, -1)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        ids = torch.searchsorted(offsets.long(), places, right=True)
        mask = (ids[:, None] == ids[None]) | self.leaks
        return self.out(functional.scaled_dot_product_attention(q, k, v, mask.tril()[None]))


def loss_of(model: Model) -> Any:
    def loss(part: PackedBatch) -> Tensor:
        logits = model(part["input_ids"], part["position_ids"], part["cu_seq_lens_q"])
        return functional.cross_entropy(logits[0, :-1], part["labels"][0, 1:])

    return loss


@pytest.mark.parametrize("plain_dict", [False, True])
@pytest.mark.parametrize("lengths", [[5, 1, 9, 3, 6, 2, 2], [1, 1, 7, 1], [4, 30]])
def test_parts_leave_the_gradients_of_the_whole_row(lengths: list[int], plain_dict: bool) -> None:
    batch: Any = PackedCollator(row_multiple=8)([s["input_ids"] for s in samples(lengths)])
    if plain_dict:
        batch = dict(batch)
    model = Model()
    expected = loss_of(model)(batch)
    expected.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    for size in range(1, len(lengths) + 1):
        for parameter in model.parameters():
            parameter.grad = None
        step = brim.Microbatches(loss_of(model), model, size=size)
        torch.testing.assert_close(step(batch), expected.detach(), rtol=1e-12, atol=0)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-14)


def test_a_row_that_runs_out_of_memory_is_cut() -> None:
    batch = PackedCollator(row_multiple=8)([s["input_ids"] for s in samples([5, 1, 9, 3, 6, 2])])
    model = Model()
    expected = loss_of(model)(batch)
    expected.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    step = brim.Microbatches(loss_of(model), model)
    with brim.testing.inject_oom(at=5):
        torch.testing.assert_close(step(batch), expected.detach(), rtol=1e-12, atol=0)
    assert step.size < 6
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-14)


def test_a_model_that_looks_into_other_documents_is_refused() -> None:
    batch = PackedCollator()([s["input_ids"] for s in samples([5, 4, 9, 3])])
    model = Model(leaks=True)
    with pytest.raises(ValueError, match="loss"):
        brim.Microbatches(loss_of(model), model, size=2)(batch)


@pytest.fixture(scope="module")
def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
    )
    model = transformers.LlamaForCausalLM(config)
    for layer in list(model.modules()):  # its own norms compute in single precision
        for name, inner in layer.named_children():
            if type(inner).__name__ == "LlamaRMSNorm":
                setattr(layer, name, torch.nn.RMSNorm(32, eps=1e-6))
    return model.double()


def token_loss(model: Any, batch: Any, reduction: str = "sum") -> Tensor:
    """The loss of transformers, in double precision: its own is in single."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**inputs, use_cache=False).logits
    return functional.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], reduction=reduction)


LENGTHS = [12, 1, 31, 7, 20]


def test_packed_and_unpacked_training_of_a_hugging_face_model_are_the_same(llama: Any) -> None:
    given = samples(LENGTHS)
    ids = [torch.from_numpy(sample["input_ids"]) for sample in given]
    llama.set_attn_implementation("sdpa")
    expected = torch.zeros((), dtype=torch.float64)
    llama.zero_grad()
    for one in ids:
        alone = {"input_ids": one[None], "labels": one[None]}
        loss = token_loss(llama, alone)
        loss.backward()
        expected += loss.detach()
    gradients = {name: p.grad.clone() for name, p in llama.named_parameters()}
    targets = sum(LENGTHS) - len(LENGTHS)

    rows: dict[str, Any] = {
        # transformers finds the documents by their positions here.
        "positions": PackedCollator()(ids),
        "padded": PackedCollator(document_multiple=4, row_multiple=16)(ids),
        "sdpa": PackedCollator("sdpa")(ids),
        "sdpa, padded": PackedCollator("sdpa", row_length=128)(ids),
    }
    for name, batch in rows.items():
        assert (batch["labels"] != -100).sum() == targets
        llama.zero_grad()
        loss = token_loss(llama, batch)
        loss.backward()
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-12, atol=0, msg=name)
        for key, parameter in llama.named_parameters():
            torch.testing.assert_close(
                parameter.grad, gradients[key], rtol=1e-8, atol=1e-12, msg=f"{name}: {key}"
            )

    # The same in parts, as a mean over tokens.
    for name in ("positions", "sdpa"):
        llama.zero_grad()
        step = brim.Microbatches(lambda part: token_loss(llama, part, "mean"), llama, size=2)
        torch.testing.assert_close(step(rows[name]), expected / targets, rtol=1e-12, atol=0)
        for key, parameter in llama.named_parameters():
            mean = gradients[key] / targets
            torch.testing.assert_close(parameter.grad, mean, rtol=1e-8, atol=1e-13)


def check_flex(llama: Any, device: str, backward: bool) -> None:
    ids = [torch.from_numpy(sample["input_ids"]) for sample in samples(LENGTHS)]
    found = {}
    for family in ("sdpa", "flex"):
        llama.set_attn_implementation({"sdpa": "sdpa", "flex": "flex_attention"}[family])
        batch = PackedCollator(family, block_size=16)(ids).to(device)
        llama.zero_grad()
        with torch.set_grad_enabled(backward):
            loss = token_loss(llama, batch)
        if backward:
            loss.backward()
        found[family] = [loss.detach()] + [p.grad for p in llama.parameters() if backward]
        if family == "flex":
            llama.zero_grad()
            with torch.set_grad_enabled(backward):
                parts = [part_of(batch, 0, 2), part_of(batch, 2, 5)]
                total = sum(token_loss(llama, part) for part in parts)
            torch.testing.assert_close(total.detach(), loss.detach(), rtol=1e-10, atol=0)
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-12)


@pytest.fixture
def flex_llama(llama: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model with FlexAttention as it is: compiled, it knows no double precision."""
    from torch.nn.attention.flex_attention import flex_attention

    def eager(q: Tensor, k: Tensor, v: Tensor, training: bool = False, **options: Any) -> Any:
        return flex_attention(q, k, v, **options)

    place = "transformers.integrations.flex_attention.compile_friendly_flex_attention"
    monkeypatch.setattr(place, eager)
    return llama


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called")
def test_flex_attention_gives_the_same_losses(flex_llama: Any) -> None:
    check_flex(flex_llama, "cpu", backward=False)  # FlexAttention has no backward on the CPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:flex_attention called",
    "ignore:The .grad attribute of a Tensor:UserWarning",  # torch's compiler looks at it
)
def test_flex_attention_gives_the_same_gradients(flex_llama: Any) -> None:
    try:
        check_flex(flex_llama.cuda(), "cuda", backward=True)
    finally:
        flex_llama.cpu()
