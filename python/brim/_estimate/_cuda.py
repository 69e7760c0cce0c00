"""What torch chooses on CUDA, where the choice decides which memory is taken."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import checkpoint

from brim._estimate._autocast import Autocast
from brim._estimate._cuda_rnns import LSTM, MODES
from brim._state.undoing import Undoing, set_attribute

aten = torch.ops.aten


def choose_cuda(
    undo: Undoing, moves: bool, is_here: Callable[[], bool], empty_cache: Callable[[], None]
) -> None:
    """Take CUDA's kernels where an operator's C++ code chooses by the device, and its autocast.

    Args:
        undo: puts back what was there.
        moves: whether the CPU's tensors, and its autocast, are taken to be CUDA's.
        is_here: whether the calling thread is the traced one. Others find what they expect.
        empty_cache: called instead of torch's.
    """
    autocast = Autocast()
    new, leave = torch.autocast.__init__, torch.autocast.__exit__

    def new_autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        on_cuda = moves and device_type == "cpu" and is_here()
        new(self, "cuda" if on_cuda else device_type, *args, **kwargs)

    def leave_autocast(self: Any, *exception: Any) -> Any:
        result = leave(self, *exception)
        if is_here():
            autocast.forget()
        return result

    # Objects that go out of use unregister their kernels too.
    libraries = {
        namespace: torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        for namespace in ("aten", "brim")
    }
    for library in libraries.values():
        undo.callback(library._destroy)
    with warnings.catch_warnings():
        # Up to torch 2.12 it warns although the override is allowed.
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        autocast.register(libraries)
        for key in ("AutogradCUDA", "CUDA"):
            for name in _KERNELS:
                chosen = _where(is_here, name)
                libraries["aten"].impl(name, chosen, key, allow_override=True)  # type: ignore[no-untyped-call]
    set_attribute(undo, torch.autocast, "__init__", new_autocast)
    set_attribute(undo, torch.autocast, "__exit__", leave_autocast)
    replacements: list[tuple[str, Callable[..., Any]]] = [
        ("cuda.amp.common.amp_definitely_not_available", lambda: False),
        ("cuda.is_bf16_supported", lambda *_, **__: True),
        ("cuda.empty_cache", empty_cache),
        # No kernel runs, so checkpoints need no random state of the device.
        ("utils.checkpoint.get_device_states", lambda *_: ([], [])),
    ]
    if moves:
        # A checkpoint opens both regions again, the CPU's inside, which would end CUDA's here.
        of_both: Callable[..., Any] = checkpoint._get_autocast_kwargs
        place = "utils.checkpoint._get_autocast_kwargs"
        replacements.append((place, lambda *args, **kwargs: (of_both(*args, **kwargs)[0],) * 2))
    if not torch.cuda.is_available():  # an H200 is assumed
        replacements.append(("cuda.get_device_capability", lambda *_, **__: (9, 0)))
    for place, replacement in replacements:
        *holders, name = place.split(".")
        holder = functools.reduce(getattr, holders, torch)
        set_attribute(undo, holder, name, instead_of(getattr(holder, name), replacement, is_here))


def instead_of(
    real: Callable[..., Any], replacement: Callable[..., Any], is_here: Callable[[], bool]
) -> Callable[..., Any]:
    """A function that is another one in the traced thread."""

    @functools.wraps(real)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs) if is_here() else real(*args, **kwargs)

    return chosen


def _where(is_here: Callable[[], bool], name: str) -> Any:
    """A kernel for the traced thread; others run the operators that this one consists of."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(aten, packet), overload or "default")
    return instead_of(op.decompose, _KERNELS[name], is_here)


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout that keeps a mask of bools."""
    if p == 0 or not train or x.numel() == 0:
        return x
    out: torch.Tensor = aten.native_dropout(x, p, train)[0]
    return out


def _cudnn_rnn(mode: int, packed: bool = False) -> Callable[..., tuple[torch.Tensor, ...]]:
    """One operator of cuDNN for all layers and steps."""

    def run(x: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
        lengths = given[0].tolist() if packed else []
        hx, params, has_biases, layers, dropout, train, both = given[packed : packed + 7]
        batch_first = not packed and given[7]
        hidden, cell = hx if mode == LSTM else (hx, None)
        width = hidden.size(2) if cell is None else cell.size(2)
        projected = hidden.size(2) if hidden.size(2) != width else 0
        in_layer = (4 if has_biases else 2) + (1 if projected else 0)  # tensors
        if batch_first:  # cuDNN's output has the steps outside
            x = x.transpose(0, 1)
        # torch.nn's modules keep weights in one buffer, but not those of bfloat16.
        in_buffer = 0 if x.dtype != torch.bfloat16 else sum(w.numel() for w in params)
        weights = (list(params), in_layer, params[0].new_empty(in_buffer))
        rest = (mode, width, projected, layers, False, dropout, train, both, lengths, None)
        out = aten._cudnn_rnn(x, *weights, hidden, cell, *rest)
        states = out[1:2] if cell is None else out[1:3]
        return out[0].transpose(0, 1) if batch_first else out[0], *states

    return run


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scaled dot product attention with the kernel that CUDA prefers for these tensors."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    grouped = enable_gqa and key.size(-3) != query.size(-3)
    width = query.size(-1)
    fused = query.dim() == 4 and width == value.size(-1) and width % 8 == 0
    kept: Sequence[torch.Tensor]
    learned = attn_mask is not None and attn_mask.requires_grad  # cuDNN's has no gradient of it
    # No fused kernel reads rows with gaps between their elements.
    fused &= all(t.stride(-1) == 1 for t in (query, key, value, attn_mask) if t is not None)
    if half and fused and width <= 128 and not learned and _cudnn_drops(dropout_p):
        bias = _float_mask(attn_mask, query)
        rest = (gradient, dropout_p, is_causal, False)
        kept = aten._scaled_dot_product_cudnn_attention(query, key, value, bias, *rest, scale=scale)
    elif half and fused and width <= 256 and attn_mask is None:
        kept = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
    elif grouped or not fused or query.dtype == torch.float64:
        kept = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    else:
        bias = _float_mask(attn_mask, query)
        if bias is not None:
            bias = bias.expand(*query.shape[:-1], key.size(-2))
        kept = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, gradient, dropout_p, is_causal, scale=scale
        )
    return kept[0]


def _cudnn_drops(probability: float) -> bool:
    """Whether torch takes cuDNN's attention for it: from 2.13 on only for sixteenths."""
    return torch.__version__ < "2.13" or float(16 * probability).is_integer()


def _float_mask(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A mask of bools as numbers to add, as torch makes it."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.tensor(-torch.inf, dtype=query.dtype, device=query.device))


_KERNELS: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    **{
        f"{name}.{form}": _cudnn_rnn(mode, form == "data")
        for name, mode in zip(("rnn_relu", "rnn_tanh", "lstm", "gru"), MODES, strict=True)
        for form in ("input", "data")
    },
    "scaled_dot_product_attention": _attention,
}
