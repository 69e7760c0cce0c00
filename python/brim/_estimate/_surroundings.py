"""What a call can change for the whole process or thread, and finds again after a trace."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from brim._state.kept import Kept
from brim._state.random_state import RandomState
from brim._state.undoing import MISSING, Undoing, undo_modes

_Setting = tuple[Callable[[], Any], Callable[[Any], object]]  # reads it, and writes it

# Properties of torch's modules, which read and write settings of C++.
_PROPERTIES = {
    "backends.cudnn": "enabled benchmark benchmark_limit deterministic allow_tf32",
    "backends.cuda.matmul": """
        allow_tf32 allow_fp16_reduced_precision_reduction allow_bf16_reduced_precision_reduction
        allow_fp16_accumulation
    """,
    "backends.mkldnn": "enabled deterministic allow_tf32",
    "backends.opt_einsum": "enabled strategy",
    "utils.deterministic": "fill_uninitialized_memory",
    "utils._device": "CURRENT_DEVICE",
    "_tensor_str.PRINT_OPTS": "precision threshold edgeitems linewidth sci_mode",
}
_SDP = ("flash", "mem_efficient", "math", "cudnn")  # kernels of attention


def keep_surroundings(undo: Undoing, kept: Kept) -> None:
    """Note what is set now for the process and for the calling thread.

    Args:
        undo: puts settings back where they differ by then.
        kept: puts containers back, such as hooks of all modules.
    """
    for read, write in _settings():
        before = _read(read)
        if before is not MISSING:
            undo.callback(functools.partial(_write, read, write, before))
    undo.callback(RandomState().put_back)
    for holder in (torch_module, torch_optimizer):
        for name, value in vars(holder).items():
            if name.startswith("_global_") and isinstance(value, dict):
                kept.keep(value)


def keep_thread(undo: Undoing) -> None:
    """Note what torch keeps of the calling thread's modes beside the modes themselves."""
    undo_modes(undo)
    lifts = torch._C._only_lift_cpu_tensors()
    undo.callback(functools.partial(torch._C._set_only_lift_cpu_tensors, lifts))
    # Casts refer to tensors of the trace, and torch puts no tensor back that C++ refers to.
    undo.callback(torch.clear_autocast_cache)


def _settings() -> Iterator[_Setting]:
    yield torch.get_default_dtype, torch.set_default_dtype
    yield torch.get_num_threads, torch.set_num_threads
    yield torch.is_warn_always_enabled, torch.set_warn_always
    yield torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    yield torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    yield _anomaly_mode, lambda mode: torch.set_anomaly_enabled(*mode)
    yield (
        lambda: getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        lambda context: setattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", context),
    )
    yield torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled
    for kernel in _SDP:
        yield (
            getattr(torch.backends.cuda, f"{kernel}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp"),
        )
    for place, names in _PROPERTIES.items():
        holder = functools.reduce(getattr, place.split("."), torch)
        for name in names.split():
            yield functools.partial(getattr, holder, name), functools.partial(setattr, holder, name)
    yield lambda: dict(os.environ), _set_environment
    yield os.getcwd, os.chdir
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield torch.cuda.current_device, torch.cuda.set_device


def _anomaly_mode() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (AttributeError, RuntimeError, OSError):  # another version of torch; no such folder
        return MISSING


def _write(read: Callable[[], Any], write: Callable[[Any], object], before: Any) -> None:
    if _read(read) != before:
        write(before)
