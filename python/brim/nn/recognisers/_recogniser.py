"""What a recogniser is, and how it compares what a module computes with what brim computes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from brim._state.undoing import Undoing, undo_modes
from brim.memory import is_out_of_memory
from brim.nn._derived import Forward, Kind, Options, code_of
from brim.nn.saving import pause

__all__ = [
    "Recogniser",
    "agree",
    "names_in",
    "numbers",
    "saved_bytes",
    "small_copy",
    "undisturbed",
    "words",
]

Result = TypeVar("Result")


@dataclass(frozen=True)
class Recogniser:
    """One kind of module that brim knows.

    Attributes:
        what: its name in reports; "{0}" stands for the first of the options.
        candidates: for a module that looks like one, by its attributes and the names in its code,
            what `forward` needs to know; several where the code does not tell.
        forward: what brim's modules run, from the class and one of the candidates. It takes `self`
            and one input, and calls the class's own forward for what it does not know.
            `self._brim_recompute` is what `convert` was given as `recompute`.
        agrees: whether both forwards do the same, on small inputs; called once for each class and
            candidate.
        by_results: the comparison alone decides, so a module that differs is not reported.
    """

    what: str
    candidates: Callable[[torch.nn.Module], Iterable[Options]]
    forward: Callable[[Kind, Options], Forward]
    agrees: Callable[[torch.nn.Module, Forward, Options], bool]
    by_results: bool = False


def words(text: str) -> frozenset[str]:
    """The words of a text, for a closed set of names."""
    return frozenset(text.split())


def names_in(kind: Kind, *methods: str) -> frozenset[str]:
    """The names that methods of a class use: attributes, globals and what they import."""
    codes = [code_of(getattr(kind, name)) for name in methods if hasattr(kind, name)]
    return frozenset(name for code in codes if code is not None for name in code.co_names)


def small_copy(
    module: torch.nn.Module,
    parameters: Mapping[str, Tensor | None] | None = None,
    modules: Mapping[str, torch.nn.Module] | None = None,
    **attributes: Any,
) -> torch.nn.Module:
    """A module of the same class and attributes with other parameters and children, without hooks.

    The module itself is not touched, however large it is and wherever it is.
    """
    copy: torch.nn.Module = object.__new__(type(module))
    empty = torch.nn.Module()
    copy.__dict__.update(module.__dict__)
    copy.__dict__.update(empty.__dict__)
    copy.__dict__.update(attributes)
    copy.__dict__.update(training=module.training, _brim_recompute=None)
    for name, value in (parameters or {}).items():
        copy._parameters[name] = None if value is None else torch.nn.Parameter(value)
    copy._modules.update(modules or {})
    return copy


def numbers(*sizes: int, scale: float = 4.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers between -scale and scale without an order, the same each time."""
    count = torch.arange(torch.Size(sizes).numel(), dtype=torch.float64, device="cpu")
    values = torch.sin(count * 12.9898 + 1.0) * 43758.5453
    return ((values - values.floor()) * 2 - 1).mul(scale).reshape(sizes).to(dtype)


def agree(
    module: torch.nn.Module,
    ours: Forward,
    inputs: Iterable[Tensor],
    exact: bool = True,
) -> bool:
    """Whether `ours` gives the values and gradients of the forward of a module's class.

    Both in training and in eval mode.

    Args:
        module: a small copy; the gradients of its parameters and its buffers are compared too.
        ours: the other forward.
        inputs: one call each.
        exact: bit for bit; else within the rounding of a sum in another order, and in 16 bits with
            few elements that differ.
    """
    theirs = type(module).forward
    for given, module.training in itertools.product(inputs, (True, False)):
        try:
            expected = _results(theirs, module, given)
            results = _results(ours, module, given)
        except Exception as error:  # it is not what it looks like
            if is_out_of_memory(error):
                raise
            return False
        pairs = list(zip(results, expected, strict=True))
        if not all(_same(mine, other, exact) for mine, other in pairs):
            return False
    return True


def saved_bytes(module: torch.nn.Module, forward: Forward) -> int:
    """Bytes that a forward of one input keeps for backward."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(module, numbers(64).requires_grad_())
    del output
    return sum(kept.values())


def undisturbed(work: Callable[[], Result]) -> Result:
    """Run a comparison: what the program has switched on is off, and the random state stays."""
    with Undoing() as undo:
        undo_modes(undo)
        pause(undo)
        state = torch.get_rng_state()
        undo.callback(functools.partial(torch.set_rng_state, state))
        # Not torch.autocast, whose count of nested regions an interrupt could leave too high.
        torch.set_autocast_enabled("cpu", False)
        with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
            return work()


def _results(forward: Forward, module: torch.nn.Module, given: Tensor) -> list[Tensor | None]:
    """The output, the input and the buffers afterwards, and the gradients."""
    before = {buffer: buffer.clone() for buffer in module.buffers()}
    torch.manual_seed(0)
    leaf = given.clone().requires_grad_()
    x = leaf.clone()
    y = forward(module, x)
    leaves = [leaf, *module.parameters()]
    cotangent = numbers(*y.shape, scale=1.0, dtype=y.dtype)
    grads = torch.autograd.grad(y, leaves, cotangent, allow_unused=True)
    after = [buffer.clone() for buffer in before]
    for buffer, value in before.items():
        buffer.copy_(value)
    return [y.detach(), x.detach(), *after, *grads]


def _same(mine: Tensor | None, other: Tensor | None, exact: bool) -> bool:
    if mine is None or other is None:
        return mine is other
    if mine.shape != other.shape or mine.dtype != other.dtype:
        return False
    if exact:
        return torch.equal(mine.nan_to_num(7.0), other.nan_to_num(7.0))
    if mine.dtype.itemsize == 2:  # one rounding more or less would change every third element
        few = (mine != other).sum() <= 0.02 * mine.numel() + 1
        return bool(few) and torch.allclose(mine, other, rtol=2e-2, atol=1e-2)
    return torch.allclose(mine, other, rtol=1e-4, atol=1e-5)
