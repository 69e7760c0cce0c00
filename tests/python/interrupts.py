"""Interrupts at chosen places of the code, and what they must not leave behind."""

from __future__ import annotations

import contextvars
import dis
import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.utils import _python_dispatch

import brim
from brim import _C
from brim.nn.saving import hooks_in_force

BRIM = str(Path(brim.__file__).resolve().parent)
HERE = Path(__file__).resolve().parent
TESTS = (str(HERE / "test_"), str(HERE / "interrupt_cases"))
# Where torch takes and returns what brim uses: where brim calls it, an interrupt is brim's matter.
OTHERS = tuple(
    str(Path(each))
    for each in (
        "torch/overrides.py",
        "torch/utils/_python_dispatch.py",
        "torch/autograd/graph.py",
        "torch/autograd/grad_mode.py",
        "torch/amp/autocast_mode.py",
        "torch/random.py",
    )
)
RUNS = 2
#: Functions that take something or put it back.
CRITICAL = frozenset(
    [
        *("__enter__", "__exit__", "put_back", "_put_back", "pause", "_refill"),
        *("_set_buffers", "_set_class", "_leave", "_return", "take_in", "leave_out"),
    ]
)


class Interrupt:
    """Raises KeyboardInterrupt before the n-th line that runs in brim's code; counts the lines.

    `critical` has the numbers of those in functions that take or put back something. The first runs
    of a line count, not those of every turn of a loop. One kind of line is left out:
    a `with` block that ends is one more line for tracing, but no place where CPython looks for
    signals.
    """

    def __init__(self, at: int = 0) -> None:
        self.lines = 0
        self.critical: list[int] = []
        self.place = ""  # where it was raised
        self._at = at
        self._seen: Counter[tuple[int, int]] = Counter()

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_name == "__del__":  # Python drops what is raised there
            return None
        caller: FrameType | None = frame
        kind = _kind_of(frame.f_code)
        while kind == "torch" and caller is not None:
            caller = caller.f_back
            kind = caller and _kind_of(caller.f_code)
            if kind == "test":
                kind = None
        return self._line if kind else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and not _ends_a_block(frame):
            place = (id(frame.f_code), frame.f_lineno)
            self._seen[place] += 1
            if self._seen[place] <= RUNS:
                self.lines += 1
                if frame.f_code.co_name in CRITICAL:
                    self.critical.append(self.lines)
                if self.lines == self._at:
                    self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                    raise KeyboardInterrupt(self.place)
            elif frame.f_code.co_name in ("<listcomp>", "<genexpr>"):
                frame.f_trace_lines = False  # it may go over all objects of the process
        return self._line


# By id, since a code object is hashed anew each time; each entry keeps its code object alive.
_kinds: dict[int, tuple[CodeType, str | None]] = {}
_ends: dict[tuple[int, int], bool] = {}


def _kind_of(code: CodeType) -> str | None:
    """Whose code it is: "brim", a "test", what brim uses of "torch", or None for any other."""
    known = _kinds.get(id(code))
    if known is None:
        file = str(Path(code.co_filename).resolve())
        kind = "test" if file.startswith(TESTS) else "brim" if file.startswith(BRIM) else None
        known = _kinds[id(code)] = code, "torch" if code.co_filename.endswith(OTHERS) else kind
    return known[1]


def _ends_a_block(frame: FrameType) -> bool:
    """Whether what comes next is the call of `__exit__`, with None three times or with an error."""
    place = (id(frame.f_code), frame.f_lasti)
    if place not in _ends:
        _ends[place] = _calls_exit(frame.f_code, frame.f_lasti)
    return _ends[place]


def _calls_exit(code: CodeType, at: int) -> bool:
    coming = [dis.opname[each] for each in code.co_code[at : at + 4 : 2]]
    if "WITH_EXCEPT_START" in coming[:1] or coming == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]:
        return True
    while dis.opname[code.co_code[at]] in ("POP_BLOCK", "SWAP", "ROT_TWO"):  # `return` in a block
        at += 2
    operations = [dis.opname[each] for each in code.co_code[at : at + 6 : 2]]
    if operations not in (["LOAD_CONST"] * 3, ["LOAD_CONST", "DUP_TOP", "DUP_TOP"]):
        return False
    constants = {code.co_consts[each] for each in code.co_code[at + 1 : at + 6 : 2]}
    return constants == {None} or operations[1] == "DUP_TOP"


def state_of_process() -> dict[str, Any]:
    """What an interrupted call must leave as it was, by name."""
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return {
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "notes of modes": [
            value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")
        ],
        "saved-tensor hooks": hooks_in_force(),
        "gradients are recorded": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "type of autocast": torch.get_autocast_dtype("cpu"),
        "nested autocast regions": nesting,
        "limit": brim.memory_stats("cpu").limit,
        "oneDNN": torch._C._get_mkldnn_enabled(),
        "default type": torch.get_default_dtype(),
        "threads of torch": torch.get_num_threads(),
        "threads": threading.active_count(),
        "the block that explains": _C.explained_block(),
        "garbage is collected": gc.isenabled(),
        "hook of errors": sys.excepthook,
        "handlers of signals": [signal.getsignal(each) for each in signal.valid_signals()],
        "anomaly mode": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "regions": _C.region_state(),
        "streams": (id(sys.stdout), id(sys.stderr), id(sys.stdin)),
        "arguments": list(sys.argv),
        "path of imports": list(sys.path),
        "files as modules": [id(sys.modules.get(name)) for name in ("__main__", "__brim_file__")],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "filters of warnings": list(warnings.filters),
        "variables": variables_that_are_on(),
        "logs": [(each.level, each.disabled, list(each.handlers)) for each in _loggers()],
        "pictures": pictures(),
    }


def variables_that_are_on() -> dict[str, Any]:
    context = contextvars.copy_context()
    return {var.name: value for var, value in context.items() if "brim" in var.name and value}


def _loggers() -> list[logging.Logger]:
    return [logging.getLogger(name) for name in (None, "brim")]


def pictures() -> Any:
    """Matplotlib's settings and windows, if it is there."""
    matplotlib = sys.modules.get("matplotlib")
    if matplotlib is None:
        return None
    pyplot = sys.modules.get("matplotlib.pyplot")
    settings = dict(dict.items(matplotlib.rcParams))  # to look by name would import pyplot
    return settings, pyplot and pyplot.get_fignums()


def random_state() -> dict[str, Any]:
    return {
        "torch's random state": torch.get_rng_state().tolist(),
        "NumPy's random state": np.random.get_state()[1].tolist(),  # type: ignore[index]
        "Python's random state": random.getstate(),
    }


def state_of_module(model: torch.nn.Module) -> dict[str, Any]:
    """Classes, attributes, hooks, parameters and gradients of all modules."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        state[f"class of {name!r}"] = type(module)
        for key, value in vars(module).items():
            shown: Any = sorted(value) if isinstance(value, set) else id(value)
            if isinstance(value, dict):
                shown = {part: id(each) for part, each in value.items()}
            state[f"{key} of {name!r}"] = shown
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        state[f"values of {name}"] = (type(tensor), tensor.requires_grad, tensor.tolist())
        state[f"gradient of {name}"] = None if tensor.grad is None else tensor.grad.tolist()
    return state


@dataclass
class Case:
    """A public call.

    Attributes:
        call: makes it; the same object each time.
        result: of a call, to compare.
        leaves: what else it must leave as it is.
    """

    call: Callable[[], Any]
    result: Callable[[Any], Any] = lambda value: value
    leaves: Callable[[], dict[str, Any]] = dict


def lines_of(made: Case) -> tuple[Interrupt, Any]:
    """The lines of a call, once what is learned or cached by the first is there."""
    made.call()
    with Interrupt() as counted:
        result = made.result(made.call())
    return counted, result


def interrupted(case: Case, at: int) -> str:
    """Interrupts a call, and says where; checks what is left, and that the next call is right."""
    before = {**state_of_process(), **case.leaves()}
    interrupt, place = Interrupt(at), ""
    # Python drops what is raised in the callback of a weak reference. pytest would hold it.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings(), interrupt:
            warnings.filterwarnings("ignore", ".* was never entered")  # a budget, as it should
            case.call()
    except KeyboardInterrupt:
        place = interrupt.place or "somewhere"
    finally:
        sys.unraisablehook = hook
    after = {**state_of_process(), **case.leaves()}
    changed = {
        name: (before.get(name), after.get(name))
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name)
    }
    assert not changed, f"interrupted at {place} (line {at}): {changed}"
    return place
