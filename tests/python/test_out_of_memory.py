"""Telling out-of-memory errors from others, and their way through C++, autograd and callbacks."""

from __future__ import annotations

import errno
import gc
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import brim
from brim import _C, OomKind

GIB = 2**30

CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.10 GiB of "
    "which 1.50 GiB is free."
)


def accelerator_error(code: int | None, text: str) -> Exception:
    error = torch.AcceleratorError(text)
    if code is not None:
        error.error_code = code
    return error


# The table of docs/explanation/memory.md: exception, kind, device, bytes asked for.
KNOWN = {
    "CUDA allocator": (
        torch.OutOfMemoryError(CUDA_TEXT),
        OomKind.device_memory,
        "cuda:1",
        2 * GIB,
    ),
    "HIP allocator": (
        torch.OutOfMemoryError("HIP out of memory. Tried to allocate 20.00 MiB."),
        OomKind.device_memory,
        "cuda",
        20 * 2**20,
    ),
    "XPU allocator": (
        torch.OutOfMemoryError(
            "XPU out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 48.00 GiB"
        ),
        OomKind.device_memory,
        "xpu:0",
        GIB,
    ),
    "unknown allocator": (torch.OutOfMemoryError("no room"), OomKind.device_memory, None, None),
    "CUDA runtime": (
        accelerator_error(2, "CUDA error: out of memory\nCUDA kernel errors might be reported"),
        OomKind.device_memory,
        "cuda",
        None,
    ),
    "CUDA runtime, code only": (
        accelerator_error(2, "it failed"),
        OomKind.device_memory,
        None,
        None,
    ),
    "CUDA runtime, text only": (
        accelerator_error(None, "CUDA error: out of memory"),
        OomKind.device_memory,
        "cuda",
        None,
    ),
    "cuBLAS": (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        OomKind.library_workspace,
        "cuda",
        None,
    ),
    "cuSOLVER": (
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `create`"),
        OomKind.library_workspace,
        "cuda",
        None,
    ),
    "cuFFT": (
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        OomKind.library_workspace,
        "cuda",
        None,
    ),
    "cuDNN not supported": (
        RuntimeError(
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
            "non-contiguous input."
        ),
        OomKind.library_workspace,
        "cuda",
        None,
    ),
    "cuDNN allocation": (
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
        OomKind.library_workspace,
        "cuda",
        None,
    ),
    "cuDNN engine": (
        RuntimeError("GET was unable to find an engine to execute this computation"),
        OomKind.library_workspace,
        "cuda",
        None,
    ),
    "cuDNN algorithm": (
        RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
        OomKind.library_workspace,
        "cuda",
        None,
    ),
    "NCCL": (
        torch.distributed.DistBackendError(
            "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error\nLast error:\n"
            "Cuda failure 2 'out of memory'"
        ),
        OomKind.device_memory,
        "cuda",
        None,
    ),
    "MPS": (
        RuntimeError(
            "MPS backend out of memory (MPS allocated: 17.15 GB, other allocations: 896.00 KB, "
            "max allowed: 18.13 GB). Tried to allocate 768.00 MB on private pool."
        ),
        OomKind.device_memory,
        "mps",
        768 * 2**20,
    ),
    "MPS buffer": (
        RuntimeError("Invalid buffer size: 12.00 GiB"),
        OomKind.device_memory,
        "mps",
        12 * GIB,
    ),
    "CPU allocator on Linux": (
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 40000000000000 bytes. Error code 12 (Cannot allocate "
            "memory)"
        ),
        OomKind.host_memory,
        "cpu",
        40_000_000_000_000,
    ),
    "CPU allocator on Windows": (
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1024 bytes."),
        OomKind.host_memory,
        "cpu",
        1024,
    ),
    "Python": (MemoryError(), OomKind.host_memory, "cpu", None),
    "NumPy": (
        MemoryError("Unable to allocate 8.00 GiB for an array with shape (1073741824,)"),
        OomKind.host_memory,
        "cpu",
        8 * GIB,
    ),
    "NVML does not answer": (
        RuntimeError(
            'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":'
            "1131, please report a bug to PyTorch. "
        ),
        OomKind.device_memory,
        "cuda",
        None,
    ),
    "CUDA driver under WSL": (
        RuntimeError("CUDA driver error: device not ready"),
        OomKind.device_memory,
        "cuda",
        None,
    ),
    "mmap of shared memory": (
        RuntimeError(
            "unable to mmap 1059061760 bytes from file </torch_16981_2708895375_0>: Cannot "
            "allocate memory (12)"
        ),
        OomKind.host_memory,
        "cpu",
        1059061760,
    ),
    "the system": (
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OomKind.host_memory,
        "cpu",
        None,
    ),
    "a shape beyond 2^63 bytes": (
        RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904, 4]"),
        OomKind.size_limit,
        None,
        None,
    ),
    "size limit": (
        RuntimeError("nonzero is not supported for tensors with more than INT_MAX elements"),
        OomKind.size_limit,
        None,
        None,
    ),
}


class BadTextError(RuntimeError):
    def __str__(self) -> str:
        raise KeyError("no text today")


# Right texts with types that blame the program, and texts that only look right.
NEAR_MISSES = [
    ValueError(CUDA_TEXT),
    TypeError(CUDA_TEXT),
    KeyError("CUDA out of memory."),
    IndexError("CUDA error: out of memory"),
    AttributeError("CUDA out of memory."),
    AssertionError("CUDA out of memory."),
    NotImplementedError(CUDA_TEXT),
    RecursionError("CUDA out of memory."),
    KeyboardInterrupt("CUDA out of memory."),
    StopIteration("CUDA out of memory."),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError("CUDA out of memory."),
    RuntimeError('!handles_.at(i) INTERNAL ASSERT FAILED at "c10/cuda/CUDACachingAllocator.cpp"'),
    RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "c10/cuda/driver_api.cpp"'),
    RuntimeError("CUDA error: device not ready"),
    RuntimeError("unable to mmap 4096 bytes from file </torch_1_2>: Permission denied (13)"),
    FileNotFoundError(errno.ENOENT, "No such file or directory", "out of memory.txt"),
    TimeoutError("out of memory"),
    UserWarning("CUDA out of memory."),
    accelerator_error(700, "CUDA error: an illegal memory access was encountered"),
    accelerator_error(710, "CUDA error: device-side assert triggered"),
    accelerator_error(None, "CUDA error: unspecified launch failure"),
    torch.linalg.LinAlgError("linalg.inv: the matrix is singular"),
    torch.distributed.DistBackendError("NCCL error: remote process exited"),
    RuntimeError(
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle, opa, opb)`"
    ),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("cuFFT error: CUFFT_EXEC_FAILED"),
    RuntimeError("CUDA out of memory handling is disabled"),
    RuntimeError("CUSTOMER_ALLOCATION_FAILED: no seats left"),
    RuntimeError("open file failed, file path: /logs/CUDA out of memory.txt"),
    RuntimeError("out of resource: shared memory, Required: 114688, Hardware limit: 101376"),
    RuntimeError(
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory."
    ),
    RuntimeError("value cannot be converted to type int32_t without overflow"),
    RuntimeError("value is larger than INT_MAX"),
    RuntimeError("Invalid buffer size: must be positive"),
    RuntimeError("we were unable to find an engineer"),
    RuntimeError("out of memory"),
    RuntimeError("Tried to allocate 2.00 GiB"),
    RuntimeError(),
    RuntimeError("cannot open \udc80.pt"),
    BadTextError(),
]


class TestClassify:
    @pytest.mark.parametrize("source", KNOWN)
    def test_recognises(self, source: str) -> None:
        error, kind, device, requested = KNOWN[source]
        cause = brim.classify_error(error)
        assert cause.kind == kind
        assert cause.device == (None if device is None else torch.device(device))
        assert cause.requested == requested
        assert cause
        assert brim.is_out_of_memory(error)

    @pytest.mark.parametrize("error", NEAR_MISSES, ids=lambda e: type(e).__name__)
    def test_lets_near_misses_pass(self, error: BaseException) -> None:
        cause = brim.classify_error(error)
        assert cause.kind == OomKind.none
        assert not cause
        assert (cause.device, cause.requested) == (None, None)
        assert not brim.is_out_of_memory(error)

    def test_tells_the_bytes_in_use(self, held: int) -> None:
        kept = torch.empty(100)
        with (
            brim.budget(held + 1000, device="cpu"),
            pytest.raises(torch.OutOfMemoryError) as caught,
        ):
            torch.empty(1000)
        assert kept.numel() == 100
        assert brim.classify_error(caught.value).in_use == held + 400
        assert brim.classify_error(KeyError()).in_use is None

    def test_figures_are_exact_on_another_thread(self, held: int) -> None:
        def refused() -> torch.OutOfMemoryError:
            with pytest.raises(torch.OutOfMemoryError) as caught:
                torch.empty(2**20 + 3, dtype=torch.uint8)
            return caught.value

        with brim.budget(held + 1000, device="cpu"), ThreadPoolExecutor() as pool:
            there = pool.submit(refused).result()
            assert brim.classify_error(there).requested == 2**20 + 3
            assert brim.classify_error(there).in_use == held
            here = refused()
            cause = pool.submit(brim.classify_error, here).result()
            assert (cause.requested, cause.in_use) == (2**20 + 3, held)

    def test_figures_are_exact_in_backward(self) -> None:
        brim.install_cpu_allocator()
        x = torch.zeros(2**20 + 3, requires_grad=True)
        loss = (x * 2).sum()
        with (
            brim.budget(brim.memory_stats("cpu").allocated + 1000, device="cpu"),
            pytest.raises(torch.OutOfMemoryError) as caught,
        ):
            loss.backward()
        assert brim.classify_error(caught.value).requested == 4 * (2**20 + 3)

    def test_a_subclass_counts_as_its_base(self) -> None:
        class MineError(torch.OutOfMemoryError):
            pass

        class OtherError(MemoryError):
            pass

        assert brim.classify_error(MineError("mine")).kind == OomKind.device_memory
        assert brim.classify_error(OtherError("mine")).kind == OomKind.host_memory

    def test_an_out_of_memory_error_without_readable_text_still_is_one(self) -> None:
        class BrokenError(torch.OutOfMemoryError):
            def __str__(self) -> str:
                raise KeyError

        assert brim.is_out_of_memory(BrokenError())
        assert brim.classify_error(MemoryError("\udc80")).kind == OomKind.host_memory

    @pytest.mark.parametrize("wrong", [None, "CUDA out of memory.", RuntimeError, 5])
    def test_anything_but_an_exception_is_a_type_error(self, wrong: object) -> None:
        with pytest.raises(TypeError, match="error must be an exception"):
            brim.classify_error(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="error must be an exception"):
            brim.is_out_of_memory(wrong)  # type: ignore[arg-type]

    def test_reads_as_text(self) -> None:
        assert repr(brim.classify_error(torch.OutOfMemoryError(CUDA_TEXT))) == (
            "OomCause(device memory, cuda:1, requested 2.00 GiB)"
        )
        assert repr(brim.classify_error(KeyError())) == "OomCause(not out of memory)"

    def test_a_real_numpy_failure(self) -> None:
        with pytest.raises(MemoryError) as caught:
            np.empty(2**60, dtype=np.uint8)
        cause = brim.classify_error(caught.value)
        assert (cause.kind, cause.requested) == (OomKind.host_memory, 2**60)

    def test_a_real_failure_of_the_system(self) -> None:
        brim.install_cpu_allocator()
        with pytest.raises(torch.OutOfMemoryError, match="the system has no more") as caught:
            torch.empty(2**60, dtype=torch.uint8)
        cause = brim.classify_error(caught.value)
        assert cause.kind == OomKind.host_memory
        assert cause.device == torch.device("cpu")
        assert cause.requested == 2**60


class TestWhereItArises:
    """Wherever memory runs out, Python sees torch.OutOfMemoryError."""

    def test_in_an_operator(self) -> None:
        x = torch.ones(100, 100)
        with brim.testing.inject_oom(at=1), pytest.raises(torch.OutOfMemoryError) as caught:
            x @ x
        assert brim.classify_error(caught.value).requested == 100 * 100 * 4

    def test_in_backward(self) -> None:
        x = torch.ones(1000, requires_grad=True)
        loss = (x * x).sum()
        with brim.testing.inject_oom(at=2), pytest.raises(torch.OutOfMemoryError):
            loss.backward(retain_graph=True)
        loss.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, 2))

    def test_in_a_python_autograd_function(self) -> None:
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
                with brim.budget(1, device="cpu"):
                    return grad * 2

        x = torch.ones(1000, requires_grad=True)
        with pytest.raises(torch.OutOfMemoryError):
            Double.apply(x).sum().backward()

    def test_in_a_callback_through_cpp(self) -> None:
        def work() -> None:
            with brim.budget(1, device="cpu"):
                torch.empty(1000)

        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 3\.91 KiB") as caught:
            _C.call_through_cpp(work)
        assert brim.classify_error(caught.value).requested == 4000

    @pytest.mark.parametrize("source", KNOWN)
    def test_every_known_failure_of_a_callback_arrives_as_one_type(self, source: str) -> None:
        error, kind, device, requested = KNOWN[source]

        def work() -> None:
            raise error

        with pytest.raises(torch.OutOfMemoryError) as caught:
            _C.call_through_cpp(work)
        cause = brim.classify_error(caught.value)
        assert (cause.kind, cause.requested) == (kind, requested)
        if cause.device is not None:
            assert str(cause.device) == device

    def test_the_failed_attempt_is_gone(self) -> None:
        seen: list[weakref.ref[torch.Tensor]] = []

        def work() -> None:
            big = torch.ones(1000)
            seen.append(weakref.ref(big))
            torch.empty(1000)

        gc.disable()  # it must go by itself
        try:
            with (
                brim.PeakMeter("cpu") as meter,
                brim.testing.inject_oom(at=2),
                pytest.raises(torch.OutOfMemoryError) as caught,
            ):
                _C.call_through_cpp(work)
            assert seen[0]() is None
            assert meter.left == 0
        finally:
            gc.enable()
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None

    @pytest.mark.parametrize("error", NEAR_MISSES, ids=lambda e: type(e).__name__)
    def test_other_exceptions_pass_untouched(self, error: BaseException) -> None:
        def work() -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            _C.call_through_cpp(work)
        assert caught.value is error
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert frames[-1].name == "work"

    def test_exits_and_interrupts_pass_untouched(self) -> None:
        for error in (KeyboardInterrupt("stop"), SystemExit(3), GeneratorExit()):

            def work(error: BaseException = error) -> None:
                raise error

            with pytest.raises(type(error)) as caught:
                _C.call_through_cpp(work)
            assert caught.value is error

    def test_results_pass_untouched(self) -> None:
        result = object()
        assert _C.call_through_cpp(lambda: result) is result

    def test_what_cannot_be_called_is_a_type_error(self) -> None:
        with pytest.raises(TypeError):
            _C.call_through_cpp(5)  # type: ignore[arg-type]


def test_torch_turns_bad_alloc_into_a_runtime_error_which_counts() -> None:
    cause = brim.classify_error(RuntimeError("std::bad_alloc"))
    assert cause.kind == brim.OomKind.host_memory
    assert cause.device == torch.device("cpu")
    assert not brim.is_out_of_memory(RuntimeError("caught std::bad_alloc in the logger"))
