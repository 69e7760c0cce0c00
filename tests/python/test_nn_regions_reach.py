"""Larger functions of torch in a region, which reaches into them: the same bits, no more kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  as everyone calls it
from torch import Tensor, nn

import brim

WIDTH = 16


def first(result: Any) -> Tensor:
    output = result[0] if isinstance(result, tuple) else result
    assert isinstance(output, Tensor)
    return output


def of_module(make: Callable[[], nn.Module], *more: str) -> Callable[[], Any]:
    """Calls a module with the input, again for each of `more`."""

    def build() -> Any:
        module = make()
        return lambda x: module(*[x] * (1 + len(more))), [*module.parameters()]

    return build


def of_function(call: Callable[[Tensor], Any]) -> Callable[[], Any]:
    return lambda: (call, [])


CASES: dict[str, tuple[tuple[int, ...], Callable[[], Any]]] = {
    "LSTM": ((5, 3, WIDTH), of_module(lambda: nn.LSTM(WIDTH, 8, 2, dropout=0.3))),
    "LSTM both ways": ((5, 3, WIDTH), of_module(lambda: nn.LSTM(WIDTH, 8, bidirectional=True))),
    "LSTM with projection": ((5, 3, WIDTH), of_module(lambda: nn.LSTM(WIDTH, 8, proj_size=4))),
    "GRU": ((5, 3, WIDTH), of_module(lambda: nn.GRU(WIDTH, 8, 2, dropout=0.3))),
    "RNN": ((5, 3, WIDTH), of_module(lambda: nn.RNN(WIDTH, 8, nonlinearity="relu"))),
    "LSTMCell": ((3, WIDTH), of_module(lambda: nn.LSTMCell(WIDTH, 8))),
    "GRUCell": ((3, WIDTH), of_module(lambda: nn.GRUCell(WIDTH, 8))),
    "Bilinear": ((3, WIDTH), of_module(lambda: nn.Bilinear(WIDTH, WIDTH, 4), "again")),
    "MultiheadAttention": (
        (5, 3, WIDTH),
        of_module(lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.3), "key", "value"),
    ),
    "TransformerEncoderLayer": (
        (5, 3, WIDTH),
        of_module(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.3, "gelu")),
    ),
    "TransformerDecoderLayer": (
        (5, 3, WIDTH),
        of_module(lambda: nn.TransformerDecoderLayer(WIDTH, 2, 32, 0.3), "memory"),
    ),
    "InstanceNorm2d": ((2, 4, 5, 5), of_module(lambda: nn.InstanceNorm2d(4, affine=True))),
    "InstanceNorm with statistics": (
        (2, 4, 5, 5),
        of_module(lambda: nn.InstanceNorm2d(4, track_running_stats=True)),
    ),
    "LocalResponseNorm": ((2, 4, 5, 5), of_module(lambda: nn.LocalResponseNorm(2))),
    "CosineSimilarity": ((3, WIDTH), of_module(nn.CosineSimilarity, "again")),
    "SyncBatchNorm's kind": ((4, 4, 3, 3), of_module(lambda: nn.BatchNorm2d(4))),
    "attention with dropout": (
        (2, 2, 24, 8),
        of_function(lambda x: F.scaled_dot_product_attention(x.exp(), x.sin(), x, dropout_p=0.3)),
    ),
    "attention of short rows": (
        (2, 2, 4, 8),
        of_function(lambda x: F.scaled_dot_product_attention(x.exp(), x.sin(), x, dropout_p=0.3)),
    ),
    "rrelu": ((3, WIDTH), of_function(lambda x: F.rrelu(x, training=True))),
    "celu": ((3, WIDTH), of_function(F.celu)),
    "selu": ((3, WIDTH), of_function(F.selu)),
    "glu": ((3, WIDTH), of_function(F.glu)),
    "logsigmoid": ((3, WIDTH), of_function(F.logsigmoid)),
    "hardshrink": ((3, WIDTH), of_function(F.hardshrink)),
    "feature dropout": ((3, 4, 5, 5), of_function(lambda x: F.dropout2d(x, 0.3))),
    "alpha dropout": ((3, WIDTH), of_function(lambda x: F.alpha_dropout(x, 0.3, True))),
    "lp_pool": ((2, 4, 6, 6), of_function(lambda x: F.lp_pool2d(x, 2.0, 2))),
    "normalize": ((3, WIDTH), of_function(F.normalize)),
    "gumbel_softmax": ((3, WIDTH), of_function(F.gumbel_softmax)),
    "interpolate": ((2, 4, 5, 5), of_function(lambda x: F.interpolate(x, scale_factor=2.0))),
    "bce": ((3, 4), of_function(lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(3, 4)))),
    "gaussian nll": (
        (3, 4),
        of_function(lambda x: F.gaussian_nll_loss(x, torch.ones(3, 4), torch.ones(3, 4))),
    ),
    "einsum": ((3, WIDTH), of_function(lambda x: torch.einsum("ij,kj->ik", x, x))),
    "fold": ((1, 8, 4), of_function(lambda x: F.fold(x, (4, 4), 2, stride=2))),
    "unfolded product": ((1, 2, 6, 6), of_function(lambda x: F.unfold(x, 3) * F.unfold(x, 3))),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("recompute", [None, "cheap", "products"])
@pytest.mark.parametrize("name", CASES)
def test_same_bits_and_no_more_is_kept(name: str, recompute: str | None) -> None:
    sizes, build = CASES[name]
    results, kept = [], []
    for inside in (False, True):
        torch.manual_seed(0)
        call, parameters = build()
        leaf = torch.randn(sizes, requires_grad=True)
        x = leaf * 1.0
        with brim.PeakMeter("cpu") as meter:
            if inside:
                with brim.saving(recompute=recompute):
                    result = first(call(x))
            else:
                result = first(call(x))
            kept.append(meter.left)
        grads = torch.autograd.grad(result.square().sum(), [leaf, *parameters], allow_unused=True)
        results.append([result, *grads])
    for torchs, ours in zip(*results, strict=True):
        assert (torchs is None) == (ours is None)
        assert torchs is None or torch.equal(torchs, ours)
    slack = 64 * 40  # the allocator's rounding of small tensors, of which some are kept instead
    assert kept[1] <= kept[0] + slack
