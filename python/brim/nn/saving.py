"""A region of code in which the functions of torch keep what brim's keep."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional
from torch import Tensor
from torch.overrides import TorchFunctionMode

from brim.nn import functional

__all__ = ["Saving", "saving"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_RUNS_IN_PARTS: tuple[Callable[[object], bool], ...] = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)


def saving() -> Saving:
    """A region of code in which functions such as `F.relu` and `F.max_pool2d` keep less.

    `with brim.saving():` sends the functions of `torch.nn.functional`, and those of the same names
    in `torch` and `torch.Tensor`, to `brim.nn.functional`: activations, dropout, linear layers,
    convolutions, normalisation and pooling of plain tensors of a floating type. So do the layers of
    `torch.nn`, which call these functions. Everything else is left as it is, also what a larger
    function of torch calls inside (`F.multi_head_attention_forward`).

    Regions nest and belong to their thread. Also a decorator: `@brim.saving()`. What torch.compile
    traces is left to the compiler.

    Returns:
        A context manager, which can be entered again.

    Example:
        >>> import torch, brim
        >>> import torch.nn.functional as F
        >>> x = torch.randn(8, requires_grad=True)
        >>> with brim.saving():
        ...     y = F.relu(x)
        >>> y.grad_fn.name()
        'brim::relu_backward'
    """
    return Saving()


class Saving(TorchFunctionMode):
    """What `brim.saving()` gives."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run brim's function in place of torch's where there is one and the types fit."""
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():
            instead = _INSTEAD.get(func)
            if instead is not None and not _pause.on and _fits(args, kwargs):
                return instead(*args, **kwargs)
        return func(*args, **kwargs)

    def __call__(self, function: _Function) -> _Function:
        """Decorate a function: each call of it is such a region."""
        if any(runs_in_parts(function) for runs_in_parts in _RUNS_IN_PARTS):
            raise TypeError(
                f"brim.saving() cannot decorate {function.__qualname__}, which runs in parts: use "
                "`with brim.saving():` inside of it"
            )
        decorated: _Function = contextlib.ContextDecorator.__call__(_Region(self), function)
        return decorated


class _Region(contextlib.ContextDecorator):
    def __init__(self, mode: Any) -> None:  # torch's mode has no types
        self._mode = mode

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)


class _Pause(threading.local):
    on = False


_pause = _Pause()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Within, regions of this thread do nothing."""
    before = _pause.on
    _pause.on = True
    try:
        yield
    finally:
        _pause.on = before


def _fits(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the input is a plain tensor of a floating type, and the others are plain too."""
    given = args[0] if args else kwargs.get("input")
    if type(given) is not Tensor and type(given) is not torch.nn.Parameter:
        return False
    return (
        given.is_floating_point()
        and given.layout is torch.strided
        and all(map(_is_plain, args))
        and all(map(_is_plain, kwargs.values()))
    )


def _is_plain(value: object) -> bool:
    return not isinstance(value, Tensor) or type(value) in (Tensor, torch.nn.Parameter)


# -- What arrives under which name ----------------------------------------------------------------


def _inplace(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda input, *args, **kwargs: function(input, *args, inplace=True, **kwargs)


def _with_indices(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = True,
    ) -> Any:
        return function(input, kernel_size, stride, padding, dilation, ceil_mode, True)

    return run


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    return functional.dropout(input, p, train)


def _dropout_(input: Tensor, p: float, train: bool) -> Tensor:
    return functional.dropout(input, p, train, True)


def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    return functional.batch_norm(
        input, running_mean, running_var, weight, bias, training, momentum, eps
    )


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return functional.layer_norm(input, normalized_shape, weight, bias, eps)


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    return functional.group_norm(input, num_groups, weight, bias, eps)


def _table() -> dict[Any, Callable[..., Any]]:
    own: Any = functional
    from_torch: Any = torch
    inner: Any = torch._C._nn
    table = {getattr(torch.nn.functional, name): getattr(own, name) for name in own.__all__}
    table |= {
        torch.relu: functional.relu,
        torch.Tensor.relu: functional.relu,
        torch.relu_: _inplace(functional.relu),
        torch.Tensor.relu_: _inplace(functional.relu),
        inner.relu6: functional.relu6,
        inner.relu6_: _inplace(functional.relu6),
        inner.leaky_relu: functional.leaky_relu,
        inner.leaky_relu_: _inplace(functional.leaky_relu),
        inner.hardtanh: functional.hardtanh,
        inner.hardtanh_: _inplace(functional.hardtanh),
        inner.silu: functional.silu,
        inner.silu_: _inplace(functional.silu),
        from_torch.dropout: _dropout,
        from_torch.dropout_: _dropout_,
        from_torch.batch_norm: _batch_norm,
        torch.layer_norm: _layer_norm,
        torch.group_norm: _group_norm,
        torch.rms_norm: functional.rms_norm,
        inner.adaptive_avg_pool2d: functional.adaptive_avg_pool2d,
        inner.adaptive_avg_pool3d: functional.adaptive_avg_pool3d,
    }
    for dimensions in (1, 2, 3):
        name = f"max_pool{dimensions}d"
        pool = getattr(own, name)
        table[getattr(from_torch, name)] = pool
        table[getattr(torch.nn.functional, name + "_with_indices")] = _with_indices(pool)
    table[from_torch.max_pool1d_with_indices] = _with_indices(functional.max_pool1d)
    table[inner.max_pool2d_with_indices] = _with_indices(functional.max_pool2d)
    table[inner.max_pool3d_with_indices] = _with_indices(functional.max_pool3d)
    return table


_INSTEAD: Mapping[Any, Callable[..., Any]] = _table()
