"""`brim.explain`: why memory ran out, who holds it, and what would help."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import brim
from brim import _C

from .test_threads_and_forks import in_child

MIB = 1 << 20


def step_of(width: int = 128, depth: int = 6) -> tuple[torch.nn.Module, Callable[..., None]]:
    model = torch.nn.Sequential(
        *[layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
    )

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()

    return model, step


def peak_of(work: Callable[[], object], calls: int = 2) -> int:
    """What all tensors hold at most in the last of so many calls."""
    for _ in range(calls - 1):
        work()
    with brim.PeakMeter("cpu") as meter:
        work()
    return meter.start + meter.peak


@pytest.fixture
def counted() -> None:
    brim.install_cpu_allocator()


def test_the_error_ends_in_the_report_and_stays_the_same_error() -> None:
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4\.00 MiB") as raised,
        brim.budget("1MiB", device="cpu"),
        brim.explain(device="cpu") as told,
    ):
        torch.empty(4 * MIB, dtype=torch.uint8)
    assert raised.value.explanation is told.explanation
    assert told.explanation.cause == "real need"
    assert told.explanation.requested == 4 * MIB
    if sys.version_info >= (3, 11):
        assert raised.value.__notes__ == [f"\n{told.explanation}"]


def test_other_errors_pass_untouched() -> None:
    with pytest.raises(ValueError, match="wrong") as raised, brim.explain(device="cpu") as told:
        raise ValueError("wrong")
    assert told.explanation is None
    assert not hasattr(raised.value, "explanation")
    assert not getattr(raised.value, "__notes__", [])


def test_the_innermost_block_explains() -> None:
    with (
        pytest.raises(torch.OutOfMemoryError) as raised,
        brim.budget("1MiB", device="cpu"),
        brim.explain(device="cpu") as outer,
        brim.explain(device="cpu") as inner,
    ):
        torch.empty(4 * MIB, dtype=torch.uint8)
    assert inner.explanation is not None
    assert outer.explanation is None
    assert len(getattr(raised.value, "__notes__", ["one"])) == 1


def test_what_leaves_a_budget_is_explained(counted: None) -> None:
    model = torch.nn.Linear(512, 512)
    with pytest.raises(torch.OutOfMemoryError) as raised, brim.budget("3MiB", device="cpu"):
        model(torch.ones(1024, 512))
    told = raised.value.explanation
    assert told.cause == "real need"
    assert told.limit == 3 * MIB  # it was still open
    assert ("parameter", "Linear") in {(one.kind.name, one.where) for one in told.held}
    assert any("with brim.explain():" in note for note in told.notes)


def test_what_leaves_an_adaptive_call_is_explained_once(counted: None) -> None:
    kept = torch.nn.Linear(512, 512)
    seen = []

    @brim.maximize("size")
    def inner(size: int) -> int:
        return torch.zeros(4 * MIB + size, dtype=torch.uint8).numel()

    @brim.maximize("size")
    def outer(size: int) -> int:
        try:
            return inner(2)
        except torch.OutOfMemoryError as error:
            seen.append(hasattr(error, "explanation"))
            raise

    with brim.budget("3MiB", device="cpu"):
        with pytest.raises(torch.OutOfMemoryError) as raised:
            outer(2)
        told = raised.value.explanation
    assert seen == [False] * len(seen)
    assert len(seen) == 2
    assert told.cause == "real need"
    assert told.requested >= 4 * MIB
    assert told.by_kind["parameter"] >= sum(each.nbytes for each in kept.parameters())
    assert "It does not fit even with size = 1" in str(raised.value)


def test_what_leaves_microbatches_is_explained(counted: None) -> None:
    model = torch.nn.Linear(2048, 2048)
    step = brim.Microbatches(lambda part: model(part).square().mean(), model=model)
    with brim.budget("17MiB", device="cpu"), pytest.raises(torch.OutOfMemoryError) as raised:
        step(torch.ones(4, 2048))
    assert raised.value.explanation.by_kind["parameter"] >= model.weight.nbytes


def test_a_failed_attempt_is_not_explained(counted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        pytest.fail("a call that may be tried again was explained")

    monkeypatch.setattr("brim._explain._block.explanation_of", fail)

    limit = brim.memory_stats("cpu").allocated + MIB

    @brim.maximize("size")
    def work(size: int) -> int:
        with brim.budget(limit, device="cpu"):
            return torch.zeros(size, dtype=torch.uint8).numel()

    assert MIB // 2 < work(4 * MIB) <= MIB


def test_the_block_around_an_adaptive_call_explains_it(counted: None) -> None:
    explained = brim.explain(device="cpu")

    @explained
    def call() -> int:
        with brim.budget("3MiB", device="cpu"):
            return torch.zeros(4 * MIB, dtype=torch.uint8).numel()

    with pytest.raises(torch.OutOfMemoryError) as raised:
        call()
    told = raised.value.explanation
    assert told is explained.explanation
    assert told.need is not None  # it was replayed
    assert told.limit == 3 * MIB


def test_an_explanation_that_fails_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("no")

    monkeypatch.setattr("brim._explain._block.explanation_of", fail)
    with (
        pytest.warns(UserWarning, match="brim.explain failed: ArithmeticError: no"),
        pytest.raises(torch.OutOfMemoryError),
        brim.budget("1MiB", device="cpu") as limited,
    ):
        torch.empty(4 * MIB, dtype=torch.uint8)
    assert not limited.is_open


def test_holders_are_named_by_kind_and_line(counted: None) -> None:
    model, step = step_of()
    batch = torch.randn(1024, 128)
    limit = brim.memory_stats("cpu").allocated + 3 * MIB
    with (
        pytest.raises(torch.OutOfMemoryError),
        brim.budget(limit, device="cpu"),
        brim.explain(device="cpu") as told,
    ):
        step(batch)
    held = {(one.kind.name, one.where): one.bytes for one in told.explanation.held}
    assert held["parameter", "Sequential"] == sum(each.nbytes for each in model.parameters())
    kept = [where for kind, where in held if kind == "activation"]
    assert any(where.startswith("test_explain.py:") for where in kept), held
    assert told.explanation.by_kind["activation"] >= MIB
    assert sum(told.explanation.by_kind.values()) <= limit


def test_a_block_that_has_ended_notes_nothing_more(counted: None) -> None:
    with brim.explain(device="cpu"):
        pass
    with _C.BlockWatch("cpu", 1) as watch:
        kept = torch.empty(100)
        assert [block[1] for block in watch.blocks()] == [kept.nbytes]
    with _C.BlockWatch("cpu", 1) as watch:
        assert watch.blocks() == []


class Skipping(torch.nn.Module):
    """Keeps what its layers return until it ends, as a U-Net or a cache does."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(128, 128) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.layers:
            x = layer(x).relu()
            kept.append(x)
        return sum(kept)


@pytest.mark.parametrize("calls", [0, 3])
def test_what_one_call_keeps_does_not_grow(calls: int, counted: None) -> None:
    model, batch = Skipping(), torch.randn(2048, 128)
    limit = peak_of(lambda: model(batch[:512]).mean().backward(), 1) + 2 * MIB

    def train() -> None:
        for _ in range(calls):
            model(batch[:512]).mean().backward()
        model(batch).mean().backward()

    with (
        pytest.raises(torch.OutOfMemoryError) as raised,
        brim.budget(limit, device="cpu"),
        brim.explain(device="cpu"),
    ):
        train()
    assert raised.value.explanation.cause == "real need", raised.value.explanation


def test_what_a_decorated_call_adds_up_does_not_grow(counted: None) -> None:
    model, batch = Skipping(3), torch.randn(512, 128)

    @brim.explain(device="cpu")
    def step() -> None:
        sum(model(batch).mean() for _ in range(16)).backward()

    limit = brim.memory_stats("cpu").allocated + 8 * MIB
    with pytest.raises(torch.OutOfMemoryError) as raised, brim.budget(limit, device="cpu"):
        step()
    assert raised.value.explanation.cause == "real need", raised.value.explanation


def test_copies_that_are_being_made_are_passed_over(counted: None) -> None:
    model, kept = torch.nn.Sequential(torch.nn.Linear(512, 512)), []
    limit = brim.memory_stats("cpu").allocated + 5 * MIB
    with pytest.raises(torch.OutOfMemoryError) as raised, brim.budget(limit, device="cpu"):
        kept.extend(copy.deepcopy(model) for _ in range(100))
    assert raised.value.explanation.by_kind["parameter"] > 4 * MIB


@pytest.mark.parametrize("graph", [True, False])
def test_what_calls_leave_is_named_by_its_line(graph: bool, counted: None) -> None:
    model, batch, kept = Skipping(3), torch.randn(512, 128), []

    @brim.explain(device="cpu")
    def evaluate(batch: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(graph):
            return model(batch)

    limit = brim.memory_stats("cpu").allocated + 24 * MIB
    with pytest.raises(torch.OutOfMemoryError) as raised, brim.budget(limit, device="cpu"):
        kept.extend(evaluate(batch) for _ in range(1000))
    told = raised.value.explanation
    assert told.cause == "memory that grows", told
    assert told.grown >= 12 * MIB
    lines = {one.where.partition(" ")[2] for one in told.held if one.grows}
    named = "Skipping.forward" if sys.version_info >= (3, 11) else "forward"
    assert lines == {named}, told
    assert not [one for one in told.remedies if one.name != "no graph"]  # they would put it off
    assert any("let go of it" in note for note in told.notes)
    kept.clear()
    assert evaluate(batch) is not None


@pytest.mark.parametrize("share", [0.5, 0.7])
def test_remedies_of_a_decorated_step_need_what_they_say(share: float, counted: None) -> None:
    model, step = step_of()
    batch = torch.randn(2048, 128)
    full = peak_of(lambda: step(batch))
    model.zero_grad()
    held = brim.memory_stats("cpu").allocated
    limit = held + int((full - held) * share)
    explained = brim.explain(device="cpu")
    with pytest.raises(torch.OutOfMemoryError), brim.budget(limit, device="cpu"):
        explained(step)(batch)
    told = explained.explanation
    assert told is not None
    assert told.need == pytest.approx(full, rel=0.03)
    remedies = {one.name: one for one in told.remedies}
    parts = next(one for name, one in remedies.items() if "microbatches" in name)
    smaller = next(one for name, one in remedies.items() if name.startswith("batch"))
    size = int(smaller.code.partition("=")[2])
    rows = int(parts.name.rpartition(" ")[2])
    real = {
        parts.name: lambda: step(batch[:rows]),
        smaller.name: lambda: step(batch[:size]),
        'recompute="auto"': lambda: within_auto(step, batch, limit),
    }
    for name, work in real.items():
        model.zero_grad()
        if name == 'recompute="auto"' and not remedies[name].fits:  # it runs under the limit
            with pytest.raises(torch.OutOfMemoryError):
                work()
        elif name in remedies:
            assert peak_of(work) == pytest.approx(remedies[name].peak, rel=0.03), (name, told)
    assert parts.peak <= smaller.peak
    assert smaller.fits
    model.zero_grad()
    with brim.budget(limit, device="cpu"):  # what is said to fit does
        step(batch[:size])
        step(batch[:size])


def within_auto(step: Callable[..., None], batch: torch.Tensor, limit: int) -> None:
    with brim.budget(limit, device="cpu"), brim.saving("auto"):
        step(batch)


def test_evaluation_with_a_graph_is_told_to_do_without(counted: None) -> None:
    model, _ = step_of()
    batch = torch.randn(2048, 128)

    def evaluate(batch: torch.Tensor) -> float:
        return model(batch).square().mean().item() if batch.is_cuda else float(batch.numel())

    def outputs(batch: torch.Tensor) -> torch.Tensor:
        return model(batch)

    told = brim.explain(outputs, batch, device="cpu", capacity="4MiB")
    first = told.remedies[0]
    assert first.name == "no graph"
    assert first.fits

    with torch.no_grad():
        assert peak_of(lambda: outputs(batch)) == pytest.approx(
            first.peak + brim.memory_stats("cpu").allocated, rel=0.5
        )
    assert evaluate(batch) == batch.numel()


def test_gradients_that_are_kept_over_the_forward(counted: None) -> None:
    width = 1024
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> None:
        hidden = model(batch).exp()
        for _ in range(8):
            hidden = hidden.exp()
        loss = hidden.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    told = brim.explain(step, torch.randn(64, width), device="cpu", capacity="9MiB")
    names = [one.name for one in told.remedies]
    assert "gradients released before the forward" in names, told


def test_the_optimizers_state_in_8_bits(counted: None) -> None:
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    told = brim.explain(step, torch.randn(8, 1024), device="cpu", capacity="12MiB")
    remedy = next(one for one in told.remedies if "8 bits" in one.name)
    state = 2 * sum(each.nbytes for each in model.parameters())
    assert remedy.saves == pytest.approx(state * 0.746, rel=0.03)


def test_nothing_is_recommended_that_does_not_save(counted: None) -> None:
    _, step = step_of()
    told = brim.explain(step, torch.randn(2048, 128), device="cpu", capacity="8MiB")
    assert told.remedies
    assert all(one.saves > 0 for one in told.remedies)
    assert all(one.fits == (one.peak <= told.limit) for one in told.remedies)
    fits = [one.fits for one in told.remedies]
    assert fits == sorted(fits, reverse=True)  # what fits comes first


def test_a_call_that_fits_needs_no_remedies(counted: None) -> None:
    _, step = step_of()
    told = brim.explain(step, torch.randn(16, 128), device="cpu", capacity="1GiB")
    assert told.remedies == []
    assert told.cause is None
    assert "fits" in str(told)


def test_what_the_call_changes_is_as_if_it_had_not_been_explained(counted: None) -> None:
    def run(explained: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        model, step = step_of()
        batch = torch.randn(2048, 128)
        limit = brim.memory_stats("cpu").allocated + 7 * MIB
        call = brim.explain(device="cpu")(step) if explained else step
        with pytest.raises(torch.OutOfMemoryError), brim.budget(limit, device="cpu"):
            call(batch)
        assert all(type(each) is torch.nn.Parameter for each in model.parameters())
        return [*(each.grad for each in model.parameters()), *model.parameters(), torch.rand(1)]

    for plain, watched in zip(run(explained=False), run(explained=True), strict=True):
        assert plain is None if watched is None else torch.equal(watched, plain)


def branching(batch: torch.Tensor) -> None:
    if batch.sum() > 1e9:
        return
    torch.zeros(1 << 24)


def in_microbatches(batch: torch.Tensor) -> None:
    brim.Microbatches(lambda part: (part * torch.zeros(1 << 24)).sum())(batch)


@pytest.mark.parametrize("work", [branching, in_microbatches])
def test_what_cannot_be_replayed_is_explained_without_remedies(
    work: Callable[[torch.Tensor], None], counted: None
) -> None:
    explained = brim.explain(device="cpu")
    with pytest.raises(torch.OutOfMemoryError), brim.budget("32MiB", device="cpu"):
        explained(work)(torch.ones(8))
    assert explained.explanation.remedies == []
    assert any("could not be replayed" in note for note in explained.explanation.notes)
    if work is in_microbatches:
        assert "Microbatches finds its size by running" in str(explained.explanation)


def test_the_report_as_figures_and_as_a_page(counted: None, tmp_path: Path) -> None:
    model, step = step_of()
    page = tmp_path / "report.html"
    explained = brim.explain(device="cpu", html=page)
    limit = brim.memory_stats("cpu").allocated + 4 * MIB
    with pytest.raises(torch.OutOfMemoryError), brim.budget(limit, device="cpu"):
        explained(step)(torch.randn(1024, 128))
    told = explained.explanation
    figures = json.loads(json.dumps(told.to_dict()))
    assert figures["cause"] == "real need"
    assert len(figures["remedies"]) == len(told.remedies)
    assert figures["held"][0]["bytes"] == told.held[0].bytes
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    for words in ("What would help", "Held when it failed", "real need", "microbatches"):
        assert words in text
    assert isinstance(model, torch.nn.Module)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="capacity without a function"):
        brim.explain(capacity="1GiB")
    with pytest.raises(TypeError, match="fn must be a function"):
        brim.explain(3)
    with pytest.raises(TypeError, match="html is for a block"):
        brim.explain(print, html="a.html")
    with pytest.raises(ValueError, match="device"):
        brim.explain(device="nothing")
    with pytest.raises(TypeError, match="decorates a function"):
        brim.explain(device="cpu")(3)

    def later() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match="runs after the call has returned"):
        brim.explain(device="cpu")(later)


PROGRAM = """
import sys
import torch, brim

kept = []
with brim.budget("64MiB", device="cpu"):
    for i in range(1000):
        kept.append(torch.zeros(1 << 20, dtype=torch.uint8))
"""


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_a_program_is_run_and_explained(tmp_path: Path) -> None:
    (tmp_path / "leaks.py").write_text(PROGRAM)
    ran = python(
        "-m", "brim", "run", "--device", "cpu", "--html", "r.html", "leaks.py", cwd=tmp_path
    )
    assert ran.returncode == 1
    assert "OutOfMemoryError" in ran.stderr
    assert "cause: memory that grows" in ran.stderr
    assert "leaks.py:8" in ran.stderr
    assert "runpy" not in ran.stderr  # the traceback begins in the program
    assert "memory that grows" in (tmp_path / "r.html").read_text()


@pytest.mark.slow
def test_a_program_keeps_its_arguments_and_its_exit_status(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(
        "import sys, os\nprint(__name__, sys.argv, sys.path[0] == os.getcwd())\nsys.exit(7)\n"
    )
    ran = python("-m", "brim", "run", "ends.py", "--x", "1", cwd=tmp_path)
    assert ran.returncode == 7
    assert ran.stdout == "__main__ ['ends.py', '--x', '1'] True\n"
    missing = python("-m", "brim", "run", "nothing.py", cwd=tmp_path)
    assert missing.returncode == 2
    assert "there is no file nothing.py" in missing.stderr


def test_uncaught_errors_are_explained_on_request(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(
        "import torch, brim\nbrim.explain_uncaught(device='cpu')\nmodel = torch.nn.Linear(8, 8)\n"
        "raise MemoryError\n"
    )
    ran = python("ends.py", cwd=tmp_path)
    assert ran.returncode == 1
    assert "cause: real need" in ran.stderr


def test_graphs_are_left_alone_where_another_thread_runs_backward() -> None:
    """It frees what they saved, and writes gradients, without a lock: the process would crash."""
    layer = torch.nn.Linear(4, 4)
    layer(torch.ones(2, 4)).sum().backward()
    kept = layer(torch.ones(2, 4))
    tensors, weights = [kept], list(layer.parameters())
    reached, go_on = threading.Event(), threading.Event()

    def wait(grad: torch.Tensor) -> None:
        reached.set()
        go_on.wait()

    hidden = layer(torch.ones(2, 4))
    hidden.register_hook(wait)
    thread = threading.Thread(target=lambda: hidden.sum().backward())
    thread.start()
    reached.wait()

    def are_left_alone() -> None:
        assert _C.uses_of_weights(tensors) == 0
        assert _C.gradients_of(weights) == []

    try:
        are_left_alone()
        in_child(are_left_alone)  # where the other thread will never end what it began
    finally:
        go_on.set()
        thread.join()
    assert _C.uses_of_weights(tensors) == 1
    found = _C.gradients_of(weights)
    assert all(each is weight.grad for each, weight in zip(found, weights, strict=True))


def test_how_often_weights_are_used_in_graphs_that_hold_something() -> None:
    layer = torch.nn.LayerNorm(4)
    kept = [layer(torch.ones(2, 4)) for _ in range(3)]
    assert _C.uses_of_weights(kept) == 3
    kept[0].sum().backward()
    assert _C.uses_of_weights(kept) == 2
    assert _C.uses_of_weights(kept[:1]) == 0
    assert _C.uses_of_weights([torch.ones(1)]) == 0


def test_gradients_are_read_without_a_collection() -> None:
    """Its finalizers would let other threads begin a backward meanwhile."""
    weights = [torch.zeros(1, requires_grad=True) for _ in range(300)]
    torch.stack(weights).sum().backward()
    collections = []
    gc.callbacks.append(lambda phase, _: collections.append(phase))
    before = gc.get_threshold()
    try:
        gc.set_threshold(1, 1000, 1000)
        found = _C.gradients_of(weights)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.pop()
    assert len(found) == len(weights)
    assert len(collections) < 10
