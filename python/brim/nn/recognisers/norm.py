"""Normalisation layers derived from torch.nn's that add something of their own.

timm's and torchvision's: the layer over the channels of images, or followed by an activation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from brim.nn import modules
from brim.nn._derived import Forward, Kind, Options
from brim.nn.recognisers._recogniser import Recogniser, agree, names_in, numbers, small_copy, words

__all__ = ["norm"]

_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.LayerNorm: modules.LayerNorm,
    nn.GroupNorm: modules.GroupNorm,
    nn.BatchNorm2d: modules.BatchNorm2d,
}
_WORDS = words(
    """
    F nn functional torch super forward permute contiguous layer_norm group_norm batch_norm
    normalized_shape num_groups weight bias eps running_mean running_var num_batches_tracked
    momentum training track_running_stats add_ float _assert ndim drop act
    _fast_norm fast_layer_norm fast_group_norm
    """
)


def _candidates(module: nn.Module) -> Iterator[Options]:
    """The layer of torch.nn, whether the channels are moved, whether drop and act follow."""
    base = next((base for base in _LAYERS if isinstance(module, base)), None)
    names = names_in(type(module), "forward")
    follows = {"drop", "act"} <= names
    if base is not nn.BatchNorm2d and "float" in names:  # a change of type, not of a counter
        return
    if base is None or not names <= _WORDS or {*module._modules} != ({"drop", "act"} & names):
        return
    yield base, "permute" in names, follows


def _forward(kind: Kind, options: Options) -> Forward:
    base, moves, follows = options
    work, run = kind.forward, _LAYERS[base].forward
    # timm's other way, in low precision, which can be switched on.
    has_fast_way = "_fast_norm" in names_in(kind, "forward")

    def forward(self: Any, x: Tensor) -> Any:
        if has_fast_way and self._fast_norm:
            return work(self, x)
        x = run(self, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if moves else run(self, x)
        return self.act(self.drop(x)) if follows else x

    return forward


def _agrees(module: nn.Module, ours: Forward, options: Options) -> bool:
    base, *_ = options
    groups: Any = getattr(module, "num_groups", 3)
    channels = 2 * groups
    attributes: dict[str, Any] = {"normalized_shape": (channels,), "_fast_norm": False}
    weights = dict.fromkeys(("weight", "bias"), numbers(channels))
    inner = {"drop": nn.Identity(), "act": nn.Identity()} if module._modules else {}
    copy = small_copy(module, weights, inner, **attributes)
    if base is nn.BatchNorm2d:
        copy._buffers.update(
            running_mean=numbers(channels),
            running_var=numbers(channels).abs(),
            num_batches_tracked=torch.zeros((), dtype=torch.long, device="cpu"),
        )
    last = base is nn.LayerNorm and not options[1]
    x = numbers(4, 5, 3, channels) if last else numbers(4, channels, 5, 3)
    return agree(copy, ours, [x])


norm = Recogniser("{0.__name__}", _candidates, _forward, _agrees)
