"""What a traced call does in other threads: a trace follows one."""

from __future__ import annotations

import threading
import types
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from brim import _C
from brim._estimate._backward import backward_now
from brim._estimate._errors import EstimateError
from brim._estimate._places import current_line
from brim._state.undoing import Undoing, set_attribute
from brim._warn import warn


class OneThread(FakeTensorMode):  # type: ignore[no-untyped-call]
    """The mode of fake tensors, made on the traced thread; notes that another one uses them."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.cache_enabled = False  # `Tracer` has one that takes less time
        self._thread = threading.get_ident()
        self._elsewhere = ""
        self.answer = super().__torch_dispatch__
        vars(self)["__torch_dispatch__"] = types.MethodType(_C.dispatch, self)

    def handle(self, func: Any, kinds: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on fake tensors."""
        elsewhere = threading.get_ident() != self._thread
        # Backward is followed: autograd's engine has a thread for each device.
        if elsewhere and backward_now() == -1:
            self._elsewhere = self._elsewhere or current_line() or "another thread"
        return self.answer(func, kinds, args, kwargs)

    def may_turn_const(self, t: torch.Tensor) -> bool:
        """Whether torch is to follow values: `Values` does."""
        return False

    def is_here(self) -> bool:
        """Whether the calling thread runs the traced call, or a part of its backward.

        Hooks and functions of torch are the same in all threads: others go on as usual.
        """
        return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is self

    def watch_starts(self, undo: Undoing) -> None:
        """Warn if the call starts a thread."""
        real = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            # Libraries use daemons in the background, as for progress bars.
            if threading.get_ident() == self._thread and not thread.daemon:
                warn(
                    f"the call starts a thread at {current_line()}: what is allocated there is "
                    "not part of the estimate"
                )
            real(thread)

        set_attribute(undo, threading.Thread, "start", start)

    def check_alone(self, error: Exception | None = None) -> None:
        """Raise if other threads worked with fake tensors.

        At the end: code that waits for a thread must not wait for one that raised.
        """
        if self._elsewhere:
            raise EstimateError(
                f"{self._elsewhere}: runs in another thread, and only the thread that called "
                "brim.estimate is followed. Estimate a function that does the work itself"
            ) from error
