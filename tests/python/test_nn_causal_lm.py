"""The loss of transformers' language models after `brim.convert`."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import brim
from brim.nn import _causal_lm_loss

transformers: Any = pytest.importorskip("transformers")

VOCABULARY = 1000
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
}


def model_of(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, kind + "Config")(**(SIZES | options))
    return getattr(transformers, kind + "ForCausalLM")(config).to(torch.bfloat16)


def tokens() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (2, 40))
    labels = ids.clone()
    labels[:, :3] = -100
    return ids, labels


def converted(model: Any, recompute: str | None) -> Any:
    model = copy.deepcopy(model)
    brim.convert(model, recompute=recompute)
    assert _causal_lm_loss.reroute(model, recompute is not None)
    return model


def step(model: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor], int]:
    """The loss, all gradients, and what was kept of the forward pass."""
    ids, labels = tokens()
    left = 0
    for _ in range(2):  # in the first, buffers are made that stay
        model.zero_grad()
        with brim.PeakMeter("cpu") as meter:
            value = model(input_ids=ids, labels=labels, use_cache=False, **options).loss
            left = meter.left
        value.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return value.detach(), grads, left


def check_same(own: tuple[Tensor, dict[str, Tensor], int], other: Any) -> None:
    assert torch.equal(own[0], other[0])
    assert own[1].keys() == other[1].keys()
    assert all(torch.equal(own[1][name], other[1][name]) for name in own[1])


LOGITS = 2 * 40 * VOCABULARY * 2  # bytes of bfloat16


@pytest.mark.parametrize(
    ("kind", "items"), [("Llama", None), ("Llama", 7), ("Gemma2", torch.tensor(11)), ("Phi3", None)]
)
def test_the_same_loss_and_gradients_with_less_kept(kind: str, items: Any) -> None:
    model = model_of(kind, **({"pad_token_id": 0} if kind == "Phi3" else {}))
    options = {} if items is None else {"num_items_in_batch": items}
    expected = step(model, **options)
    by_default = step(converted(model, None), **options)
    check_same(by_default, expected)
    assert expected[2] - by_default[2] > 0.9 * LOGITS
    cheap = step(converted(model, "cheap"), **options)
    check_same(cheap, expected)
    if kind != "Gemma2":  # torch's tanh keeps what it made of the logits
        assert expected[2] - cheap[2] > 1.9 * LOGITS


def test_the_loss_of_masked_language_models_gives_the_same() -> None:
    from transformers.loss.loss_utils import ForMaskedLMLoss

    assert _causal_lm_loss._instead(ForMaskedLMLoss) is not None  # it compares both


def test_the_output_still_has_the_logits() -> None:
    model = model_of("Llama")
    ids, labels = tokens()
    own = converted(model, "cheap")
    output = own(input_ids=ids, labels=labels)
    assert torch.equal(output.logits, model(input_ids=ids).logits)
    output.loss.backward()
    assert torch.equal(output.logits, model(input_ids=ids).logits)
    assert torch.equal(own.generate(ids, max_new_tokens=3), model.generate(ids, max_new_tokens=3))


def test_tied_weights_and_gradient_checkpointing() -> None:
    model = model_of("Llama", tie_word_embeddings=True)
    expected = step(model)
    own = converted(model, "cheap")
    check_same(step(own), expected)
    own.gradient_checkpointing_enable({"use_reentrant": False})
    own.train()
    check_same(step(own), expected)


def test_under_autocast() -> None:
    model = model_of("Llama").float()
    own = copy.deepcopy(model)
    brim.convert(own.lm_head, recompute="cheap")  # normalisation rounds in another order
    assert _causal_lm_loss.reroute(own, True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model)
        found = step(own)
    check_same(found, expected)
    assert expected[2] - found[2] > 1.9 * LOGITS


def test_lora() -> None:
    peft: Any = pytest.importorskip("peft")
    model = model_of("Llama")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.model.lm_head.weight.requires_grad_(False)
    expected = step(model)
    own = copy.deepcopy(model)
    brim.convert(own, recompute="cheap")
    assert [m for m in own.modules() if _causal_lm_loss.reroute(m, True)] == [own.base_model.model]
    found = step(own)
    check_same(found, expected)
    assert expected[2] - found[2] > 1.9 * LOGITS


@pytest.mark.slow
def test_compiled() -> None:
    model = model_of("Llama").float()
    own = torch.compile(converted(model, "cheap"), backend="aot_eager")
    found, expected = step(own), step(model)
    torch.testing.assert_close(found[0], expected[0])
    for name, grad in expected[1].items():
        torch.testing.assert_close(found[1][f"_orig_mod.{name}"], grad, msg=name)


def test_it_can_be_copied_stored_and_undone() -> None:
    model = converted(model_of("Llama"), "cheap")
    other = pickle.loads(pickle.dumps(model))
    assert isinstance(other.loss_function, functools.partial)
    assert _causal_lm_loss.reroute(other, False)  # the other way
    assert other.loss_function.keywords == {"recompute": False}
    _causal_lm_loss.restore(other)
    assert other.loss_function is transformers.loss.loss_utils.ForCausalLMLoss


def own_loss(**_: Any) -> Tensor:
    return torch.zeros(())


def test_what_is_left_alone() -> None:
    model = model_of("Llama")
    assert not _causal_lm_loss.reroute(torch.nn.Linear(2, 2), False)
    assert not _causal_lm_loss.reroute(model.model, False)  # has no output layer
    model.loss_function = own_loss
    assert not _causal_lm_loss.reroute(model, False)
    _causal_lm_loss.restore(model)
    assert model.loss_function is own_loss


def test_a_changed_library_keeps_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = transformers.modeling_utils.LOSS_MAPPING

    def changed(**arguments: Any) -> Tensor:
        return 2 * before(**arguments)

    before = losses["ForCausalLM"]
    changed.__name__, changed.__module__ = before.__name__, before.__module__
    monkeypatch.setitem(losses, "ForCausalLM", changed)
    assert not _causal_lm_loss.reroute(model_of("Llama"), False)
