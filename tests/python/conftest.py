"""What the tests share: hypothesis' settings, the CUDA mark, a watch on what tests leave behind."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

import brim

# No deadline: no test of ours measures time. Derandomised: a run that passes here passes in CI.
hypothesis.settings.register_profile("brim", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("brim")


# Without such a device torch keeps every seed for the day when there is one, with a stack trace:
# a millisecond, some ten thousand times.
for _device in (torch.cuda, torch.xpu, torch.mtia):
    if not _device.is_available():
        _device.manual_seed_all = lambda seed: None

#: All tests in these are slow, and so are their imports.
SLOW_FILES = "test_integrations_lightning*.py"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    left_out = config.option.markexpr == "not slow" and collection_path.match(SLOW_FILES)
    return True if left_out else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _no_budget_is_left_open() -> Iterator[None]:
    gc.collect()  # tensors in the last test's tracebacks must not be freed in the middle of this
    gc.freeze()  # what is alive now is loaded for good; the next collection then takes no time
    before = brim.memory_stats("cpu").limit
    yield
    assert brim.memory_stats("cpu").limit == before


@pytest.fixture
def tensor_of() -> Callable[[int], torch.Tensor]:
    """Makes a CPU tensor of exactly so many bytes."""
    return lambda size: torch.empty(size, dtype=torch.uint8)


@pytest.fixture
def held() -> int:
    """Bytes that CPU tensors hold at the start of the test."""
    brim.install_cpu_allocator()
    return brim.memory_stats("cpu").allocated


@pytest.fixture
def steady_memory(held: int) -> Iterator[None]:
    """A size that failed is tried again when more is free, and on a machine that always varies."""
    with brim.budget(held + 2**26, device="cpu"):
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile has compiled nothing yet."""
    with warnings.catch_warnings():  # some versions of torch use what they deprecate
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.compiler.reset()
    yield
    torch.compiler.reset()
