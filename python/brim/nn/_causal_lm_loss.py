"""The loss of Hugging Face's language models, which keeps the logits and no float32 log-softmax.

`*ForCausalLM` models of transformers call `self.loss_function(logits=..., labels=..., ...)`. The
functions there cast all logits to float32, and torch keeps the log-softmax of the copy.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional
from torch import Tensor

from brim.nn._loss import _cross_entropy

__all__ = ["is_rerouted", "recomputes", "reroute", "restore"]

_Loss: TypeAlias = Callable[..., Tensor]


def reroute(module: torch.nn.Module, recompute: Any) -> bool:
    """Give a language model of transformers brim's loss function, in place.

    Args:
        module: any module.
        recompute: keep no logits either: the linear layer that made them runs again in backward.

    Returns:
        Whether it has brim's loss function now. Not if it is no such model, or the user gave it a
        loss function, or the one of this version of transformers computes something else.
    """
    before = module.__dict__.get("_loss_function")
    original = _of_transformers(module)
    if original is None or (before is not None and not _is_ours(before)):
        return False
    own = _instead(original)
    if own is None:
        return False
    module.__dict__["_loss_function"] = functools.partial(own, recompute=recompute)
    return True


def restore(module: torch.nn.Module) -> None:
    """Give a model its own loss function back."""
    if is_rerouted(module):
        del module.__dict__["_loss_function"]


def is_rerouted(module: torch.nn.Module) -> bool:
    """Whether `reroute` gave a module its loss function."""
    return _is_ours(module.__dict__.get("_loss_function"))


def recomputes(module: torch.nn.Module) -> bool:
    """Whether it did, with `recompute`."""
    loss: Any = module.__dict__.get("_loss_function")
    return _is_ours(loss) and bool(loss.keywords["recompute"])


def _is_ours(function: object) -> bool:
    return isinstance(function, functools.partial) and function.func in _OURS.values()


def _of_transformers(module: torch.nn.Module) -> _Loss | None:
    """The loss function that transformers gives a model with an output layer."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(module, modeling.PreTrainedModel):
        return None
    losses: Any = getattr(modeling, "LOSS_MAPPING", {})
    if module.get_output_embeddings() is None:
        return None
    found: _Loss | None = losses.get(getattr(module, "loss_type", None) or "ForCausalLM")
    return found


# -- brim's functions, with the arguments of those of transformers ---------------------------------


def _causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    recompute: Any = False,
    **_: object,
) -> Tensor:
    """The loss of each position's logits against the label one further, or `shift_labels`."""
    if shift_labels is None:
        labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)
        shift_labels = labels[..., 1:].contiguous()
    rows = logits.reshape(-1, vocab_size)
    classes = shift_labels.reshape(-1).to(rows.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = _cross_entropy(rows, classes, None, ignore_index, reduction, 0.0, True, recompute)
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def _masked_lm_loss(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The loss of each position's logits against its label."""
    return _causal_lm_loss(logits, labels, *args, **{**kwargs, "shift_labels": labels})


_OURS: dict[str, _Loss] = {"ForCausalLMLoss": _causal_lm_loss, "ForMaskedLMLoss": _masked_lm_loss}


@functools.cache
def _instead(original: _Loss) -> _Loss | None:
    """Brim's function for one of transformers, if both compute the same for a small example."""
    own = _OURS.get(getattr(original, "__name__", ""))
    if own is None or not original.__module__.startswith("transformers."):
        return None
    labels = torch.tensor([[1, -100, 0, 4], [3, 3, 2, -100]])
    values = torch.linspace(-3, 3, 40).sin().mul(4).to(torch.bfloat16).view(2, 4, 5)
    for items in (None, 3):
        found = []
        for function in (original, own):
            logits = values.clone().requires_grad_()
            with torch.enable_grad():
                loss = function(
                    logits=logits, labels=labels, vocab_size=5, num_items_in_batch=items
                )
            found.append((loss, *torch.autograd.grad(loss, logits)))
        if not all(map(torch.equal, *found)):
            return None
    return own
