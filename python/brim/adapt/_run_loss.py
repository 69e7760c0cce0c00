"""The loss of a batch whose backward has run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


class RunLoss(torch.Tensor):
    """A tensor that says in one sentence why there is nothing to call backward on.

    What is computed from it alone, such as `loss / 4`, is one too. It is saved as a plain tensor.
    """

    @staticmethod
    def of(loss: torch.Tensor) -> torch.Tensor:
        """The same values."""
        return loss.as_subclass(RunLoss)

    def backward(self, *_: Any, **__: Any) -> None:
        """Raise."""
        raise RuntimeError(
            "Microbatches has called backward already, on each part of the batch: the gradients "
            "are in .grad, so leave loss.backward() out"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a plain tensor, which can be loaded everywhere."""
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """The same."""
        return RunLoss.of(_plain(self).clone())

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the function on plain tensors."""
        result = func(*map(_plain, args), **{k: _plain(v) for k, v in (kwargs or {}).items()})
        is_new = type(result) is torch.Tensor and all(result is not each for each in args)
        if is_new and result.ndim == 0 and not result.requires_grad and len(args) > 0:
            return RunLoss.of(result) if result.is_floating_point() else result
        return result


def _plain(value: Any) -> Any:
    if isinstance(value, RunLoss):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(torch.Tensor)
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value
