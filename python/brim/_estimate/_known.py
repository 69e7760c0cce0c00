"""Operators of which it is known what they allocate inside.

The names are those of `tests/python/test_estimate_operators.py`, which measures them on the CPU,
and of `benchmarks/bench_estimate.py`, which measures training steps on CUDA. An operator that is
neither here nor in a table of temporaries is named in the report of `brim.estimate`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

# Nothing, on every device; nor do views and operators that work element by element.
_NOTHING = """
_ctc_loss nonzero
arange bernoulli cat clone constant_pad_nd copy elu_backward embedding empty empty_like
empty_strided eye fill full full_like _fused_adam _fused_adamw _fused_sgd gather glu glu_backward
hardshrink_backward hardsigmoid_backward hardswish hardswish_backward hardtanh_backward
huber_loss_backward is_same_size leaky_relu leaky_relu_backward linspace _local_scalar_dense
log_sigmoid_backward max_pool2d_with_indices max_pool2d_with_indices_backward mean mish_backward
mse_loss_backward new_empty new_empty_strided new_full new_ones new_zeros nll_loss_backward
nll_loss_forward normal ones ones_like rand rand_like randint randint_like randn randn_like random
randperm repeat _reshape_copy resize _resize_output scalar_tensor select_backward set slice
slice_backward smooth_l1_loss_backward softplus_backward softshrink_backward split stack sum
threshold_backward _to_copy tril triu uniform _unsafe_view where zero zeros zeros_like
"""

# Nothing on the CPU, beyond copies of inputs that are not contiguous (see `_cpu.py`).
_NOTHING_ON_THE_CPU = """
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d adaptive_max_pool2d_backward
all amax amin aminmax any argmax argmin avg_pool2d avg_pool2d_backward avg_pool3d
avg_pool3d_backward binary_cross_entropy binary_cross_entropy_backward bucketize _cdist_backward
_cdist_forward channel_shuffle col2im complex cummax cumprod cumsum diag_embed diagonal_backward
diagonal_scatter embedding_dense_backward _fft_c2c _fft_c2r _fft_r2c flip grid_sampler_2d
grid_sampler_2d_backward index index_add index_copy index_fill index_put index_select
_linalg_check_errors linalg_cholesky_ex _linalg_det linalg_lu_solve _linalg_slogdet _linalg_solve_ex
linalg_solve_triangular linalg_vector_norm log_sigmoid_forward _log_softmax
_log_softmax_backward_data logcumsumexp masked_fill masked_scatter max max_pool3d_with_indices
max_pool3d_with_indices_backward max_unpool2d min mode native_batch_norm native_group_norm
native_layer_norm nll_loss2d_backward nll_loss2d_forward norm _pdist_backward _pdist_forward
pixel_shuffle pixel_unshuffle _prelu_kernel _prelu_kernel_backward prod reflection_pad1d
reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward renorm replication_pad2d
replication_pad2d_backward roll scatter scatter_add searchsorted select_scatter slice_scatter
_softmax _softmax_backward_data sort std std_mean topk unfold_backward unsafe_split
upsample_bicubic2d upsample_bilinear2d_backward upsample_linear1d upsample_nearest1d
upsample_nearest2d_backward upsample_nearest3d _upsample_nearest_exact2d_backward
upsample_trilinear3d var var_mean
"""

# Nothing on CUDA.
_NOTHING_ON_CUDA = """
addmm avg_pool2d avg_pool2d_backward baddbmm bmm _grouped_mm _log_softmax
_log_softmax_backward_data mm
native_batch_norm native_batch_norm_backward native_dropout native_dropout_backward
native_group_norm native_group_norm_backward _scaled_dot_product_cudnn_attention
_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention _softmax
upsample_nearest2d
"""


def known_operators(device: str, table: Iterable[Any]) -> Callable[[Any], bool]:
    """Tells whether it is known what an operator takes on one kind of device.

    Args:
        device: "cpu" or "cuda".
        table: operators that have a rule.
    """
    own = _NOTHING_ON_THE_CPU if device == "cpu" else _NOTHING_ON_CUDA
    names = {f"aten::{name}" for name in (_NOTHING + own).split()}
    names |= {func._schema.name for func in table}

    @functools.cache
    def is_known(func: Any) -> bool:
        name = func._schema.name.removesuffix("_")
        functional = getattr(torch.ops.aten, name.removeprefix("aten::"), func._overloadpacket)
        return (
            any(_takes_nothing(packet) for packet in (functional, func._overloadpacket))
            or func.namespace in ("brim", "prim", "profiler")
            or name.startswith("aten::_foreach_")
            or name in names
        )

    return is_known


def _takes_nothing(packet: Any) -> bool:
    """Whether an operator works element by element, or makes a view."""
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return any(one.is_view or torch.Tag.pointwise in one.tags for one in found)
