"""Adaptive execution on a CUDA device, under a cap that makes running out of memory cheap."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import brim

from .patience import FOR_EVER

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 2**20
BUDGET = 4096 * MIB  # large beside the 20 MiB in which torch takes memory for small requests


def knn(x: torch.Tensor, y: torch.Tensor, batch_size: int) -> torch.Tensor:
    parts = [
        torch.cdist(part, y).topk(3, dim=1, largest=False).indices for part in x.split(batch_size)
    ]
    return torch.cat(parts)


@pytest.fixture
def points() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    brim.release_cached("cuda")
    x = torch.rand(32768, 64, device="cuda")
    y = torch.rand(65536, 64, device="cuda")
    knn(x[:64], y, 32)  # workspaces of the libraries, once
    return x, y


def largest(x: torch.Tensor, y: torch.Tensor) -> int:
    low, high = 1, x.shape[0]
    while low < high:
        middle = (low + high + 1) // 2
        try:
            knn(x, y, middle)
            low = middle
        except torch.OutOfMemoryError:
            high = middle - 1
        brim.release_cached("cuda")
    return low


def test_is_no_worse_than_halving_and_then_nearly_at_the_largest_size(
    points: tuple[torch.Tensor, torch.Tensor],
) -> None:
    x, y = points
    expected = knn(x, y, 512)
    with brim.budget(brim.memory_stats("cuda").allocated + BUDGET, device="cuda"):
        most = largest(x, y)
        assert most < x.shape[0], "the budget is too large for this test"
        adaptive = brim.maximize("batch_size")(knn)
        result, attempts = adaptive.record(x, y, batch_size=x.shape[0])
        assert torch.equal(result, expected)
        halvings = next(n for n in range(20) if x.shape[0] >> n <= most)
        assert len(attempts) <= halvings + 2
        assert attempts[-1].size >= x.shape[0] >> halvings
        for _ in range(2):
            _, attempts = adaptive.record(x, y, batch_size=x.shape[0])
        assert attempts[-1].size >= 0.97 * most


def test_chunked_does_not_run_out_of_memory(points: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = points
    expected = knn(x, y, 512)
    out = torch.empty_like(expected)

    @brim.chunked(x.shape[0])
    def fill(chunk: torch.Tensor, start: int, end: int) -> None:
        out[start:end] = torch.cdist(chunk, y).topk(3, dim=1, largest=False).indices

    with brim.budget(brim.memory_stats("cuda").allocated + BUDGET, device="cuda"):
        _, attempts = fill.record(x)
    assert torch.equal(out, expected)
    assert all(attempt.fitted for attempt in attempts)


def test_random_state_of_the_device_is_put_back() -> None:
    x = torch.ones(1024, 1024, device="cuda")

    def work(size: int, fail_above: int) -> torch.Tensor:
        result = torch.nn.functional.dropout(x, 0.5) * torch.rand(1, device="cuda")
        if size > fail_above:
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        return result

    torch.cuda.manual_seed(3)
    undisturbed = brim.batch(8)(work)(8)
    torch.cuda.manual_seed(3)
    repeated, attempts = brim.batch(8)(work).record(2)
    assert len(attempts) > 1
    assert torch.equal(undisturbed, repeated)


def test_random_state_of_a_device_that_is_not_current_is_put_back() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    seen: list[torch.Tensor] = []

    @brim.batch(2)
    def work(size: int) -> None:
        seen.append(torch.rand(4, device="cuda:1").cpu())
        if size > 1:
            torch.empty(2**50, dtype=torch.uint8, device="cuda")

    work()
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_reseeding_inside_a_failed_try_is_undone() -> None:
    seen: list[torch.Tensor] = []
    torch.cuda.manual_seed(5)
    torch.rand(3, device="cuda")

    @brim.batch(2)
    def work(size: int) -> None:
        seen.append(torch.rand(4, device="cuda").cpu())
        torch.cuda.manual_seed(6)
        if size > 1:
            torch.empty(2**50, dtype=torch.uint8, device="cuda")

    work()
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_a_call_that_fits_may_be_captured_in_a_graph() -> None:
    x = torch.ones(64, device="cuda")
    work = brim.batch(8)(lambda size: torch.nn.functional.dropout(x, 0.5) * size)
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    graph.replay()
    first = out.clone()
    graph.replay()
    assert set(first.unique().tolist()) == {0.0, 16.0}
    assert not torch.equal(first, out)


def test_work_on_the_cpu_goes_on_in_a_process_forked_from_one_that_uses_cuda() -> None:
    script = """
import os, warnings, torch, brim
warnings.simplefilter("ignore")
work = brim.maximize("n")(lambda n: torch.rand(n).numel())
torch.ones(1, device="cuda")
if {called_before}:
    work(3)
if os.fork() == 0:
    assert brim.default_device() == torch.device("cpu")
    assert work(5) == 5
    brim.chunked(2)(lambda chunk, start, end: None)(torch.zeros(8))
    with brim.testing.inject_oom(at=1):
        assert work(8) < 8
    try:
        brim.memory_stats("cuda")
    except ValueError as error:
        assert "forked" in str(error)
    else:
        raise AssertionError("the device answered")
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""
    for called_before in (False, True):
        code = script.replace("{called_before}", str(called_before))
        subprocess.run([sys.executable, "-c", code], check=True, timeout=FOR_EVER)


def test_a_failed_attempt_is_gone_before_the_next() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []
    gc.disable()
    try:

        @brim.batch(4)
        def work(size: int) -> None:
            assert all(reference() is None for reference in alive)
            held.append(brim.memory_stats("cuda").allocated)
            mine = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
            alive.append(weakref.ref(mine))
            if size > 1:
                torch.empty(2**50, dtype=torch.uint8, device="cuda")

        work()
    finally:
        gc.enable()
    assert len(held) >= 2
    assert len(set(held)) == 1


def test_a_library_without_workspace_is_tried_again_at_the_same_size() -> None:
    sizes: list[int] = []

    @brim.batch(8)
    def work(size: int) -> None:
        sizes.append(size)
        if len(sizes) == 1:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")

    work()
    assert sizes == [8, 8]


# ---- foresee=True --------------------------------------------------------------------------------

Work = Callable[[int], object]


def training(model: nn.Module, shape: tuple[int, ...]) -> Work:
    model.cuda()
    optimizer = torch.optim.Adam(model.parameters())

    def step(size: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(size, *shape, device="cuda")).square().mean().backward()
        optimizer.step()

    return step


def mlp_step() -> Work:
    layers = (nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU())
    return training(nn.Sequential(*layers, nn.Linear(2048, 10)), (512,))


def cnn_step() -> Work:
    def block(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
        return nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()

    layers = (*block(3, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 128))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return training(nn.Sequential(*layers, *head), (3, 64, 64))


def attention() -> Work:
    project = nn.Linear(256, 3 * 256, device="cuda")

    @torch.no_grad()
    def infer(size: int) -> torch.Tensor:
        x = torch.randn(size, 256, 256, device="cuda")
        query, key, value = project(x).view(size, 256, 3, 8, 32).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(query, key, value)

    return infer


def nearest() -> Work:
    x, y = torch.rand(32768, 64, device="cuda"), torch.rand(65536, 64, device="cuda")
    return lambda size: knn(x, y, size)


# cuDNN chooses among workspaces by what is free, so that later calls with convolutions may fail.
@pytest.mark.parametrize(
    ("make", "later_calls"), [(mlp_step, 3), (cnn_step, 0), (attention, 3), (nearest, 3)]
)
def test_the_first_call_that_is_foreseen_fits_and_is_near_the_largest(
    make: Callable[[], Work], later_calls: int
) -> None:
    torch.manual_seed(0)
    work, upper = make(), 1 << 20
    work(8)  # workspaces of the libraries and the optimizer's state are there from here on
    gc.collect()
    brim.release_cached("cuda")

    def fits(size: int) -> bool:
        try:
            work(size)
        except torch.OutOfMemoryError:
            return False
        finally:
            brim.release_cached("cuda")
        return True

    foreseen = brim.maximize("size", foresee=True)(lambda size: (work(size), size)[1])
    with brim.budget(brim.memory_stats("cuda").allocated + BUDGET, device="cuda"):
        size, attempts = foreseen.record(upper)
        assert [attempt.fitted for attempt in attempts] == [True]
        assert size < upper, "the budget is too large for this test"
        for _ in range(later_calls):
            _, attempts = foreseen.record(upper)
            assert all(attempt.fitted for attempt in attempts)
        assert not fits(int(size / 0.97) + 1)
