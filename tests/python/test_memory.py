"""Statistics, meters, budgets and releasing, as Python sees them."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import brim

TensorOf = Callable[[int], torch.Tensor]

MIB = 2**20

UNITS = {
    "": 1,
    "B": 1,
    **{name + "B": 1000**i for i, name in enumerate(["k", "M", "G", "T", "P"], 1)},
    **{name + "iB": 1024**i for i, name in enumerate(["K", "M", "G", "T", "P"], 1)},
}


class TestMemoryStats:
    def test_follows_tensors(self, held: int, tensor_of: TensorOf) -> None:
        kept = tensor_of(12345)
        assert brim.memory_stats("cpu").allocated == held + 12345
        del kept
        assert brim.memory_stats("cpu").allocated == held

    def test_has_all_figures(self) -> None:
        stats = brim.memory_stats("cpu")
        assert 0 < stats.free <= stats.limit
        assert MIB < stats.reserved <= stats.limit
        assert stats.allocated <= stats.peak
        assert (stats.inactive_split, stats.alloc_retries, stats.ooms) == (0, 0, 0)

    def test_reset_peak_starts_again(self, held: int, tensor_of: TensorOf) -> None:
        tensor_of(5 * MIB)
        assert brim.memory_stats("cpu").peak >= held + 5 * MIB
        brim.reset_peak("cpu")
        assert brim.memory_stats("cpu").peak == brim.memory_stats("cpu").allocated

    def test_reads_as_text(self) -> None:
        stats = brim.memory_stats("cpu")
        assert [line.split()[0] for line in str(stats).splitlines()] == [
            "allocated",
            "peak",
            "reserved",
            "limit",
            "free",
        ]
        assert repr(stats).startswith(f"MemoryStats(allocated={stats.allocated}, peak=")

    def test_is_read_only(self) -> None:
        with pytest.raises(AttributeError):
            brim.memory_stats("cpu").free = 5  # type: ignore[misc]

    @pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
    def test_takes_devices_in_every_form(self, device: str | torch.device) -> None:
        assert brim.memory_stats(device).limit == brim.memory_stats("cpu").limit

    @pytest.mark.skipif(torch.accelerator.is_available(), reason="the default is the accelerator")
    def test_the_default_device_is_the_cpu(self) -> None:
        assert brim.default_device() == torch.device("cpu")
        assert brim.memory_stats().limit == brim.memory_stats("cpu").limit

    @pytest.mark.skipif(torch.accelerator.is_available(), reason="the default is the accelerator")
    def test_the_default_device_is_the_cpu_after_torch_compile(self) -> None:
        # Without a CUDA device torch.compile leaves a guard behind that claims to count one.
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
        assert brim.default_device() == torch.device("cpu")
        with pytest.raises(ValueError, match="torch sees no"):
            brim.memory_stats("cuda")

    @pytest.mark.parametrize("device", ["meta", "nonsense", "cpu:x", "", "\udc80", "cuda:99"])
    def test_a_wrong_device_is_a_value_error(self, device: str) -> None:
        with pytest.raises(ValueError, match="device"):
            brim.memory_stats(device)

    @pytest.mark.parametrize("device", [-1, 99, 2**70])
    def test_a_wrong_device_number_is_a_value_error(self, device: int) -> None:
        with pytest.raises(ValueError, match="device"):
            brim.memory_stats(device)

    @pytest.mark.parametrize("device", [1.5, True, b"cpu", object()])
    def test_a_device_of_another_type_is_a_type_error(self, device: object) -> None:
        with pytest.raises(TypeError, match="device must be"):
            brim.memory_stats(device)  # type: ignore[arg-type]

    def test_what_torch_does_not_ask_its_allocator_for_is_not_counted(self, held: int) -> None:
        kept = [
            torch.from_numpy(np.zeros(1000)),
            torch.UntypedStorage(1000),
            torch.empty(1000).share_memory_(),
        ]
        assert len(kept) == 3
        assert brim.memory_stats("cpu").allocated == held


class TestPeakMeter:
    def test_peak_of_a_pattern_is_exact(self, tensor_of: TensorOf) -> None:
        with brim.PeakMeter("cpu") as meter:
            a = tensor_of(1001)
            b = tensor_of(2003)
            del a
            c = tensor_of(500)
            assert meter.peak == 3004
            assert meter.left == 2503
        del b, c
        assert (meter.peak, meter.left) == (3004, 2503), "figures stay after the block"

    def test_nests(self, tensor_of: TensorOf) -> None:
        with brim.PeakMeter("cpu") as outer:
            tensor_of(7000)
            with brim.PeakMeter("cpu") as inner:
                tensor_of(2000)
            tensor_of(100)
        assert (outer.peak, inner.peak) == (7000, 2000)

    def test_start_is_what_was_held(self, held: int, tensor_of: TensorOf) -> None:
        kept = tensor_of(300)
        with brim.PeakMeter("cpu") as meter:
            del kept
        assert meter.start == held + 300
        assert (meter.peak, meter.left) == (0, -300)

    def test_peaks_by_device(self, tensor_of: TensorOf) -> None:
        with brim.PeakMeter(["cpu"]) as meter:
            tensor_of(77)
        assert meter.peaks == {torch.device("cpu"): 77}

    def test_may_be_opened_again(self, tensor_of: TensorOf) -> None:
        meter = brim.PeakMeter("cpu")
        for size in (500, 20):
            with meter:
                tensor_of(size)
            assert meter.peak == size

    def test_closes_when_an_exception_passes(self, tensor_of: TensorOf) -> None:
        meter = brim.PeakMeter("cpu")
        with contextlib.suppress(KeyError), meter:
            tensor_of(500)
            raise KeyError
        tensor_of(9000)
        assert meter.peak == 500

    def test_sees_other_threads(self, tensor_of: TensorOf) -> None:
        all_hold = threading.Barrier(4)

        def work() -> None:
            kept = tensor_of(MIB)
            all_hold.wait()
            del kept

        with brim.PeakMeter("cpu") as meter:
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert meter.peak == 4 * MIB
        assert meter.left == 0

    def test_before_it_is_opened_there_is_nothing_to_read(self) -> None:
        with pytest.raises(RuntimeError, match="not been opened"):
            _ = brim.PeakMeter("cpu").peak

    def test_cannot_be_opened_twice_at_once(self) -> None:
        with (
            brim.PeakMeter("cpu") as meter,
            pytest.raises(RuntimeError, match="open already"),
            meter,
        ):
            pass

    def test_cannot_be_closed_before_it_is_opened(self) -> None:
        with pytest.raises(RuntimeError, match="not open"):
            brim.PeakMeter("cpu").__exit__(None, None, None)

    @pytest.mark.parametrize("device", [[], (), ["cpu", "cpu"], ["cpu", "cpu:0"], "meta", ["meta"]])
    def test_wrong_devices_are_value_errors(self, device: str) -> None:
        with pytest.raises(ValueError, match="device"), brim.PeakMeter(device):
            pass

    @pytest.mark.parametrize("device", [1.5, ["cpu", None, 2.5], {"cpu"}])
    def test_devices_of_another_type_are_type_errors(self, device: object) -> None:
        with pytest.raises(TypeError, match="device"):
            brim.PeakMeter(device)  # type: ignore[arg-type]

    @given(st.lists(st.integers(-6, 5000), max_size=40))
    def test_random_patterns_agree_with_a_bookkeeper(self, steps: list[int]) -> None:
        tensors: list[torch.Tensor] = []
        now = highest = 0
        with brim.PeakMeter("cpu") as meter:
            for step in steps:  # a size to allocate, or below zero which tensor to free
                if step >= 0:
                    tensors.append(torch.empty(step, dtype=torch.uint8))
                    now += step
                elif tensors:
                    now -= tensors.pop(step % len(tensors)).numel()
                highest = max(highest, now)
        assert (meter.peak, meter.left) == (highest, now)


class TestBudget:
    def test_shows_its_arguments(self) -> None:
        assert list(inspect.signature(brim.Budget).parameters) == ["limit", "device"]

    def test_over_the_limit_is_torch_out_of_memory_error(
        self, held: int, tensor_of: TensorOf
    ) -> None:
        with brim.budget(held + 1000, device="cpu"):
            kept = tensor_of(999)
            with pytest.raises(torch.OutOfMemoryError) as caught:
                tensor_of(2)
            last = tensor_of(1)
        assert kept.numel() + last.numel() == 1000
        assert "Tried to allocate 2 B (2 bytes)" in str(caught.value)
        assert f"({held + 999} bytes) in use" in str(caught.value)
        assert f"({held + 1000} bytes) allowed by the budget" in str(caught.value)

    def test_nests_and_the_tightest_is_in_force(self) -> None:
        def now() -> int:
            return brim.memory_stats("cpu").limit

        before = now()
        with brim.budget("64MiB", "cpu"):
            with brim.budget("16MiB", "cpu"), brim.budget("32MiB", "cpu"):
                assert now() == 16 * MIB
            assert now() == 64 * MIB
        assert now() == before

    def test_is_taken_away_when_an_exception_passes(self, tensor_of: TensorOf) -> None:
        before = brim.memory_stats("cpu").limit
        with pytest.raises(torch.OutOfMemoryError), brim.budget("1MiB", "cpu"):
            tensor_of(100 * MIB)
        assert brim.memory_stats("cpu").limit == before
        tensor_of(100 * MIB)

    def test_below_what_is_in_use_the_next_allocation_fails(self, tensor_of: TensorOf) -> None:
        kept = tensor_of(MIB)
        with (
            brim.budget(1, device="cpu"),
            pytest.raises(
                torch.OutOfMemoryError,
                match="1 B \\(1 bytes\\) allowed by the budget, which is less",
            ),
        ):
            tensor_of(1)
        assert kept.fill_(3).sum() == 3 * MIB

    def test_a_percentage_is_of_the_limit_in_force_when_entered(self) -> None:
        machine = brim.memory_stats("cpu").limit
        quarter = brim.budget("25%", device="cpu")
        with brim.budget("64MiB", device="cpu"), quarter:
            assert quarter.limit == 16 * MIB
        with quarter:
            assert quarter.limit == brim.parse_bytes("25%", of=machine)

    def test_hides_torchs_fallback_from_onednn_and_no_other_warning(self) -> None:
        failed = "mkldnn_matmul failed, switching to BLAS gemm:"
        refused = "CPU out of memory. Tried to allocate 1.00 MiB"
        before = torch.backends.mkldnn.enabled
        with brim.budget("1GiB", device="cpu"):
            warnings.warn(failed + refused, stacklevel=1)
            with pytest.warns(UserWarning, match="could not create a primitive"):
                warnings.warn(f"{failed}could not create a primitive", stacklevel=1)
            torch._C._set_mkldnn_enabled(False)  # as torch does then
        assert torch.backends.mkldnn.enabled == before
        filters = list(warnings.filters)
        with brim.budget("1GiB", device="cpu"):
            assert list(warnings.filters) == filters, "added once"

    def test_tells_limit_and_device(self) -> None:
        budget = brim.budget(np.int64(5 * MIB), device="cpu:0")
        with budget as inside:
            assert inside is budget
            assert budget.limit == 5 * MIB
        assert budget.device.type == "cpu"
        assert budget.limit == 5 * MIB

    def test_the_limit_of_one_that_was_never_opened_is_not_known(self) -> None:
        budget = brim.budget("50%", device="cpu")
        with pytest.raises(RuntimeError, match="not been opened"):
            _ = budget.limit
        with budget:
            pass

    def test_one_that_is_dropped_without_having_been_opened_is_a_warning_at_that_line(self) -> None:
        text = r"budget\('1MiB', device='cpu'\) was never entered and limited nothing: open it with"
        with pytest.warns(UserWarning, match=text) as caught:
            brim.budget("1MiB", device="cpu")
        assert [warning.filename for warning in caught] == [__file__]

        def limit() -> brim.Budget:
            return brim.Budget("1GiB", "cpu")

        with limit():  # as errors, warnings would show in pytest
            pass
        limit()(len)([])
        with pytest.raises(TypeError), limit():
            limit()(5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="meta"), brim.budget("1GiB", device="meta"):
            pass
        gc.collect()

    @pytest.mark.slow
    def test_also_where_the_program_ends_with_it(self) -> None:
        program = "import brim\nlimit = brim.budget('1MiB', device='cpu')"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        assert done.stderr.count("was never entered") == 1
        assert len(done.stderr.splitlines()) <= 2

    def test_decorates_functions_and_methods(self, held: int, tensor_of: TensorOf) -> None:
        @brim.budget(held + 1000, device="cpu")
        def work(size: int, depth: int = 0) -> int:
            """Allocate."""
            return work(size, depth - 1) if depth else tensor_of(size).numel()

        class Worker:
            @staticmethod
            @brim.budget(held + 1000, device="cpu")
            def static(size: int) -> int:
                return tensor_of(size).numel()

            @brim.budget(held + 1000, device="cpu")
            def method(self, size: int) -> int:
                return tensor_of(size).numel()

        for call in (work, lambda size: work(size, depth=2), Worker.static, Worker().method):
            assert call(1000) == 1000
            with pytest.raises(torch.OutOfMemoryError):
                call(1001)
            assert tensor_of(1001).numel() == 1001
        assert work.__name__ == "work"
        assert work.__doc__ == "Allocate."

    def test_what_runs_after_the_call_cannot_be_decorated(self) -> None:
        limited = brim.budget("1GiB", device="cpu")

        async def coroutine() -> None: ...

        class Stream:
            def __call__(self) -> Any:
                yield 1

        for function in (coroutine, lambda: (yield), Stream()):
            with pytest.raises(TypeError, match="open the budget inside of it, in a `with` block"):
                limited(function)
        for thing in (Stream, staticmethod(len), 5):
            with pytest.raises(TypeError, match="a budget decorates a function, below @class"):
                limited(thing)  # type: ignore[arg-type]

    def test_tells_what_it_limits_and_what_is_in_use(self, tensor_of: TensorOf) -> None:
        budget = brim.budget("64MiB", device="cpu")
        assert repr(budget) == "Budget('64MiB', device='cpu', closed)"
        kept = tensor_of(3 * MIB)
        with budget:
            held = brim.format_bytes(brim.memory_stats("cpu").allocated)
            assert repr(budget) == f"Budget('64MiB', device='cpu', {held} of 64.00 MiB in use)"
        del kept
        assert repr(budget) == "Budget('64MiB', device='cpu', closed)"

    def test_cannot_be_opened_twice_at_once(self) -> None:
        with (
            brim.budget("1GiB", device="cpu") as budget,
            pytest.raises(RuntimeError, match="open already"),
            budget,
        ):
            pass

    def test_may_be_opened_again(self, held: int, tensor_of: TensorOf) -> None:
        budget = brim.budget(held + 100, device="cpu")
        for _ in range(2):
            with budget, pytest.raises(torch.OutOfMemoryError):
                tensor_of(101)
            tensor_of(101)

    def test_closing_one_that_is_not_open_does_nothing(self) -> None:
        before = brim.memory_stats("cpu").limit
        budget = brim.budget("1MiB", device="cpu")
        budget.__exit__(None, None, None)
        assert brim.memory_stats("cpu").limit == before
        with budget:
            budget.__exit__(None, None, None)
            assert brim.memory_stats("cpu").limit == before

    @pytest.mark.parametrize("limit", [0, -1, -(2**63), 2**63, 2**200, -(2**200)])
    def test_a_number_that_is_no_limit_is_a_value_error(self, limit: int) -> None:
        with pytest.raises(ValueError, match="limit"):
            brim.budget(limit, device="cpu")

    @pytest.mark.parametrize(
        "limit",
        ["", "0", "-5MiB", "8G", "lots", "nan", "inf", "1e9", "101%", "0%", "9EiB", "\udc80MiB"],
    )
    def test_a_text_that_is_no_limit_is_a_value_error(self, limit: str) -> None:
        with pytest.raises(ValueError, match="limit"):
            brim.budget(limit, device="cpu")

    @pytest.mark.parametrize("limit", [1.5, None, True, b"1MiB", float("nan"), [1]])
    def test_another_type_is_a_type_error(self, limit: object) -> None:
        with pytest.raises(TypeError, match="limit must be"):
            brim.budget(limit, device="cpu")  # type: ignore[arg-type]

    def test_a_wrong_device_is_refused(self) -> None:
        with pytest.raises(ValueError, match="device"):
            brim.budget("1GiB", device="nonsense")
        with pytest.raises(ValueError, match="meta"), brim.budget("1GiB", device="meta"):
            pass

    def test_out_of_a_refused_operator_can_be_used_after_resize_0(self, held: int) -> None:
        out = torch.empty(0)
        x = torch.ones(MIB)
        with (
            brim.budget(held + x.nbytes + 1024, device="cpu"),
            pytest.raises(torch.OutOfMemoryError),
        ):
            torch.add(x, x, out=out)
        out.resize_(0)  # torch has left it the shape of the result without the memory
        torch.add(x, x, out=out)
        assert out.untyped_storage().nbytes() == x.nbytes
        assert bool((out == 2).all())

    def test_threads_never_overshoot(self, held: int) -> None:
        room = 100_000
        refused = 0

        def work(seed: int) -> None:
            nonlocal refused
            random = np.random.default_rng(seed)
            kept: list[torch.Tensor] = []
            for _ in range(300):
                try:
                    kept.append(torch.empty(int(random.integers(1, 9000)), dtype=torch.uint8))
                except torch.OutOfMemoryError:
                    refused += 1
                    kept.clear()

        with brim.budget(held + room, device="cpu"), brim.PeakMeter("cpu") as meter:
            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert refused > 0
        assert room / 2 < meter.peak <= room
        assert meter.left == 0


class TestBytes:
    @given(st.integers(1, 2**63 - 1))
    def test_ints_and_their_text_are_exact(self, number: int) -> None:
        assert brim.parse_bytes(number) == brim.parse_bytes(str(number)) == number

    @given(
        st.integers(1, 8000), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]), st.data()
    )
    def test_units_multiply(self, number: int, unit: str, space: str, data: st.DataObject) -> None:
        cased = "".join(data.draw(st.sampled_from([c.lower(), c.upper()])) for c in unit)
        assert brim.parse_bytes(f"{number}{space}{cased}") == number * UNITS[unit]

    @given(st.integers(1, 10_000), st.integers(1, 2**50))
    def test_percentages_are_shares(self, hundredths: int, whole: int) -> None:
        share = brim.parse_bytes(f"{hundredths / 100:.2f}%", of=whole)
        assert 1 <= share <= whole
        assert abs(share - whole * hundredths / 10_000) <= 1 + whole * 1e-12

    @given(st.text(max_size=12))
    def test_any_text_is_a_limit_or_a_value_error(self, text: str) -> None:
        with contextlib.suppress(ValueError):  # any other exception is a defect
            assert 1 <= brim.parse_bytes(text, of=1000) < 2**63

    @given(st.integers(1, 2**62))
    def test_formatted_bytes_can_be_read_back(self, number: int) -> None:
        assert brim.parse_bytes(brim.format_bytes(number)) == pytest.approx(number, rel=0.006)

    @given(st.integers(1, 2**63 - 1))
    def test_negative_numbers_format_as_positive_ones(self, number: int) -> None:
        assert brim.format_bytes(-number) == "-" + brim.format_bytes(number)

    @pytest.mark.parametrize(
        ("arguments", "error", "name"),
        [
            (("50%",), ValueError, "of"),
            (("50%", 0), ValueError, "of"),
            (("50%", -5), ValueError, "of"),
            (("50%", 2**70), ValueError, "of"),
            (("50%", 1.5), TypeError, "of"),
            ((None,), TypeError, "limit"),
        ],
    )
    def test_wrong_arguments_are_named(
        self, arguments: tuple[object, ...], error: type[Exception], name: str
    ) -> None:
        with pytest.raises(error, match=name):
            brim.parse_bytes(*arguments)  # type: ignore[arg-type]

    def test_format_bytes_refuses_what_is_no_int(self) -> None:
        for wrong, error in itertools.chain(
            ((x, TypeError) for x in (1.5, "5", None)), ((x, ValueError) for x in (2**63, -(2**64)))
        ):
            with pytest.raises(error, match="bytes must"):
                brim.format_bytes(wrong)  # type: ignore[arg-type]


class TestRelease:
    def test_gives_a_number_of_bytes_and_leaves_tensors_alone(self, tensor_of: TensorOf) -> None:
        kept = tensor_of(MIB).fill_(1)
        assert brim.release_cached("cpu") >= 0
        assert kept.sum() == MIB

    def test_the_cpu_is_not_fragmented(self) -> None:
        now = brim.fragmentation("cpu")
        assert (now.cached, now.stuck, now.share) == (0, 0, 0.0)
        assert now.explains_failure_of(1)
        assert now.explains_failure_of(now.usable)
        assert not now.explains_failure_of(now.usable + 1)
        assert not now.explains_failure_of(0)
