"""A region of code in which torch's functions keep only what brim's keep."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from brim import _C
from brim._arguments import runs_in_parts
from brim._state.undoing import Undoing, set_variable
from brim.nn import _activation, functional
from brim.nn._attention import attention

__all__ = ["Saving", "saving"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def saving(recompute: str | None = None) -> Saving:
    """A region of code in which functions such as `F.relu` and `F.max_pool2d` keep less.

    `with brim.saving():` redirects the functions of `torch.nn.functional`, and those of the same
    names in `torch` and `torch.Tensor`, to `brim.nn.functional`: activations, dropout, linear
    layers, convolutions, normalisation and pooling of plain floating-point tensors, and products of
    two that need a gradient. This includes the layers of `torch.nn`, which call these functions.
    Nothing else changes, nor do the calls inside of larger functions of torch
    (`F.multi_head_attention_forward`).

    Regions nest and belong to their thread. `@brim.saving()` decorates a function. torch.compile
    decides by itself what it keeps.

    Args:
        recompute: "cheap": the functions keep nothing that those before them can recompute in
            backward, as with `brim.convert(model, recompute="cheap")`. "products": the same, and
            linear layers and convolutions run again as with `recompute="products"` there.

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
    return Saving(recompute)


def check_recompute(recompute: str | None) -> None:
    """Refuse any other value."""
    if recompute not in (None, "cheap", "products"):
        raise ValueError(f'recompute must be None, "cheap" or "products", got {recompute!r}')


class Saving(TorchFunctionMode):
    """What `brim.saving()` gives.

    Example:
        >>> import torch, brim
        >>> with brim.saving():  # torch's functions are brim's here
        ...     torch.relu(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """

    def __init__(self, recompute: str | None = None, is_shared: bool = False) -> None:
        """A region; if shared, all modules enter it, and `redirected.hooks` is theirs."""
        super().__init__()
        self._recompute = recompute
        self._instead = TABLES[recompute]
        # dynamo takes no mode that does more than it knows when it is entered.
        self._hooks = None if is_shared or is_compiling() else hooks_in_force()
        self._is_shared = is_shared

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run brim's function in place of torch's where there is one and the arguments fit."""
        kwargs = kwargs or {}
        # First: dynamo cannot look into the table.
        instead = None if is_compiling() else self._instead.get(func)
        if instead is None:
            return func(*args, **kwargs)
        # What a checkpoint inside of the region runs again in backward is not in the region then.
        hooks = redirected.hooks if self._is_shared else self._hooks
        if hooks_in_force() != hooks:
            return func(*args, **kwargs)
        if redirected.found is None:
            return instead(*args, **kwargs)
        shared = _C.outputs_shared()
        result = instead(*args, **kwargs)
        if (name := _node_of(result)).startswith("brim::"):
            redirected.found.append(SUM_OF_TWO_TYPES if name == SUM_OF_TWO_TYPES else func)
        if _C.outputs_shared() != shared:
            redirected.found.append(SHARED_OUTPUT)
        return result

    def __call__(self, function: _Function) -> _Function:
        """Decorate a function: each call of it is such a region."""
        if runs_in_parts(function):
            raise TypeError(
                f"brim.saving() cannot decorate {function.__qualname__}, which runs in parts: use "
                "`with brim.saving():` inside of it"
            )

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with Saving(self._recompute):
                return function(*args, **kwargs)

        return cast("_Function", run)


class _Redirected(threading.local):
    """The innermost region of a module, of this thread.

    Attributes:
        found: the functions of torch for which brim's made a node, SUM_OF_TWO_TYPES and
            SHARED_OUTPUT; None: not collected.
        hooks: the saved-tensor hooks that were in force when it began.
        left: the `hooks` of regions around modules that are left out; None outside of regions.
        last: where the last region that found some was judged, and its key there.
        watching: the second of the hooks that only watch, and the hooks in force without them.
        little: how many regions were judged to redirect little: they run in the one around them.
    """

    found: list[Any] | None = None
    hooks: Any = None
    left: list[Any] | None = None
    last: tuple[dict[Any, int], Any] | None = None
    little: int = 0
    watching: tuple[Any, Any] | None = None


redirected = _Redirected()


def hooks_in_force() -> Any:
    """The saved-tensor hooks that were installed last, without `watching`; None for none."""
    hooks = _top_hooks(True)
    if hooks is None or redirected.watching is None or hooks[1] is not redirected.watching[0]:
        return hooks
    return redirected.watching[1]


_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks


def watch(undo: Undoing, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Until the block ends, these saved-tensor hooks see what is kept, and layers act as without.

    `pack` must return what holds the tensor as it is.
    """
    undo.callback(functools.partial(_watch, redirected.watching))
    own = (unpack, hooks_in_force())
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)  # the block pops them
    _watch(own)


def _watch(hooks: Any) -> None:
    unpack, below = hooks or (None, None)
    redirected.watching = hooks
    _C.watch_hooks(unpack, below and below[1])


def _node_of(result: Any) -> str:
    first = result[0] if isinstance(result, tuple) else result
    node = first.grad_fn if type(first) in PLAIN else None
    return "" if node is None else str(node.name())


SUM_OF_TWO_TYPES = "brim::add_of_two_types_backward"
"""The node of a sum that keeps the smaller of its operands, so that nobody keeps the sum."""

SHARED_OUTPUT = "output shared"
"""A ReLU dropped its bits, because brim's function keeps its output. Torch's would keep both."""


_is_paused = ContextVar("_is_paused", default=False)
_C.set_redirection(FakeTensor, _is_paused)


def pause(undo: Undoing) -> None:
    """Regions of this thread do nothing until the block ends."""
    set_variable(undo, _is_paused, True)


# Those of brim.estimate run as real ones do.
PLAIN = frozenset([Tensor, torch.nn.Parameter, FakeTensor])


# -- What arrives under which name ----------------------------------------------------------------


def _inplace(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda input, *args, **kwargs: function(input, *args, inplace=True, **kwargs)


def _with_indices(pool: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return pool(*args[:6], **(kwargs | {"return_indices": True}))

    return run


def _without(option: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with torch's last argument, which decides nothing here."""
    count = len(inspect.signature(function).parameters)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop(option, None)
        return function(*args[:count], **kwargs)

    return run


def _of_two_tensors(
    own: Callable[..., Tensor], torchs: Callable[..., Tensor], how_many: int
) -> Callable[..., Tensor]:
    """Brim's function if `how_many` of two tensors need a gradient; else torch's."""

    def run(input: Tensor, other: Any, **options: Any) -> Tensor:
        if not isinstance(other, Tensor) or options:
            return torchs(input, other, **options)
        if input.requires_grad + other.requires_grad < how_many:
            return torchs(input, other)
        return own(input, other)

    return run


def _add_arithmetic(table: dict[Any, Callable[..., Any]], own: Any, recompute: bool) -> None:
    """Products, and sums where layers ask those before: torch keeps nothing of a sum itself."""
    # Where layers ask, a product with a factor that needs no gradient (noise) is a link too.
    product = _of_two_tensors(own.mul, torch.mul, 1 if recompute else 2)
    for name in ("mul", "multiply", "__mul__", "__rmul__"):
        for place in (torch, torch.Tensor):
            if hasattr(place, name):
                table[getattr(place, name)] = product
    if not recompute or not hasattr(own, "add"):
        return
    sums = _of_two_tensors(own.add, torch.add, 1)
    for each in (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__):
        table[each] = sums
    in_place = _of_two_tensors(functools.partial(own.add, inplace=True), torch.Tensor.add_, 1)
    for each in (torch.Tensor.add_, torch.Tensor.__iadd__):
        table[each] = in_place


def _batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    run = _without("cudnn_enabled", functional.batch_norm)
    return run(input, running_mean, running_var, weight, bias, *args, **kwargs)


def _table(recompute: bool = False, runs_again: bool = False) -> Mapping[Any, Callable[..., Any]]:
    own: Any = SimpleNamespace(**{name: getattr(functional, name) for name in functional.__all__})
    options = {"recompute": recompute, "runs_again": runs_again}
    for name, function in vars(own).items() if recompute else ():
        known = inspect.signature(function).parameters.keys() & options
        if known:
            setattr(own, name, functools.partial(function, **{key: options[key] for key in known}))
    from_torch: Any = torch
    inner: Any = torch._C._nn
    torchs = torch.nn.functional
    table = {
        getattr(torchs, name): function
        for name, function in vars(own).items()
        if hasattr(torchs, name)
    }
    table |= {
        from_torch.dropout: lambda input, p, train: functional.dropout(input, p, train),
        from_torch.dropout_: lambda input, p, train: functional.dropout(input, p, train, True),
        from_torch.batch_norm: _batch_norm,
        torch.layer_norm: _without("cudnn_enable", functional.layer_norm),
        torch.group_norm: _without("cudnn_enabled", functional.group_norm),
        torch.rms_norm: functional.rms_norm,
        inner.adaptive_avg_pool2d: functional.adaptive_avg_pool2d,
        inner.adaptive_avg_pool3d: functional.adaptive_avg_pool3d,
    }
    if recompute:
        table[torchs.scaled_dot_product_attention] = attention
    _add_arithmetic(table, own, recompute)
    for name in _activation.__all__:
        function = getattr(own, name)
        for place in (torch, torch.Tensor, inner):
            if place is inner and name == "elu":  # has more options there
                continue
            if hasattr(place, name):
                table[getattr(place, name)] = function
            if hasattr(place, name + "_") and "inplace" in inspect.signature(function).parameters:
                table[getattr(place, name + "_")] = _inplace(function)
    for name, home in (("max_pool1d", torch), ("max_pool2d", inner), ("max_pool3d", inner)):
        pool = getattr(own, name)
        table[getattr(from_torch, name)] = pool
        for place in (torch.nn.functional, home):
            table[getattr(place, name + "_with_indices")] = _with_indices(pool)
    return {torchs: _C.redirect(torchs, function) for torchs, function in table.items()}


TABLES: Mapping[str | None, Mapping[Any, Callable[..., Any]]] = {
    None: _table(),
    "cheap": _table(recompute=True),
    "products": _table(recompute=True, runs_again=True),
}
FUNCTIONS = frozenset([*TABLES[None], torch.nn.functional.scaled_dot_product_attention])
"""The functions of torch for which a region is worth it."""

_WITH_OTHERS = frozenset(
    "gelu silu hardswish softplus elu sigmoid tanh mish mul multiply rmul".split()  # noqa: SIM905
)
SAVING_ALONE = frozenset(
    [*(each for each in FUNCTIONS if each.__name__.strip("_") not in _WITH_OTHERS), SHARED_OUTPUT]
)
"""What makes a region worth it where nothing runs again: functions that keep less by themselves,
and others, which keep as much as torch's, where they let the layer before keep less."""

_C.set_saving_mode(Saving)  # brim's own operators need not pass through it
