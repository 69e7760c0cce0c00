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
from torch.compiler import is_compiling, is_dynamo_compiling, is_exporting

from brim import _C

if TYPE_CHECKING:
    from brim._C import _Operators

__all__ = ["check_tensors", "elsewhere", "is_known", "ops"]

_F: Any = torch.nn.functional
_jit: Any = torch.jit  # has no types


def ops() -> _Operators:
    """The operators of brim, with positional arguments in the order of their schemas.

    Example:
        >>> ops().silu(torch.zeros(2))
        tensor([0., 0.])
    """
    return _traced if is_dynamo_compiling() else _C.ops


class _Traced:
    """The operators while torch.compile traces, which cannot look into the bindings."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(elsewhere, name)


_traced: Any = _Traced()


def elsewhere(name: str, *args: Any) -> Any:
    """Run an operator of brim by the dispatcher, or the function of torch that it stands for.

    For torch.compile, which gets brim's operators in its graph, and for what the bindings do not
    take: tensor classes, modes, symbolic values, and wrong arguments.

    Raises:
        TypeError: naming the argument that should be a tensor and is not.

    Example:
        >>> elsewhere("silu", torch.zeros(2))
        tensor([0., 0.])
        >>> elsewhere("silu", [1.0])
        Traceback (most recent call last):
            ...
        TypeError: input must be a Tensor, got [1.0] of type list
    """
    if args[0] is None:  # the dispatcher would take it for an undefined tensor
        check_tensors(name, None)
    compiling = is_compiling()
    leaves = is_exporting() if compiling else _jit.is_tracing()
    try:
        if leaves or (compiling and name in _COMPILERS) or any(map(_is_foreign, args)):
            return _TORCHS[name](*args)
        if compiling and name.endswith("_"):  # the compiler wants no operators that write
            return args[0].copy_(elsewhere(name[:-1], *args))
        return getattr(torch.ops.brim, name)(*args)
    except Exception:
        check_tensors(name, *args)
        raise


def check_tensors(name: str, *args: object) -> None:
    """Refuse arguments of an operator that should be tensors and are not.

    Values that stand in for tensors (torch.fx) are allowed. Not for the path of a call that works:
    the operators check too, but do not name the argument.

    Raises:
        TypeError: for the first such argument.
    """
    schema = getattr(torch.ops.brim, name).default._schema
    for argument, value in zip(schema.arguments, args, strict=False):
        allowed = {"Tensor": "a Tensor", "Optional[Tensor]": "a Tensor or None"}.get(
            str(argument.type)
        )
        is_tensor = isinstance(value, Tensor) or hasattr(type(value), "__torch_function__")
        if allowed is None or is_tensor or (value is None and "None" in allowed):
            continue
        raise TypeError(
            f"{argument.name} must be {allowed}, got {reprlib.repr(value)} "
            f"of type {type(value).__name__}"
        ) from None


_KNOWN = frozenset([Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor])


def _is_foreign(value: object) -> bool:
    """Whether this needs torch's functions: a tensor class with rules of its own, or a proxy.

    Example:
        >>> class Named(Tensor): ...
        >>> class Own(Tensor):
        ...     @classmethod
        ...     def __torch_function__(cls, func, types, args=(), kwargs=None): ...
        >>> [_is_foreign(torch.zeros(1).as_subclass(kind)) for kind in (Named, Own)]
        [False, True]
    """
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
    return not _is_foreign(tensor)


_functorch: Any = torch._C._functorch
_DEFAULT: Any = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


# -- torch's functions, with the arguments of brim's operators -----------------------------------


def _gate(
    input: Any, gate: int, a: float, b: float, recompute: bool = False, inplace: bool = False
) -> Any:
    if gate == 0:
        return _F.relu(input, inplace)
    if gate == 2:
        return _F.leaky_relu(input, a, inplace)
    return _F.hardtanh(input, a, b, inplace)


def _conv(input: Any, weight: Any, bias: Any, *options: Any) -> Any:
    stride, padding, dilation, transposed, output_padding, groups, *_ = options
    kind = f"{len(stride)}d"
    if not transposed:
        run = getattr(_F, "conv" + kind)
        return run(input, weight, bias, stride, padding, dilation, groups)
    run = getattr(_F, "conv_transpose" + kind)
    return run(input, weight, bias, stride, padding, output_padding, groups, dilation)


def _batch_norm(input: Any, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Any:
    return _F.batch_norm(input, mean, var, weight, bias, *rest)


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


_NORMS = frozenset(["batch_norm", "layer_norm", "group_norm", "rms_norm"])
_COMPILERS = _NORMS | {"gelu", "silu", "silu_", "max_pool_with_indices", "adaptive_avg_pool"}
"""Operators for which torch.compile gets torch's own function, and decides what is kept."""

_TORCHS: Mapping[str, Callable[..., Any]] = {
    "gate": _gate,
    "gate_": partial(_gate, inplace=True),
    "gelu": lambda input, approximate: _F.gelu(input, approximate=approximate),
    "silu": lambda input: _F.silu(input),
    "silu_": lambda input: _F.silu(input, inplace=True),
    "dropout": lambda input, p: _F.dropout(input, p),
    "dropout_": lambda input, p: _F.dropout(input, p, inplace=True),
    "linear": lambda input, weight, bias, *_: _F.linear(input, weight, bias),
    "conv": _conv,
    "pad": lambda input, padding, mode: _F.pad(input, padding, mode),
    "batch_norm": _batch_norm,
    "layer_norm": lambda input, shape, *rest: _F.layer_norm(input, list(shape), *rest),
    "group_norm": lambda *args: _F.group_norm(*args),
    "rms_norm": lambda input, shape, *rest: _F.rms_norm(input, list(shape), *rest),
    "max_pool": _max_pool,
    "max_pool_with_indices": partial(_max_pool, return_indices=True),
    "avg_pool": _avg_pool,
    "adaptive_avg_pool": _adaptive_avg_pool,
}
