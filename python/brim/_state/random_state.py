"""The random state of torch, NumPy and `random`."""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


class RandomState:
    """The state of all generators when this was made: the CPU's, and those of accelerators in use.

    Example:
        >>> state = RandomState()
        >>> first = torch.rand(1)
        >>> state.put_back()
        >>> torch.equal(torch.rand(1), first)
        True
    """

    def __init__(self) -> None:
        """Remember it."""
        self._put_back: list[Callable[[], object]] = [
            functools.partial(random.setstate, random.getstate())
        ]
        accelerator: Any = torch.get_device_module()
        # Deep copies do not count as memory in use: torch's default allocator makes them. Without
        # modes: among fake tensors too, the state is a real one.
        with _disable_current_modes():
            state = copy.deepcopy(torch.get_rng_state())
            self._put_back.append(functools.partial(torch.set_rng_state, state))
            if hasattr(accelerator, "get_rng_state_all") and accelerator.is_initialized():
                states = copy.deepcopy(accelerator.get_rng_state_all())
                self._put_back.append(functools.partial(accelerator.set_rng_state_all, states))
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None:
            self._put_back.append(functools.partial(numpy.set_state, numpy.get_state()))

    def put_back(self) -> None:
        """Set all generators to it again."""
        with _disable_current_modes():
            for put_back in self._put_back:
                put_back()
