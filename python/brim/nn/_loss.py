"""Losses of `brim.nn.functional`."""

from __future__ import annotations

from typing import Any

import torch.nn.functional
from torch import Tensor

from brim.nn._elsewhere import ops

__all__ = ["cross_entropy", "linear_cross_entropy"]

_reduction: Any = torch.nn.functional._Reduction  # type: ignore[attr-defined]


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    recompute: bool = False,
) -> Tensor:
    """As `torch.nn.functional.cross_entropy`; keeps the logits and not their log-softmax.

    With `recompute` it keeps no logits either where a linear layer of brim with `recompute` made
    them: that layer runs again in backward.

    Raises:
        ValueError: if reduction is unknown.

    Example:
        >>> import torch
        >>> logits = torch.zeros(3, 5, requires_grad=True)
        >>> cross_entropy(logits, torch.tensor([0, 4, -100])).grad_fn.name()
        'brim::cross_entropy_backward'
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    return _cross_entropy(
        input, target, weight, ignore_index, reduction, label_smoothing, False, recompute
    )


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    in_float32: bool,
    recompute: bool,
) -> Tensor:
    """The same; `in_float32` as for `input.float()`, of which no copy is made."""
    how = _reduction.get_enum(reduction)
    return ops().cross_entropy(
        input, target, weight, how, ignore_index, label_smoothing, in_float32, recompute
    )


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    scale: float = 1.0,
    softcap: float | None = None,
    in_float32: bool = False,
    chunk: int | None = None,
) -> Tensor:
    """As `torch.nn.functional.linear_cross_entropy` (torch 2.13), with parts that fit free memory.

    The cross entropy of `linear(input, linear_weight, linear_bias)`, whose logits are worked out in
    parts, again in backward. Nothing of their size or of the weight's is kept in between.

    Args:
        input: [rows, features].
        linear_weight: [classes, features].
        target: a class number for each row. Probabilities, and other shapes that torch takes, are
            not worked out in parts.
        linear_bias: [classes].
        weight: a number per class, as for `cross_entropy`.
        reduction: "none", "mean" or "sum".
        ignore_index: a target that does not count; -100 if None.
        label_smoothing: as for `cross_entropy`.
        options: `torch.nn.LinearCrossEntropyOptions`: torch's own function does it.
        scale: what the logits are multiplied with (`logit_scale`).
        softcap: logits become `softcap * tanh(logits / softcap)` (`final_logit_softcapping`).
        in_float32: the loss of the logits as float32.
        chunk: rows whose logits may exist at once. None: as many as a quarter of the memory that is
            free holds, within budgets.

    Raises:
        ValueError: if reduction is unknown, or chunk or softcap is not positive.
        TypeError: if `options` is given before torch 2.13, or together with an option of brim.

    Example:
        >>> import torch
        >>> rows, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4)
        >>> loss = linear_cross_entropy(rows, weight, torch.tensor([0, 8, 3, 3, -100, 1]), chunk=2)
        >>> loss.backward()
        >>> rows.grad.shape
        torch.Size([6, 4])
    """
    if chunk is not None and chunk <= 0:
        raise ValueError(f"chunk must be a positive number of rows, got {chunk}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}")
    own = (scale, softcap, in_float32, chunk)
    torchs = getattr(torch.nn.functional, "linear_cross_entropy", None)
    is_usual = (input.dim(), linear_weight.dim(), target.dim()) == (2, 2, 1)
    if options is not None or (torchs is not None and not is_usual and own == _NO_OPTIONS):
        if torchs is None or own != _NO_OPTIONS:
            raise TypeError(
                "options are those of torch's function (torch 2.13 or later), which takes no "
                f"scale, softcap, in_float32 or chunk, got {options!r}"
            )
        loss: Tensor = torchs(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            options=options,
        )
        return loss
    return ops().linear_cross_entropy(
        input,
        linear_weight,
        linear_bias,
        target,
        weight,
        _reduction.get_enum(reduction),
        -100 if ignore_index is None else ignore_index,
        label_smoothing,
        scale,
        softcap or 0.0,
        in_float32,
        False,
        chunk or 0,
    )


_NO_OPTIONS = (1.0, None, False, None)
