"""Classes of tensors for the tests that brim's layers work wherever torch's do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils import _pytree as pytree


class Doubled(Tensor):
    """A wrapper that sees every operator of ATen, as torch's own subclasses do: two tensors."""

    a: Tensor
    b: Tensor

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> Doubled:
        made: Doubled = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, a.shape, strides=a.stride(), dtype=a.dtype, device=a.device
        )
        made.a, made.b = a, b
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Doubled({self.a}, {self.b})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], *_: Any) -> Doubled:
        return Doubled(parts["a"], parts["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "aten":
            raise NotImplementedError(f"Doubled knows aten only, not {func}")

        def run(which: str) -> Any:
            def half(t: Any) -> Any:
                return getattr(t, which) if isinstance(t, Doubled) else t

            return func(*pytree.tree_map(half, args), **pytree.tree_map(half, kwargs or {}))

        first, spec = pytree.tree_flatten(run("a"))
        second = pytree.tree_leaves(run("b"))
        both = [
            Doubled(x, y) if isinstance(x, Tensor) else x
            for x, y in zip(first, second, strict=True)
        ]
        if func._schema.name.endswith("_"):  # in place: the object that was given
            return args[0]
        return pytree.tree_unflatten(both, spec)


class Watching(Tensor):
    """Sees torch's functions, by their names, and goes on with what they give."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(Tensor):
    """A subclass without rules of its own."""


class Int8Weight(Tensor):
    """A frozen weight as torchao's weight-only classes: only F.linear knows what to do with it."""

    values: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Int8Weight:
        made: Int8Weight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, dtype=scale.dtype, device=values.device
        )
        made.values, made.scale = values, scale
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Int8Weight({self.values}, {self.scale})"

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            input, weight, *bias = args
            return F.linear(input, weight.values.to(input.dtype) * weight.scale, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        raise NotImplementedError(f"Int8Weight dispatch: {func} is not implemented")


def nested(layout: torch.layout) -> Callable[[Tensor], Tensor]:
    def make(x: Tensor) -> Tensor:
        longer = torch.cat([x, x[:1]]) if x.dim() else x
        return torch.nested.nested_tensor([x, longer], layout=layout)

    return make


def plain(value: Any) -> list[Tensor]:
    """The numbers of a tensor of any kind, in plain dense tensors."""
    if isinstance(value, (tuple, list)):
        return [part for each in value for part in plain(each)]
    if isinstance(value, Doubled):
        return [*plain(value.a), *plain(value.b)]
    if hasattr(value, "full_tensor"):
        return [value.full_tensor()]
    if value.is_nested:
        return list(value.unbind())
    if value.layout is not torch.strided:
        return [value.to_dense()]
    if value.is_quantized:
        return [value.dequantize()]
    return [value.as_subclass(Tensor)]


def summed(parts: Sequence[Tensor]) -> Tensor:
    """One number that every element takes part in with a weight of its own."""
    total = torch.zeros(())
    for part in parts:
        if part.is_complex():
            part = torch.view_as_real(part)
        if part.is_floating_point():
            ramp = torch.linspace(-1, 2, part.numel(), dtype=part.dtype, device=part.device)
            total = total + (part.reshape(-1) * ramp).sum().to(total.device)
    return total
