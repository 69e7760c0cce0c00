"""CUDA's autocast for fake tensors.

Torch's own wrappers ask a tensor whether it is on CUDA, and a fake one says no to C++ code (see
`Tracer`); so do those of brim's operators. These follow the same lists (ATen/autocast_mode.h), as
far as this version of torch has them, and the same cache of casted weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from brim import _C
from brim._estimate._temporaries import by_name, tensors_in

_Run: TypeAlias = "Callable[[Any, Any, Any], Any]"

_LOWER = """
_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d
conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution
cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell
gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
scaled_dot_product_attention
"""
_FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist
cdist renorm logsumexp frobenius_norm.dim nuclear_norm nuclear_norm.dim linalg_vector_norm
linalg_matrix_norm linalg_matrix_norm.str_ord linalg_matrix_sqrth upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
"""
_FLOAT32_RESULT = "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum sum sum.dim_IntList"
_WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
)


class Autocast:
    """The kernels, and the weights that they have cast."""

    def __init__(self) -> None:
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def register(self, libraries: Mapping[str, torch.library.Library]) -> None:
        """Take the place of torch's wrappers, and of brim's own, until these are destroyed."""
        rules: Mapping[str, _Run] = {
            **dict.fromkeys(_LOWER.split(), self._lower),
            **dict.fromkeys(_FLOAT32.split(), self._float32),
            **dict.fromkeys(_FLOAT32_RESULT.split(), self._float32_result),
            **dict.fromkeys(_WIDEST.split(), self._widest),
            "_cudnn_rnn": self._float16_anew,
        }
        for name, run in rules.items():
            _register(libraries["aten"], name, run)
        own = {
            "parameter": self._lower_layer,
            "as_float32": self._float32_inside,
            "cast_weights": self._lower_input,
        }
        for name in (each for each in dir(_C.ops) if not each.startswith("__")):
            if _has_wrapper(f"brim::{name}"):
                # An argument tells the layer what was cast (src/nn/autograd/operator.h). Without
                # one, the rule is that of torch's operator.
                schema = getattr(torch.ops.brim, name).default._schema
                told = [own[each.name] for each in schema.arguments if each.name in own]
                for rule in told or filter(None, [rules.get(name)]):
                    _register(libraries["brim"], name, rule)

    def forget(self) -> None:
        """Release casted weights, as the end of an autocast region does."""
        if not torch.is_autocast_enabled("cuda"):
            self._cache.clear()

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not _is_eligible(value) or value.dtype == dtype:
            return value
        lower = dtype == torch.get_autocast_dtype("cuda")
        caches = lower and value.requires_grad and value.is_leaf and value._base is None
        caches &= isinstance(value, FakeTensor)
        if not caches or value.dtype != torch.float32 or not torch.is_autocast_cache_enabled():
            return value.to(dtype)
        if id(value) not in self._cache:
            self._cache[id(value)] = (value, value.to(dtype))
        return self._cache[id(value)][1]

    def _all(self, op: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
        args, kwargs = tree_map(lambda value: self._cast(value, dtype), (args, kwargs))
        return op(*args, **kwargs)

    def _lower(self, op: Any, args: Any, kwargs: Any) -> Any:
        return self._all(op, args, kwargs, torch.get_autocast_dtype("cuda"))

    def _float16_anew(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Takes float16 whatever autocast's type is, and a new buffer for the weights."""
        half = torch.float16
        args = tree_map(lambda value: value.to(half) if _is_eligible(value) else value, args)
        return op(*args, **kwargs)

    def _float32(self, op: Any, args: Any, kwargs: Any) -> Any:
        return self._all(op, args, kwargs, torch.float32)

    def _lower_layer(self, op: Any, args: Any, kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cuda")
        given = by_name(op, args, kwargs)
        cast = {name: self._cast(value, dtype) for name, value in given.items()}
        if given["weight"].is_leaf:
            is_cast = cast["weight"] is not given["weight"]
            cast["parameter"] = given["weight"] if is_cast else None
        return op(**cast)

    def _lower_input(self, op: Any, args: Any, kwargs: Any) -> Any:
        given = by_name(op, args, kwargs)
        given["input"] = self._cast(given["input"], torch.get_autocast_dtype("cuda"))
        for name in ("target", "weight"):
            given[name] = self._cast(given[name], torch.float32)
        return op(**{**given, "in_float32": True, "cast_weights": True})

    def _float32_inside(self, op: Any, args: Any, kwargs: Any) -> Any:
        given = by_name(op, args, kwargs)
        cast = {name: self._cast(value, torch.float32) for name, value in given.items()}
        if cast["input"] is not given["input"]:
            cast |= {"input": given["input"], "as_float32": True}
        return op(**cast)

    def _float32_result(self, op: Any, args: Any, kwargs: Any) -> Any:
        given = by_name(op, args, kwargs)
        if given.get("dtype") is None and _is_eligible(args[0]):
            given["dtype"] = torch.float32
        return op(**given)

    def _widest(self, op: Any, args: Any, kwargs: Any) -> Any:
        found = filter(_is_eligible, tensors_in((args, kwargs)))
        if any(tensor.dtype == torch.float32 for tensor in found):
            return self._float32(op, args, kwargs)
        return op(*args, **kwargs)


def _has_wrapper(name: str) -> bool:
    """Whether this version of torch treats the operator: the others are made of such."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA"))


def _is_eligible(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    device = value.fake_device if isinstance(value, FakeTensor) else value.device
    return (
        device.type == "cuda"  # those of other threads are real
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _register(library: torch.library.Library, name: str, run: _Run) -> None:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(getattr(torch.ops, library.ns), packet, None), overload or "default", None)
    if op is not None and _has_wrapper(op.name()):
        library.impl(name, _kernel(op, run), "AutocastCUDA", allow_override=True)  # type: ignore[no-untyped-call]


def _kernel(op: Any, run: _Run) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return run(op, args, kwargs)

    return kernel
