"""A region of code in which torch's functions keep only what brim's keep."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from brim import _C
from brim._arguments import check_recompute, runs_in_parts
from brim._state.undoing import Undoing
from brim.nn._compiled import in_compiled_code

__all__ = ["Saving", "saving"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def saving(recompute: str | None = None) -> Saving:
    """A region of code in which functions such as `F.relu` and `F.max_pool2d` keep less.

    `with brim.saving():` redirects torch's operators to those of `brim.nn.functional`, by whatever
    name they are called: activations, dropout, linear layers, convolutions, normalisation, pooling
    and cross entropy of floating-point tensors that need a gradient, and products with what these
    made. This includes what the layers of `torch.nn` and larger functions of torch
    (`F.multi_head_attention_forward`) call. Nothing else changes, or takes longer.

    Regions nest and belong to their thread. `@brim.saving()` decorates a function. torch.compile
    decides by itself what it keeps; `recompute` limits that (see `brim.convert`).

    Args:
        recompute: "cheap": the functions keep nothing that those before them can recompute in
            backward, as with `brim.convert(model, recompute="cheap")`. "products": the same, and
            linear layers and convolutions run again as with `recompute="products"` there. "auto":
            the same, when memory is short.

    Returns:
        A context manager, which can be entered again.

    Raises:
        ValueError: if `recompute` is unknown.

    Example:
        >>> import torch, brim
        >>> import torch.nn.functional as F
        >>> x = torch.randn(8, requires_grad=True)
        >>> with brim.saving():
        ...     y = F.relu(x)
        >>> y.grad_fn.name()
        'brim::relu_backward'
    """
    check_recompute(recompute)
    # What torch.compile traces is not in a region, and it knows this block.
    is_traced = in_compiled_code(recompute)
    return cast("Saving", contextlib.nullcontext()) if is_traced else Saving(recompute)


class Saving(_C.Region):
    """What `brim.saving()` gives.

    Example:
        >>> import torch, brim
        >>> with brim.saving():  # torch's functions are brim's here
        ...     torch.relu(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """

    def __init__(self, recompute: str | None = None) -> None:
        """A region that is not entered yet."""
        super().__init__(recompute)
        self._recompute = recompute

    def __call__(self, function: _Function) -> _Function:
        """Decorate a function: each call of it is such a region."""
        if runs_in_parts(function):
            raise TypeError(
                f"brim.saving() cannot decorate {function.__qualname__}, which runs in parts: use "
                "`with brim.saving():` inside of it"
            )

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with saving(self._recompute):
                return function(*args, **kwargs)

        return cast("_Function", run)


def pause(undo: Undoing) -> None:
    """Regions of this thread do nothing until the block ends, which puts back what is in force."""
    _C.pause_regions()


class _Watching(threading.local):
    """The second of the hooks that only watch in this thread, and the hooks below them."""

    hooks: tuple[Any, Any] | None = None


_watching = _Watching()


def hooks_in_force() -> Any:
    """The saved-tensor hooks that were installed last, without `watching`; None for none."""
    hooks = _top_hooks(True)
    if hooks is None or _watching.hooks is None or hooks[1] is not _watching.hooks[0]:
        return hooks
    return _watching.hooks[1]


_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks


def watch(undo: Undoing, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Until the block ends, these saved-tensor hooks see what is kept, and layers act as without.

    `pack` must return what holds the tensor as it is.
    """
    undo.callback(functools.partial(_watch, _watching.hooks))
    own = (unpack, hooks_in_force())
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)  # the block pops them
    _watch(own)


def _watch(hooks: Any) -> None:
    unpack, below = hooks or (None, None)
    _watching.hooks = hooks
    _C.watch_hooks(unpack, below and below[1])
