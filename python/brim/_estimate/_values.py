"""Values of small tensors in a trace: those that no fake tensor went into are computed for real.

Code that decides by such a value (a random number against a layer's probability, the lengths of
sequences) takes the way that the call itself would take.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from brim import _C
from brim.memory import is_out_of_memory

_MOST = 1 << 12  # elements that are computed
_MOST_WHOLE = 1 << 18  # of whole numbers: masks, and what lengths are taken from
_NAME = "brim_value"  # of the attribute of a fake tensor
_FIXED = "brim_fixed"  # whether the values are the caller's own


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= (_MOST if tensor.is_floating_point() else _MOST_WHOLE)


def give_value(fake: torch.Tensor, value: torch.Tensor) -> None:
    """Say what a fake tensor's elements are. Operators that write to it write to them."""
    vars(fake)[_NAME] = value


def give_input(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Say what the elements of a tensor are that exists outside of the trace.

    Step counters, lengths and masks are asked for, so numbers with a fraction are left out.
    """
    if real.device.type == "cpu" and (real.dim() == 0 or not real.is_floating_point()):
        is_own = real.numel() <= _MOST
        value = real.detach()
        give_value(fake, value.clone() if is_own else value)
        vars(fake)[_FIXED] = not is_own


class Values:
    """Computes what can be computed of the operators of a trace."""

    def __init__(self) -> None:
        self._spoilt: dict[int, torch.UntypedStorage] = {}  # overwritten by what is not known
        self.draws = False  # whether random numbers are among them

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, if they are known."""
        value = vars(tensor).get(_NAME) if isinstance(tensor, FakeTensor) else tensor
        if value is None or value.untyped_storage()._cdata in self._spoilt:
            return None
        return value if value.device.type == "cpu" else None

    def result(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Any:
        """What an operator returns for real; the ellipsis if it depends on what is not known.

        Args:
            func: the operator.
            args: its arguments.
            kwargs: its keyword arguments.
            inputs: the tensors among them.
        """
        if kwargs.get("generator") is not None:  # whoever gave it goes on with it
            return ...
        for tensor in inputs:
            if self.of(tensor) is None:
                return ...
        if any(vars(tensor).get(_FIXED) for tensor in _written(func, args, kwargs)):
            return ...
        args, kwargs = tree_map_only(torch.Tensor, self.of, (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        with torch._C._DisableTorchDispatch():
            try:
                found = func(*args, **kwargs)
            except Exception as error:  # the CPU has no such kernel, or the call itself will fail
                if is_out_of_memory(error):
                    raise
                return ...
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        return found

    def follow(
        self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], outputs: list[Any]
    ) -> None:
        """Compute the values of an operator's outputs, or note that they are not known.

        Args:
            func: the operator, which ran on fake tensors.
            args: its arguments.
            kwargs: its keyword arguments.
            inputs: the tensors among them.
            outputs: the tensors that it returned.
        """
        is_mutable = func._schema.is_mutable
        if all(map(_is_small, outputs)) and (outputs or is_mutable):
            found = self.result(func, args, kwargs, inputs)
            values = _C.tensors_of(found)
            if found is not ... and len(values) == len(outputs):
                for output, value in zip(outputs, values, strict=True):
                    give_value(output, value)
                return
        for tensor in _written(func, args, kwargs) if is_mutable else ():
            known = self.of(tensor)
            if known is not None:
                storage = known.untyped_storage()
                self._spoilt[storage._cdata] = storage


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator writes to."""
    found: list[torch.Tensor] = []
    for place, name in _written_arguments(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        found += [value] if isinstance(value, torch.Tensor) else value or []
    return found


@functools.cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    return [
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
