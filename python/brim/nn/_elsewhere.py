"""How Python calls brim's operators: by the bindings, by the dispatcher, or torch's own functions.

The bindings are the fast way, for plain tensors. Tensor classes with rules of their own get torch's
function, which they can override. So do exported and traced programs, which load without brim.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.compiler import is_compiling, is_dynamo_compiling

from brim import _C
from brim.nn import _elementwise
from brim.nn._compiled import IF_SHORT, in_compiled_code, runs_again

if TYPE_CHECKING:
    from brim._C import _Operators

__all__ = ["check_arguments", "is_foreign", "is_known", "is_traced", "ops", "via_dispatcher"]

_F: Any = torch.nn.functional
_jit: Any = torch.jit  # has no types


def ops() -> _Operators:
    """The operators of brim, with positional arguments in the order of their schemas."""
    return _traced if is_dynamo_compiling() else _C.ops


class _Traced:
    """The operators while torch.compile traces, which cannot look into the bindings."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(via_dispatcher, name)


_traced: Any = _Traced()


def via_dispatcher(name: str, *args: Any) -> Any:
    """Run an operator of brim by the dispatcher, or the function of torch that it stands for.

    For torch.compile, which gets brim's operators in its graph, and for what the bindings do not
    take: tensor classes, modes, symbolic values, and wrong arguments.

    Raises:
        TypeError: naming the argument that should be a tensor or a bool and is not.

    Example:
        >>> via_dispatcher("silu", torch.zeros(2))
        tensor([0., 0.])
        >>> via_dispatcher("silu", [1.0])
        Traceback (most recent call last):
            ...
        TypeError: input must be a Tensor, got [1.0] of type list
    """
    if args[0] is None:  # the dispatcher would take it for an undefined tensor
        check_arguments(name, None)
    compiling = is_compiling()
    is_product = name in _PRODUCTS
    again = is_product and args[-1] is True and args[-2] != IF_SHORT
    asks = name in _ASK and (again or args[-1 - is_product] is True) and is_dynamo_compiling()
    in_compiled_code(asks)
    # The flag itself: up to torch 2.11, is_exporting() is true whenever torch.compile traces.
    leaves = torch.compiler._is_exporting_flag if compiling else _jit.is_tracing()
    in_graphs = name.removesuffix("_") in _IN_GRAPHS and (is_product or not asks)
    is_torchs = leaves or (compiling and not in_graphs)
    try:
        if is_torchs or any(map(is_foreign, args)):
            return _TORCHS[name](*args)
        if compiling and name.endswith("_"):  # the compiler wants no operators that write
            return args[0].copy_(via_dispatcher(name[:-1], *args))
        return runs_again(name, *args) if again and asks else getattr(torch.ops.brim, name)(*args)
    except Exception:
        check_arguments(name, *args)
        raise


def is_traced() -> bool:
    """Whether torch.compile or torch.jit records what runs."""
    return is_compiling() or _jit.is_tracing()


def check_arguments(name: str, *args: object) -> None:
    """Refuse arguments of an operator that should be tensors or bools and are not.

    Values that stand in for tensors (torch.fx) are allowed. Not for the path of a call that works:
    the operators check too, but do not name the argument.

    Raises:
        TypeError: for the first such argument.
    """
    schema = getattr(torch.ops.brim, name).default._schema
    for argument, value in zip(schema.arguments, args, strict=False):
        kind = "bool" if argument.name == "recompute" else str(argument.type)
        allowed, types = _ALLOWED.get(kind, ("", object))
        if not isinstance(value, types) and not hasattr(type(value), "__torch_function__"):
            raise TypeError(
                f"{argument.name} must be {allowed}, got {reprlib.repr(value)} "
                f"of type {type(value).__name__}"
            ) from None


_ALLOWED: Mapping[str, tuple[str, Any]] = {
    "Tensor": ("a Tensor", Tensor),
    "Optional[Tensor]": ("a Tensor or None", (Tensor, type(None))),
    "bool": ("a bool", (int, torch.SymBool)),
}
"""What arguments of some types in a schema may be."""

_KNOWN = frozenset([Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor])


def is_foreign(value: object) -> bool:
    """Whether this needs torch's functions: a tensor class with rules of its own, or a proxy.

    Example:
        >>> class Named(Tensor): ...
        >>> class Own(Tensor):
        ...     @classmethod
        ...     def __torch_function__(cls, func, types, args=(), kwargs=None): ...
        >>> [is_foreign(torch.zeros(1).as_subclass(kind)) for kind in (Named, Own)]
        [False, True]
    """
    if value is None:  # torch 2.11's compiler cannot look into its type
        return False
    kind: Any = type(value)
    if kind in _KNOWN or not hasattr(kind, "__torch_function__"):
        return False
    return (
        not issubclass(kind, Tensor)
        or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
        or getattr(kind.__torch_function__, "__func__", None) is not _DEFAULT
    )


def is_known(tensor: Tensor) -> bool:
    """For the core: whether brim's kernels may take a tensor with dispatch keys it does not know.

    They may inside of one torch.func.grad, but not under vmap, jvp, a second gradient or autograd
    around it, which they would not see.

    Example:
        >>> torch.func.grad(lambda x: x.sum() * is_known(x))(torch.ones(2))
        tensor([1., 1.])
        >>> torch.func.vmap(lambda x: x * is_known(x))(torch.ones(2))
        tensor([0., 0.])
    """
    transforms = _functorch.get_interpreter_stack()
    if transforms and [each.key() for each in transforms] != [_functorch.TransformType.Grad]:
        return False
    if _functorch.is_gradtrackingtensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
        if tensor.requires_grad:
            return False
    return not is_foreign(tensor)


_functorch: Any = torch._C._functorch
_DEFAULT: Any = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


# -- torch's functions, with the arguments of brim's operators -----------------------------------


def _torchs(name: str) -> Callable[..., Any]:
    """The function of torch with an operator's name, which takes the options in the same order.

    Example:
        >>> _torchs("leaky_relu")(torch.tensor([-1.0, 2.0]), 0.5, False)
        tensor([-0.5000,  2.0000])
    """
    function = getattr(_F, name.removesuffix("_"))
    fixed = {"inplace": True} if name.endswith("_") else {}
    schema = getattr(torch.ops.brim, name).default._schema
    count = sum(each.name not in _OURS for each in schema.arguments)

    def run(*args: Any) -> Any:
        return function(*args[:count], **fixed)

    return run


_OURS = ("parameter", "recompute", "runs_again", "as_float32")  # at the end


def _conv(input: Any, weight: Any, bias: Any, *options: Any) -> Any:
    stride, padding, dilation, transposed, output_padding, groups, *_ = options
    kind = f"{len(stride)}d"
    if not transposed:
        run = getattr(_F, "conv" + kind)
        return run(input, weight, bias, stride, padding, dilation, groups)
    run = getattr(_F, "conv_transpose" + kind)
    return run(input, weight, bias, stride, padding, output_padding, groups, dilation)


def _max_pool(
    input: Any, kernel_size: Sequence[int], *options: Any, return_indices: bool = False
) -> Any:
    pool = getattr(_F, f"max_pool{len(kernel_size)}d")
    return pool(input, kernel_size, *options, return_indices=return_indices)


def _avg_pool(input: Any, kernel_size: Sequence[int], *options: Any) -> Any:
    if len(kernel_size) == 1:  # avg_pool1d takes no divisor
        options = options[:-1]
    return getattr(_F, f"avg_pool{len(kernel_size)}d")(input, kernel_size, *options)


def _adaptive_avg_pool(input: Any, output_size: Sequence[int]) -> Any:
    return getattr(_F, f"adaptive_avg_pool{len(output_size)}d")(input, output_size)


def _cross_entropy(input: Any, target: Any, weight: Any, reduction: int, *options: Any) -> Any:
    ignore_index, label_smoothing, in_float32, *_ = options
    return _F.cross_entropy(
        input.float() if in_float32 else input,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=("none", "mean", "sum")[reduction],
        label_smoothing=label_smoothing,
    )


def _linear_cross_entropy(
    input: Any, linear_weight: Any, linear_bias: Any, target: Any, weight: Any, *options: Any
) -> Any:
    *common, scale, softcap, in_float32, _, _ = options
    logits = _F.linear(input, linear_weight, linear_bias)
    if scale != 1.0:
        logits = logits * scale
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    return _cross_entropy(logits, target, weight, *common, in_float32)


def _float32_rms_norm(input: Any, weight: Any, eps: float, offset: float, cast_first: bool) -> Any:
    wide = input.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return wide.to(input.dtype)
    factors = weight if cast_first else weight.to(torch.float32)
    factors = factors + offset if offset else factors
    return factors * wide.to(input.dtype) if cast_first else (wide * factors).to(input.dtype)


_TORCHS: Mapping[str, Callable[..., Any]] = {
    **{name: _torchs(name) for name in dir(_C.ops) if hasattr(_F, name.removesuffix("_"))},
    "gelu": lambda input, approximate, *_: _F.gelu(input, approximate=approximate),
    "batch_norm": lambda input, weight, bias, mean, variance, *rest: _F.batch_norm(
        input, mean, variance, weight, bias, *rest
    ),
    "conv": _conv,
    "add": torch.add,
    "add_": lambda input, other: input.add_(other),
    "float32_rms_norm": _float32_rms_norm,
    "mul": lambda input, other, *_: torch.mul(input, other),
    "pad": lambda input, padding, mode: _F.pad(input, padding, mode),
    "max_pool": _max_pool,
    "max_pool_with_indices": partial(_max_pool, return_indices=True),
    "avg_pool": _avg_pool,
    "adaptive_avg_pool": _adaptive_avg_pool,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    **{name: getattr(_elementwise, name) for name in ("activation", "gated", "gated_packed")},
}

_IN_GRAPHS = frozenset(
    name
    for name in _TORCHS
    if torch.Tag.pt2_compliant_tag in getattr(torch.ops.brim, name).default.tags
)
"""What torch.compile gets. Instead of the others it gets torch's own, and decides what is kept.

So it does of activations that are asked to recompute: it recomputes only operators it knows."""

_PRODUCTS = ("linear", "conv")  # whose last two arguments are recompute and runs_again
_ASK = frozenset(
    name
    for name in _TORCHS
    if name in _PRODUCTS
    or getattr(torch.ops.brim, name).default._schema.arguments[-1].name == "recompute"
)
"""Operators that can be asked to recompute, by their last argument."""

_C.provide(via_dispatcher=via_dispatcher, is_known=is_known, is_compiling=is_compiling)
