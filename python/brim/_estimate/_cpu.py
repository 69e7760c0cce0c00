"""What torch's own kernels allocate inside on the CPU: general rules, and a table by operator.

Matrix products, convolutions and recurrent layers call libraries: see `_cpu_libraries.py` and
`_cpu_convolutions.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from brim import _C
from brim._estimate._cpu_convolutions import (
    convolution,
    convolution_backward,
    is_channels_last,
)
from brim._estimate._cpu_libraries import (
    packed_for_attention,
    product,
    rnn,
    rnn_backward,
    vector_product,
)
from brim._estimate._known import known_operators
from brim._estimate._temporaries import (
    Rule,
    Temporary,
    by_name,
    by_operator,
    bytes_of,
    copy_of,
    of_attention,
    of_encoder_layer,
    of_reduced_loss,
    tensors_in,
)

aten = torch.ops.aten

# Operators that copy inputs which are not contiguous.
_COPYING_ALL = """
_adaptive_avg_pool2d _cdist_backward _cdist_forward _log_softmax _log_softmax_backward_data _softmax
_softmax_backward_data _upsample_nearest_exact2d_backward adaptive_max_pool2d avg_pool2d avg_pool3d
bucketize channel_shuffle col2im embedding_dense_backward im2col index_select log_sigmoid_forward
max_pool2d_with_indices max_pool3d_with_indices max_unpool2d native_layer_norm
native_layer_norm_backward nll_loss2d_forward nll_loss_forward pixel_shuffle pixel_unshuffle
reflection_pad1d reflection_pad2d replication_pad2d searchsorted upsample_bilinear2d_backward
upsample_nearest2d_backward
"""
_COPYING_GRADIENTS = """
_adaptive_avg_pool2d_backward adaptive_max_pool2d_backward avg_pool2d_backward avg_pool3d_backward
max_pool2d_with_indices_backward max_pool3d_with_indices_backward nll_loss2d_backward
reflection_pad1d_backward reflection_pad2d_backward replication_pad2d_backward
"""
_COPYING: dict[str, tuple[str, ...]] = {  # and the arguments that they do not copy
    **dict.fromkeys(_COPYING_ALL.split(), ()),
    **dict.fromkeys(_COPYING_GRADIENTS.split(), ("self",)),
    "embedding": ("weight",),
    "grid_sampler_2d_backward": ("input", "grid"),
}
# Operators that cast their input if the result has another type.
_CASTING = {"sum", "mean", "prod", "cumsum", "cumprod"}
_TRANSPOSING_BUFFER = 60 * 60  # elements
_LEAST_SHARED_PLACES = 1024  # of a sample that threads split in a group norm
_MOST_VECTORIZED = 128  # height and width of an image together


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether it is contiguous, in the usual layout or with channels last."""
    return tensor.is_contiguous() or is_channels_last(tensor)


def _copied(tensor: torch.Tensor) -> int:
    """What a contiguous copy takes; nothing if the tensor is contiguous."""
    return 0 if _is_dense(tensor) else bytes_of(tensor) + _transposing(tensor)


def _transposing(tensor: torch.Tensor) -> int:
    """The buffer with which torch copies a transposed matrix."""
    large = tensor.numel() >= _TRANSPOSING_BUFFER
    if tensor.dim() == 2 and tensor.stride() == (1, tensor.size(0)) and large:
        return _TRANSPOSING_BUFFER * tensor.element_size()
    return 0


def _sum_bytes(x: torch.Tensor) -> int:
    """Of a sum of its elements: halves are added in float32."""
    return max(4, x.element_size())


class CpuTemporaries:
    """What the kernels take beyond their outputs: most of them nothing, the others by a rule."""

    def __init__(self) -> None:
        self.assumptions: dict[str, None] = {}  # in order, each once
        rules: dict[str, Rule] = {
            "_ctc_loss_backward.Tensor": lambda args, outputs: bytes_of(args[6]),
            "mse_loss smooth_l1_loss huber_loss": of_reduced_loss,
            "native_batch_norm": self._batch_norm,
            "native_batch_norm_backward": self._batch_norm_backward,
            "native_layer_norm_backward": self._layer_norm_backward,
            "native_group_norm": self._group_norm,
            # Two sums for each sample and channel.
            "native_group_norm_backward": lambda args, outputs: 8 * args[5] * args[6],
            "_scaled_dot_product_flash_attention_for_cpu": self._attention,
            "_scaled_dot_product_flash_attention_for_cpu_backward": self._attention_backward,
            "gelu_backward": self._gelu_backward,
            "upsample_nearest2d upsample_bilinear2d _upsample_nearest_exact2d": self._upsample,
            "_upsample_bilinear2d_aa": self._upsample_antialias,
            "_upsample_bilinear2d_aa_backward": self._upsample_antialias_backward,
            "upsample_bicubic2d_backward": lambda args, outputs: copy_of(args[0]),
            "im2col": self._unfold,
            "kthvalue": lambda args, outputs: bytes_of(args[0]) + 8 * args[0].numel(),
            "median": self._median,
            "multinomial": lambda args, outputs: bytes_of(args[0]) + bytes_of(outputs[0]) // 2,
            "histc": lambda args, outputs: 3 * bytes_of(outputs[0]),
            "masked_fill clone": self._clone,
            "copy_": lambda args, outputs: _transposing(args[1]),
            "max": lambda args, outputs: _copied(args[0]) if len(args) == 1 else 0,
            "scatter_reduce": self._scatter_reduce,
            "_embedding_bag": lambda args, outputs: 7 * args[1].numel(),
            "_embedding_bag_backward": lambda args, outputs: 24 * args[1].numel(),
            "linalg_matrix_exp": self._matrix_exp,
            "linalg_qr": lambda args, outputs: 2 * bytes_of(args[0]),
            "linalg_inv_ex _linalg_svd": lambda args, outputs: bytes_of(args[0]),
            "_linalg_eigh": lambda args, outputs: 9 * args[0].size(-1) ** 2,
            "_transformer_encoder_layer_fwd": self._encoder_layer,
            "_native_multi_head_attention": self._multihead_attention,
            "mm bmm": lambda args, outputs: product(args[0], args[1], outputs[0]),
            "addmm baddbmm": lambda args, outputs: product(args[1], args[2], outputs[0]),
            "mv": lambda args, outputs: vector_product(args[0]),
            "addmv": lambda args, outputs: vector_product(args[1]),
            "mkldnn_rnn_layer": rnn,
            "mkldnn_rnn_layer_backward": rnn_backward,
            "convolution": convolution,
            "convolution_backward": convolution_backward,
        }
        self._table = by_operator(rules)
        self.is_known = known_operators("cpu", self._table)

    def of(
        self, func: Any, args: Any, kwargs: Any, outputs: list[Any], backward: bool
    ) -> Iterable[Temporary]:
        """What one call of an operator takes."""
        if not outputs:
            return ()
        size = _generally(func, args, kwargs, outputs)
        rule = self._table.get(func)
        if rule is not None and kwargs.get("approximate") != "tanh":  # torch's own kernel of GELU
            size += rule(args, outputs)
        if rule in (convolution, convolution_backward):
            text = "workspaces of convolutions follow rules, as oneDNN's choices are not public"
            self.assumptions[text] = None
        return (Temporary(int(size)),) if size > 0 or rule is not None else ()

    # Mean and variance; sums of each thread where it sees all channels of a position.
    def _batch_norm(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        x, training = args[0], args[5]
        places = x.numel() // (x.size(0) * x.size(1)) if x.numel() else 0
        threads = torch.get_num_threads() if is_channels_last(x) or places == 1 else 0
        return (threads + 2) * x.size(1) * _sum_bytes(x) if training else 0

    # The gradient centred, before it is scaled, if the input needs one.
    def _batch_norm_backward(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return bytes_of(args[0]) if args[-1][0] and _is_dense(args[0]) else 0

    # Sums of each thread for weight and bias.
    def _layer_norm_backward(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return 8 * torch.get_num_threads() * math.prod(args[2]) if len(outputs) > 1 else 0

    # oneDNN's kernel cannot read an expanded gradient.
    def _gelu_backward(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        grad, x = args[:2]
        return bytes_of(x) if x.is_contiguous() and 0 in grad.stride() else 0

    # Two sums of each thread for each sample and channel, if threads split the positions.
    def _group_norm(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        x = args[0]
        samples, channels, places, groups = args[3:7]
        if not is_channels_last(x) or places < _LEAST_SHARED_PLACES:
            return 0
        return 2 * samples * (torch.get_num_threads() * channels + groups) * _sum_bytes(x)

    # Scores, maxima, sums and outputs of one block, for each thread; halves are multiplied as such.
    def _attention(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        query, key, value = args[:3]
        rows, columns = _block(query, key)
        width, threads = query.size(-1), torch.get_num_threads()
        size = 4 * threads * rows * (columns + 2 + width)
        if query.element_size() == 2:
            size += 2 * threads * rows * (columns + width)
            size += sum(map(packed_for_attention, (key, value)))
        return size

    # Scores and their gradients; the output's gradient is copied if it is not contiguous.
    def _attention_backward(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        grad, query, key = args[:3]
        rows, columns = _block(query, key)
        threads = torch.get_num_threads()
        size = 4 * threads * 2 * rows * columns
        if query.element_size() == 2:
            size += 2 * threads * rows * (3 * columns + 2 * query.size(-1))
            size += packed_for_attention(key)
        return size + (0 if grad.transpose(1, 2).is_contiguous() else bytes_of(grad))

    def _encoder_layer(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        x, weight = args[0].flatten(0, -2), args[16]
        wide = x.new_empty(x.size(0), weight.size(1))
        return of_encoder_layer(args, True, product(wide, weight.mT, x))

    def _multihead_attention(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return of_attention(args[0], args[4], True, args[9] if len(args) > 9 else None)

    # Small images are resized in the other layout, with channels last.
    def _upsample(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        x, out = args[0], outputs[0]
        last = x.is_contiguous(memory_format=torch.channels_last)
        if last or out.size(-1) + out.size(-2) > _MOST_VECTORIZED:
            return 0
        return bytes_of(x) + bytes_of(out)

    # Rows first, then columns.
    def _upsample_antialias(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return bytes_of(args[0]) // args[0].size(-1) * outputs[0].size(-1)

    def _upsample_antialias_backward(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        contiguous = args[0].is_contiguous()
        return 0 if contiguous else bytes_of(args[0]) + bytes_of(outputs[0])

    # The result is first allocated with the input's size.
    def _unfold(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return bytes_of(args[0]) if outputs[0].numel() > args[0].numel() else 0

    # A copy in which the reduced dimension is the last one.
    def _median(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        x = args[0]
        if len(args) == 1:
            return bytes_of(x)
        moved = x.transpose(args[1], -1)
        return 0 if moved.is_contiguous() else _copied(moved)

    def _clone(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        return _transposing(args[0]) if outputs[0].stride() != args[0].stride() else 0

    # Powers, and what their product takes.
    def _matrix_exp(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        x = args[0].flatten(0, -3) if args[0].dim() > 3 else args[0]
        return 10 * bytes_of(x) + product(x, x, outputs[0])

    # Counts of elements, and which are 0.
    def _scatter_reduce(self, args: Any, outputs: list[torch.Tensor]) -> Any:
        mean = len(args) > 4 and args[4] == "mean"
        return 2 * bytes_of(outputs[0]) + outputs[0].numel() if mean else 0


def _generally(func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> int:
    """Copies of inputs in another layout or type."""
    if torch.Tag.pointwise in func.tags:
        return _promoted(func, args, kwargs, outputs[0])
    name = func._schema.name.removeprefix("aten::")
    if name in _COPYING:
        given = by_name(func, args, kwargs)
        read = tensors_in([given[key] for key in given.keys() - _COPYING[name]])
        copies = [t for t in read if not _is_dense(t)]
        buffer = (
            0 if name.startswith("native_layer_norm") else max(map(_transposing, copies), default=0)
        )
        return sum(map(bytes_of, copies)) + buffer
    if name in _CASTING and outputs[0].dtype != args[0].dtype:
        return int(args[0].numel()) * outputs[0].element_size()
    return 0


def _promoted(func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> int:
    """Inputs that are cast to the type in which a pointwise operator works."""
    inputs = _C.tensors_of((args, kwargs))
    if len({t.dtype for t in (*inputs, out)}) == 1 or func._overloadpacket in _TYPES_DIFFER:
        return 0
    common = inputs[0].dtype
    for one in inputs[1:]:
        if one.dim() > 0 or one.dtype.is_floating_point > common.is_floating_point:
            common = torch.promote_types(common, one.dtype)
    if out.dtype.is_floating_point and not common.is_floating_point:
        common = out.dtype
    size = sum(common.itemsize * t.numel() for t in inputs if t.dtype != common)
    if func._schema.is_mutable and out.dtype != common:
        size += common.itemsize * out.numel()
    return size


# Their inputs may have different types.
_TYPES_DIFFER = {aten.where, aten.masked_fill, aten.masked_fill_, aten.clone, aten._to_copy}


def _block(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of the scores that a thread works on at once, as torch chooses them."""
    length = query.size(-2)
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.size(-2))
