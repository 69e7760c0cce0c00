"""Types of the decorators: what an editor shows of a decorated function or method.

A function takes what brim passes first; a method takes the instance before it. Typing needs both
said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar, overload

import torch

from brim._C import AdaptiveFunction

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class BatchDecorator(Protocol):
    """`function(size, ...)` is called as `function(...)`."""

    @overload
    def __call__(self, function: Callable[Concatenate[int, P], R], /) -> AdaptiveFunction[P, R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, int, P], R], /
    ) -> AdaptiveFunction[Concatenate[S, P], R]: ...


class RangeDecorator(Protocol):
    """`function(start, end, ...)` is called as it is, for the whole range."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[int, int, P], object], /
    ) -> AdaptiveFunction[Concatenate[int, int, P], None]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, int, int, P], object], /
    ) -> AdaptiveFunction[Concatenate[S, int, int, P], None]: ...


class CollectingRangeDecorator(Protocol):
    """The same, and returns what the function returned for each part."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[int, int, P], R], /
    ) -> AdaptiveFunction[Concatenate[int, int, P], list[R]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, int, int, P], R], /
    ) -> AdaptiveFunction[Concatenate[S, int, int, P], list[R]]: ...


class ChunkedDecorator(Protocol):
    """`function(chunk, start, end, ...)` is called as `function(tensor, ...)`."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[torch.Tensor, int, int, P], object], /
    ) -> AdaptiveFunction[Concatenate[torch.Tensor, P], None]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, torch.Tensor, int, int, P], object], /
    ) -> AdaptiveFunction[Concatenate[S, torch.Tensor, P], None]: ...


class CollectingChunkedDecorator(Protocol):
    """The same, and returns what the function returned for each chunk."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[torch.Tensor, int, int, P], R], /
    ) -> AdaptiveFunction[Concatenate[torch.Tensor, P], list[R]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, torch.Tensor, int, int, P], R], /
    ) -> AdaptiveFunction[Concatenate[S, torch.Tensor, P], list[R]]: ...
