"""Whatever happens inside of an estimate, everything is afterwards as it was."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import brim
from brim._estimate import _estimate, _swap
from brim._state import undoing
from brim._state.undoing import Undoing, set_attribute

FOLDER = str(Path(_estimate.__file__).parent)


def assert_real(model: nn.Module, x: torch.Tensor) -> None:
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert type(model(x)) is torch.Tensor
    assert model(x).isfinite().all()


@pytest.mark.parametrize("was_cast", [False, True])
@pytest.mark.parametrize("foresee", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_a_model_survives_an_estimate_inside_of_autocast(
    was_cast: bool, foresee: bool, backward: bool
) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(4, 8)

    def work(n: int) -> None:
        out = model(torch.randn(n, 8))
        if backward:
            out.float().sum().backward()

    with torch.autocast("cpu", torch.bfloat16):
        if was_cast:
            model(x)  # autocast has casts of the weights by now
        if foresee:
            brim.maximize("n", device="cpu", foresee=True)(work)(4)
        else:
            brim.estimate(work, 4, device="cpu")
        assert_real(model, x)
        assert model(x).dtype == torch.bfloat16
    assert_real(model, x)


model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)


class Counter(nn.Linear):
    calls = 0


def nothing(*_: object) -> None:
    pass


def anomaly() -> Any:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {  # does, and looks at
    "forward hook": (
        lambda: model.register_forward_hook(nothing, always_call=True),
        lambda: (len(model._forward_hooks), len(model._forward_hooks_always_called)),
    ),
    "backward hook": (
        lambda: model.register_full_backward_hook(nothing),
        lambda: (len(model._backward_hooks), model._is_full_backward_hook),
    ),
    "hook of all modules": (
        lambda: torch_module.register_module_forward_hook(nothing),
        lambda: len(torch_module._global_forward_hooks),
    ),
    "hook of a tensor": (
        lambda: model.weight.register_hook(lambda grad: grad),
        lambda: len(model.weight._backward_hooks or ()),
    ),
    "hook of a gradient": (
        lambda: model.bias.register_post_accumulate_grad_hook(nothing),
        lambda: len(model.bias._post_accumulate_grad_hooks or ()),
    ),
    "hook of an optimizer": (
        lambda: optimizer.register_step_pre_hook(nothing),
        lambda: len(optimizer._optimizer_step_pre_hooks),
    ),
    "hook of all optimizers": (
        lambda: torch_optimizer.register_optimizer_step_post_hook(nothing),
        lambda: len(torch_optimizer._global_optimizer_post_hooks),
    ),
    "attribute": (lambda: setattr(model, "note", 1), lambda: hasattr(model, "note")),
    "attribute of a class": (lambda: setattr(Counter, "calls", 1), lambda: Counter.calls),
    "requires_grad": (
        lambda: model.requires_grad_(False),
        lambda: [p.requires_grad for p in model.parameters()],
    ),
    "learning rate": (
        lambda: optimizer.param_groups[0].update(lr=1.0),
        lambda: optimizer.param_groups[0]["lr"],
    ),
    "grad mode": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "inference mode": (
        lambda: torch.inference_mode().__enter__(),
        torch.is_inference_mode_enabled,
    ),
    "autocast": (
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False).__enter__(),
        lambda: (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            nesting(),
        ),
    ),
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "default device": (
        lambda: torch.set_default_device("meta"),
        lambda: (torch.get_default_device(), torch.empty(1).device),
    ),
    "threads": (lambda: torch.set_num_threads(3), torch.get_num_threads),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.get_deterministic_debug_mode,
    ),
    "anomaly": (lambda: torch.set_anomaly_enabled(True, False), anomaly),
    "saved tensors": (
        lambda: torch.autograd.graph.saved_tensors_hooks(id, id).__enter__(),
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(True),
    ),
    "cuDNN": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "matrix products": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "attention": (
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        torch.backends.cuda.flash_sdp_enabled,
    ),
    "environment": (
        lambda: os.environ.update(BRIM_TEST_X="1", PATH="/nowhere"),
        lambda: dict(os.environ),
    ),
    "folder": (lambda: os.chdir("/"), os.getcwd),
    "random numbers": (lambda: torch.manual_seed(1), lambda: torch.get_rng_state().tolist()),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_what_the_call_changes_is_put_back(name: str, fails: bool) -> None:
    change, look = CHANGES[name]
    other = Counter(4, 4)

    def work() -> None:
        model(other(torch.ones(2, 4)))
        optimizer.zero_grad()
        assert Counter.calls == 0
        change()
        if fails:
            raise KeyError("mine")

    before = look()
    with pytest.raises(KeyError, match="mine") if fails else contextlib.nullcontext():
        brim.estimate(work, device="cpu")
    assert look() == before
    assert_real(model, torch.ones(2, 4))


def test_hooks_of_tensors_take_part_and_go_on_afterwards() -> None:
    weight = nn.Parameter(torch.ones(2))
    calls: list[str] = []
    weight.register_hook(lambda grad: calls.append("before"))

    def work() -> None:
        weight.register_hook(lambda grad: calls.append("inside"))
        weight.sum().backward()
        assert calls == ["before", "inside"]

    brim.estimate(work, device="cpu")
    assert calls == []
    weight.register_hook(lambda grad: calls.append("after"))
    weight.sum().backward()
    assert calls == ["before", "after"]


def test_putting_back_goes_on_past_a_failure_which_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers, x = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4)), torch.ones(2, 2)
    exchange, stuck = _swap._C.exchange_tensors, layers[2].weight

    def refuses(a: torch.Tensor, b: torch.Tensor) -> None:
        if a is stuck and isinstance(a, torch._subclasses.FakeTensor):
            raise RuntimeError("Expected no weakrefs")
        exchange(a, b)

    def work(n: int) -> None:
        torch.set_grad_enabled(False)
        for layer in layers:
            layer(torch.ones(n, 2))

    for call in (
        lambda: brim.estimate(work, 2, device="cpu"),
        lambda: brim.maximize("n", device="cpu", foresee=True)(work)(2),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(_swap._C, "exchange_tensors", refuses)
            with pytest.raises(brim.EstimateError, match=r"shape \[2, 2\] could not be put back"):
                call()
        assert torch.is_grad_enabled()
        for layer in layers:
            if layer.weight is not stuck:
                assert_real(layer, x)
        layers[2].weight = stuck = nn.Parameter(torch.ones(2, 2))


def test_a_thread_with_modules_of_its_own_is_left_alone() -> None:
    inside, done = threading.Event(), threading.Event()
    seen: list[Any] = []

    def other() -> None:
        own = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.LSTM(4, 4))
        step = torch.optim.Adam(own.parameters())
        scaler = torch.amp.GradScaler("cpu")
        inside.wait(60)
        with torch.autocast("cpu", torch.bfloat16):
            out = own(torch.ones(3, 4))[0]
        scaler.scale(out.float().sum() * torch.inf).backward()  # overflows: no step
        scaler.step(step)
        seen.extend([out, *own.parameters(), *(p.grad for p in own.parameters())])
        seen.append(len(step.state))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()

    def work(n: int) -> None:
        inside.set()
        done.wait(60)
        model(torch.ones(n, 4)).sum().backward()

    for device in ("cpu", "cuda"):
        predicted = brim.estimate(work, 8, device=device, capacity="1GiB")
    thread.join()
    assert predicted.peak > 0
    assert seen.pop() == 0
    assert {type(each) for each in seen} == {torch.Tensor, nn.Parameter}
    assert seen[0].dtype in (torch.bfloat16, torch.float32)


class Interrupt:
    """Raises KeyboardInterrupt at one line of brim's own code, counted from the start."""

    def __init__(self, at: int, folder: str) -> None:
        self._at = at
        self._folder = folder
        self.lines = 0

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._folder):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                raise KeyboardInterrupt
        return self

    def run(self, call: Callable[[], object]) -> bool:
        """Whether the interrupt came."""
        before = sys.gettrace()
        # Python drops what is raised in the callback of a weak reference. pytest would hold it.
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
            sys.unraisablehook = hook
        return False


@pytest.mark.parametrize("points", [8, pytest.param(150, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line_leaves_nothing(points: int) -> None:
    layer, x = nn.Linear(2, 2), torch.ones(2, 2)
    looks = [look for _, look in CHANGES.values()]

    def work() -> None:
        layer.register_forward_hook(nothing)
        torch.set_grad_enabled(False)
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
        os.environ["BRIM_TEST_X"] = "1"

    def call() -> None:
        brim.estimate(work, device="cpu")

    def state() -> Any:
        modes = torch._C._len_torch_dispatch_stack(), len(layer._forward_hooks)
        places = torch.Tensor.__format__, threading.Thread.start, torch.get_rng_state
        return [look() for look in looks], modes, places

    call()
    before = state()
    whole = Interrupt(0, FOLDER)
    whole.run(call)
    assert whole.lines > 1000
    end = whole.lines - 100  # things are put back from about there on
    for at in (
        *range(1, end, end // points),
        *range(end, whole.lines, 200 // points),
    ):
        Interrupt(at, FOLDER).run(call)
        assert state() == before, at
        assert_real(layer, x)


def test_a_block_puts_everything_back_past_errors_and_interrupts() -> None:
    class Thing:
        size = 1

    def fails() -> None:
        raise ValueError("first")

    def change() -> None:
        with Undoing() as undo:
            set_attribute(undo, Thing, "size", 2)
            undo.callback(fails)
            set_attribute(undo, Thing, "new", 3)

    folder = str(Path(undoing.__file__).parent)
    with pytest.raises(ValueError, match="first"):
        change()
    whole = Interrupt(0, folder)
    with pytest.raises(ValueError, match="first"):
        whole.run(change)
    assert whole.lines > 10
    for at in range(1, whole.lines + 1):
        with contextlib.suppress(ValueError):
            Interrupt(at, folder).run(change)
        assert Thing.size == 1, at
        assert not hasattr(Thing, "new"), at


def test_a_step_that_is_interrupted_several_times_is_taken_in_the_end() -> None:
    interrupts = 5
    thing = types.SimpleNamespace(size=1)

    def put_back() -> None:
        nonlocal interrupts
        interrupts -= 1
        if interrupts >= 0:
            raise KeyboardInterrupt
        thing.size = 1

    with pytest.raises(KeyboardInterrupt), Undoing() as undo:  # noqa: PT012
        undo.callback(put_back)
        thing.size = 2
    assert thing.size == 1


@pytest.mark.parametrize("inside", ["start", "stop"])
def test_a_profiler_may_be_started_or_stopped_inside_of_a_block(inside: str) -> None:
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    )
    first, second = profiler.start, profiler.stop
    if inside == "stop":
        first()
        first, second = second, torch.ones(1).neg
    with Undoing():
        torch.ones(1).exp()
        first()
    torch.ones(1).sin()
    second()
    seen = {event.key for event in profiler.key_averages()}
    assert ("aten::sin" in seen, "aten::exp" in seen) == (inside == "start", inside == "stop")


def test_a_region_of_autocast_that_is_left_open_leaves_no_casts() -> None:
    """Else the next region would compute with weights as they were."""
    layer, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    with Undoing():
        torch.autocast("cpu", torch.bfloat16).__enter__()
        layer(x)
    layer.weight.data.fill_(1)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).tolist() == [[2, 2]]
    assert not torch.is_autocast_enabled("cpu")
    assert nesting() == 0
