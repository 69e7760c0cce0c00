"""What a failed attempt did is put back exactly (`restore=`), or named in a warning."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import brim

MIB = 2**20


class Trained(nn.Module):
    """A little of what training changes: parameters, running statistics, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=2),
}


class Job:
    """A training step that adapts its batch size, and all that it changes."""

    def __init__(self, optimizer: str, steps_before: int, grads: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Trained()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.x, self.y = torch.rand(8, 6), torch.rand(8, 3)
        for _ in range(steps_before):
            self.work(8)
        if grads == "none":
            self.model.zero_grad(set_to_none=True)
        elif grads == "some":
            for i, parameter in enumerate(self.model.parameters()):
                parameter.grad = torch.full_like(parameter, 0.5) if i % 2 else None
        restore = [self.model, self.optimizer]
        self.step = brim.batch(8, restore=restore, **options)(self.work)

    def work(self, batch_size: int) -> float:
        def closure() -> torch.Tensor:
            parts = zip(self.x.split(8), self.y.split(8), strict=True)
            losses = [nn.functional.mse_loss(self.model(x), y) for x, y in parts]
            for loss in losses:
                loss.backward()
            return losses[0].detach()

        return float(self.optimizer.step(closure))  # type: ignore[arg-type]

    def all(self) -> dict[str, Any]:
        return {
            "parameters": [p.detach().clone() for p in self.model.parameters()],
            "gradients": [
                None if p.grad is None else p.grad.clone() for p in self.model.parameters()
            ],
            "buffers": [b.clone() for b in self.model.buffers()],
            "state": copy.deepcopy(self.optimizer.state_dict()),
        }


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Bit for bit, and with the same structure."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    else:
        assert one == other, where


@pytest.mark.parametrize(
    ("optimizer", "steps_before", "grads"),
    [
        ("SGD", 0, "none"),
        ("SGD", 2, "some"),
        ("Adam", 0, "none"),
        ("Adam", 1, "all"),
        ("AdamW, one by one", 1, "some"),
        ("LBFGS", 1, "all"),
    ],
)
def test_a_training_step_is_the_same_wherever_it_fails(
    optimizer: str, steps_before: int, grads: str
) -> None:
    """Each allocation of the step fails in turn, those that save the state included."""
    brim.install_cpu_allocator()

    def run(at: int, count: int) -> tuple[Any, dict[str, Any], int, int]:
        job = Job(optimizer, steps_before, grads)
        torch.manual_seed(1)
        with brim.testing.inject_oom(at=at, count=count) as injected:
            loss = job.step()
        return loss, job.all(), injected.allocations, injected.failures

    loss, expected, allocations, _ = run(10**9, 1)
    assert allocations > 30
    for at in range(1, allocations + 1):
        other, state, _, failures = run(at, 1)
        assert failures == 1
        assert other == loss
        assert_same(state, expected, f"failing at allocation {at}: ")


def test_without_restore_the_same_step_depends_on_where_it_failed() -> None:
    """The test above can fail."""

    def gradient(at: int) -> torch.Tensor:
        parameter = torch.ones(4, requires_grad=True)

        @brim.batch(4)
        def step(size: int) -> None:
            parameter.sum().backward()  # type: ignore[no-untyped-call]
            torch.empty(64)

        with brim.testing.inject_oom(at=at):
            step()
        assert parameter.grad is not None
        return parameter.grad

    brim.install_cpu_allocator()
    assert gradient(10**9).tolist() == [1, 1, 1, 1]
    assert any(gradient(at).tolist() == [2, 2, 2, 2] for at in range(1, 8))


def fails_once() -> Callable[[], None]:
    left = [1]

    def fail() -> None:
        if left:
            left.pop()
            raise torch.OutOfMemoryError("CPU out of memory.")

    return fail


def test_gradients_that_were_none_are_none_again_and_others_keep_their_tensor() -> None:
    model = nn.Linear(3, 3)
    kept = torch.ones(3)
    model.bias.grad = kept
    fail, seen = fails_once(), []

    @brim.batch(4, restore=model)
    def step(size: int) -> None:
        seen.append((model.weight.grad is None, model.bias.grad is kept, kept.tolist()))
        model.weight.grad = torch.ones(3, 3)
        model.bias.grad = torch.zeros(3)
        kept.fill_(7)
        fail()

    step()
    assert seen == [(True, True, [1, 1, 1])] * 2


def test_buffers_are_put_back_although_their_version_does_not_tell() -> None:
    norm, fail = nn.BatchNorm1d(4), fails_once()

    @brim.maximize("n", restore=norm)
    def forward(n: int) -> None:
        norm(torch.rand(n, 4))
        fail()

    forward(16)
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 1


def test_a_tensor_is_put_back_with_its_gradient_and_its_version() -> None:
    tensor = torch.zeros(3)
    leaf = torch.ones(3, requires_grad=True)
    fail = fails_once()
    versions = []

    @brim.batch(4, restore=[tensor, leaf])
    def work(size: int) -> None:
        versions.append(leaf._version)
        tensor.add_(1)
        leaf.grad = torch.ones(3)
        fail()

    work()
    assert tensor.tolist() == [1, 1, 1]
    assert versions == [0, 0], "autograd must not think that the leaf was changed"


def test_memory_that_a_tensor_was_given_is_taken_away_again() -> None:
    tensor, fail = torch.zeros(3), fails_once()
    before = tensor.data_ptr()

    @brim.batch(4, restore=tensor)
    def work(size: int) -> tuple[int, list[float]]:
        seen = (tensor.data_ptr(), tensor.tolist())
        tensor.data = torch.ones(5)
        fail()
        return seen

    assert work() == (before, [0, 0, 0])


def test_a_pair_of_callables_saves_and_puts_back() -> None:
    log: list[int] = []
    count = [0]

    def put_back(length: int) -> None:
        del log[length:]

    @brim.batch(8, restore=(lambda: len(log), put_back), strategy="halving")
    def work(size: int) -> None:
        log.append(size)
        count[0] += 1
        if size > 2:
            raise torch.OutOfMemoryError("CPU out of memory.")

    work()
    work()
    assert log == [2, 2]
    assert count == [4]


def test_arguments_are_named_and_methods_name_self() -> None:
    class Model(nn.Linear):
        @brim.maximize("n", restore=["self", "extra", "optimizer"])
        def step(
            self,
            n: int,
            extra: torch.Tensor,
            *,
            fail: Callable[[], None],
            optimizer: torch.optim.Optimizer,
        ) -> None:
            self(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            extra.add_(1)
            fail()

    def result(fail: Callable[[], None]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, extra = Model(3, 3), torch.zeros(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.step(4, extra, fail=fail, optimizer=optimizer)
        assert model.weight.grad is not None
        return [model.weight, model.weight.grad, extra]

    for one, other in zip(result(lambda: None), result(fails_once()), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("strategy", ["predictive", "halving"])
def test_a_chunk_is_put_back(strategy: Any, held: int) -> None:
    out = torch.zeros(4096)

    @brim.chunked(4096, restore="chunk", strategy=strategy)
    def work(chunk: torch.Tensor, start: int, end: int) -> None:
        chunk.add_(1)
        torch.empty(len(chunk) * 16384, dtype=torch.uint8)

    held = brim.memory_stats("cpu").allocated
    with brim.budget(held + 8 * MIB, "cpu"):
        _, attempts = work.record(out)
    assert any(not attempt.fitted for attempt in attempts) or strategy == "predictive"
    assert out.unique().tolist() == [1]


def test_parts_that_are_done_stay_done() -> None:
    total, fail = torch.zeros(1), fails_once()

    @brim.range(2, restore=total, strategy="halving")
    def work(start: int, end: int) -> None:
        total.add_(end - start)
        if start == 4:
            fail()

    work(0, 10)
    assert total.item() == 10


def test_what_fails_for_good_leaves_nothing_behind() -> None:
    tensor = torch.zeros(3)

    @brim.batch(8, restore=tensor)
    def work(size: int) -> None:
        tensor.add_(1)
        raise torch.OutOfMemoryError("CPU out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        work()
    assert tensor.tolist() == [0, 0, 0]


def test_another_error_passes_and_changes_nothing() -> None:
    tensor = torch.zeros(3)

    @brim.batch(8, restore=tensor)
    def work(size: int) -> None:
        tensor.add_(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        work()
    assert tensor.tolist() == [1, 1, 1]


def test_the_copies_are_released_with_the_call(held: int) -> None:
    tensor = torch.zeros(MIB)
    before = brim.memory_stats("cpu").allocated
    during = []

    @brim.batch(8, restore=tensor)
    def work(size: int) -> None:
        during.append(brim.memory_stats("cpu").allocated - before)

    work()
    assert during == [4 * MIB]
    assert brim.memory_stats("cpu").allocated == before


def test_the_copies_are_not_memory_that_later_calls_may_use(held: int) -> None:
    state = torch.zeros(8 * MIB, dtype=torch.uint8)

    @brim.maximize("size", device="cpu", restore=state)
    def kept(size: int) -> None:
        _ = [torch.empty(size * 1024, dtype=torch.uint8) for _ in range(5)]

    with brim.budget(held + 48 * MIB, device="cpu"):
        calls = [kept.record(100_000)[1] for _ in range(6)]
    assert all(len(call) == 1 for call in calls[1:]), calls


def test_a_function_that_restores_itself_can_be_collected() -> None:
    class Owner(nn.Module):
        pass

    owner = Owner()
    owner.step = brim.batch(8, restore=owner)(lambda size: size)  # type: ignore[assignment]
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("wrong", [3, b"x", {"a": 1}, [3], (len,), lambda: None])
def test_what_cannot_be_restored_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(TypeError, match="restore must be a module, an optimizer, a tensor"):
        brim.batch(8, restore=wrong)(lambda size: size)


def test_restore_names_an_argument_that_there_is() -> None:
    with pytest.raises(ValueError, match="restore: 'modle' is not an argument"):
        brim.maximize("n", restore="modle")(lambda model, n: n)
    adaptive = brim.maximize("n", restore="model")(lambda model, n: n)
    with pytest.raises(TypeError, match="restore names model, which must be a module"):
        adaptive(3, 1)


def test_an_empty_list_restores_nothing() -> None:
    assert brim.run_batch(8, lambda size: size, restore=[]) == 8


# ---- changes that nobody puts back ---------------------------------------------------------------


def caught(work: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        work()
    return [str(warning.message) for warning in found]


def test_an_argument_that_a_failed_attempt_changed_is_named_once() -> None:
    fails: list[Callable[[], None]] = []

    @brim.maximize("n")
    def work(x: torch.Tensor, n: int, *, out: torch.Tensor, other: torch.Tensor) -> None:
        out[:1].add_(1)
        fails.pop()()

    def call() -> None:
        fails.extend([lambda: None, fails_once()])
        work(torch.zeros(2), 8, out=torch.zeros(2), other=torch.zeros(2))

    first = caught(call)
    assert len(first) == 1
    assert "had already changed out in place" in first[0]
    assert 'restore="out"' in first[0]
    assert caught(call) == []


def test_the_chunked_tensor_is_named_by_the_name_of_the_chunk() -> None:
    messages = caught(lambda: brim.run_chunked(torch.zeros(4), 4, _changing(), strategy="halving"))
    assert len(messages) == 1
    assert "had already changed part in place" in messages[0]


def _changing() -> Callable[[torch.Tensor, int, int], None]:
    def work(part: torch.Tensor, start: int, end: int) -> None:
        part.add_(1)
        if end - start > 1:
            raise torch.OutOfMemoryError("CPU out of memory.")

    return work


@pytest.mark.parametrize(
    ("options", "change"),
    [
        pytest.param({"restore": "x"}, lambda x: x.add_(1), id="restored"),
        pytest.param({"restore": "x"}, lambda x: x[1:].add_(1), id="a view is written to"),
        pytest.param({}, lambda x: x + 1, id="only read"),
    ],
)
def test_no_warning_where_there_is_nothing_to_say(
    options: Any, change: Callable[[torch.Tensor], object]
) -> None:
    fail = fails_once()

    @brim.maximize("n", **options)
    def work(x: torch.Tensor, n: int) -> None:
        change(x)
        fail()

    assert caught(lambda: work(torch.zeros(4), 8)) == []


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        x = torch.zeros(4)
    fail = fails_once()

    @brim.maximize("n")
    def work(x: torch.Tensor, n: int) -> None:
        fail()

    assert caught(lambda: work(x, 8)) == []
