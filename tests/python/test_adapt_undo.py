"""What is measured is undone: for models of many kinds, wherever the work has them from."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import brim
from brim._state import undo as _undo
from brim._state.random_state import RandomState
from brim._state.undo import Undo


def step_of(model: nn.Module) -> Callable[[int], None]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(n: int) -> None:
        model(torch.ones(n, 2)).sum().backward()
        optimizer.step()

    return step


def tensors_of(model: nn.Module) -> dict[str, Any]:
    """Values and gradients, as plain values."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    gradients = {name: None if t.grad is None else t.grad.tolist() for name, t in found.items()}
    return {name: (t.tolist(), gradients[name]) for name, t in found.items()}


class Averages(nn.Module):
    """Assigns a new buffer, a new parameter and additional ones at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        self.scale = nn.Parameter(self.scale * 2)
        self.register_parameter(f"more{self.calls}", nn.Parameter(torch.ones(2)))
        self.register_buffer(f"other{self.calls}", torch.ones(2), persistent=False)
        return self.linear(x) * self.scale


def test_tensors_that_are_assigned_anew_are_put_back() -> None:
    model = Averages()
    before, parameter = tensors_of(model), model.scale
    with Undo(True, step := step_of(model)):
        step(3)
        assert "more1" in model._parameters
    assert tensors_of(model) == before
    assert model.scale is parameter
    assert not model._non_persistent_buffers_set


def with_expanded_buffer() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(1, 2).expand(3, 2))
    return model


def test_an_expanded_buffer_is_put_back() -> None:
    model = with_expanded_buffer()
    step = step_of(model)
    before = tensors_of(model)
    with Undo(True, step):
        step(3)
        model.mask[0] += 1
        assert tensors_of(model) != before
    assert tensors_of(model) == before


def fail(before: object) -> None:
    raise ValueError("cannot put back")


def test_all_is_put_back_although_something_fails() -> None:
    model = nn.Linear(2, 2)
    step = step_of(model)
    before = tensors_of(model)
    with pytest.raises(ValueError, match="cannot put back"), Undo([(lambda: 0, fail), model]):
        step(3)
    assert tensors_of(model) == before


def test_an_error_of_the_work_is_not_hidden(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError, match="mine"), Undo((lambda: 0, fail)):
        raise KeyError("mine")
    assert "cannot put back" in caplog.text


def test_uninitialised_parameters_are_left_alone_and_named() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(2))

    def step(n: int) -> None:
        model(torch.ones(n, 2)).sum().backward()

    before = model[0].weight.tolist()
    with Undo(True, step) as undo:
        step(3)
    assert model[0].weight.tolist() == before
    assert model[0].weight.grad is None
    assert str(undo) == (
        "Sequential and the random state, not Sequential.1.weight, Sequential.1.bias "
        "(not initialised)"
    )


@pytest.mark.parametrize("dense", [False, True])
def test_sparse_gradients_and_buffers_are_put_back(dense: bool) -> None:
    model = nn.Embedding(5, 2, sparse=True)
    model.register_buffer("ones", torch.eye(2).to_sparse())

    def step(n: int) -> None:
        model(torch.arange(n)).sum().backward()
        model.ones.mul_(2)

    step(2)
    before, ones = model.weight.grad.to_dense(), model.ones.to_dense()
    with Undo(True, step):
        step(4)
        if dense:
            model.weight.grad = torch.ones(5, 2)
    assert model.weight.grad.is_sparse
    assert torch.equal(model.weight.grad.to_dense(), before)
    assert torch.equal(model.ones.to_dense(), ones)


@pytest.fixture
def imported() -> Iterator[types.ModuleType]:
    """A file of the user's that holds a model."""
    module = types.ModuleType("torch_training")
    sys.modules["torch_training"] = module
    code = """
import torch
model = torch.nn.Linear(2, 2)
def step(n):
    model(torch.ones(n, 2)).sum().backward()
"""
    exec(code, module.__dict__)
    yield module
    del sys.modules["torch_training"]


class Holder:
    """Has its model in the class."""

    model = nn.Linear(2, 2)

    def step(self, n: int) -> None:
        self.model(torch.ones(n, 2)).sum().backward()


class WithData:
    """Has its model behind more objects than the search looks at."""

    def __init__(self) -> None:
        self.data = [[i] for i in range(30_000)]
        self.inner = types.SimpleNamespace(model=nn.Linear(2, 2))

    def step(self, n: int) -> None:
        self.inner.model(torch.ones(n, 2)).sum().backward()


def test_models_are_found_wherever_the_work_has_them(imported: types.ModuleType) -> None:
    package = types.ModuleType("mine")
    package.inner = types.ModuleType("mine.inner")
    package.inner.model, package.inner.other = nn.Linear(2, 2), nn.Linear(2, 2)
    package.inner.mine = package

    def of_package(n: int) -> None:
        package.inner.model(torch.ones(n, 2)).sum().backward()

    def of_class(n: int) -> None:
        Holder.model(torch.ones(n, 2)).sum().backward()

    far = WithData()
    for step, model in (
        (imported.step, imported.model),
        (of_package, package.inner.model),
        (of_class, Holder.model),
        (Holder().step, Holder.model),
        (far.step, far.inner.model),
    ):
        with Undo(True, step) as undo:
            step(3)
        assert str(undo) == "Linear and the random state"
        assert model.weight.grad is None


@pytest.mark.parametrize("trains", [False, True])
def test_training_that_was_not_found_is_told(trains: bool) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hidden = weakref.ref(model), weakref.ref(optimizer)

    def work(n: int) -> None:
        found, its_optimizer = hidden[0](), hidden[1]()
        assert found is not None
        assert its_optimizer is not None
        if trains:
            found(torch.ones(n, 2)).sum().backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
        else:  # what it makes itself needs no restoring
            nn.Linear(2, 2)(found(torch.ones(n, 2)).detach()).sum().backward()

    if trains:
        with pytest.warns(UserWarning, match=r"2 of modules that were not found; .*restore=\["):
            brim.MemoryModel.probe(work, [1, 2, 4], "cpu")
    else:
        brim.MemoryModel.probe(work, [1, 2, 4], "cpu")  # warnings are errors here


def test_frozen_parameters_are_watched_and_copied_if_named() -> None:
    base, head = nn.Linear(2, 512).requires_grad_(False), nn.Linear(512, 1)
    model = nn.Sequential(base, head)

    def work(n: int) -> None:
        model(torch.ones(n, 2)).sum().backward()

    def average(n: int) -> None:
        work(n)
        base.weight.data.mul_(0.5)  # as a teacher is updated; its version stays

    with Undo(True, work):
        work(3)
    told = pytest.warns(UserWarning, match=r"not put back: Sequential\.0\.weight; pass")
    with told, Undo(True, average):
        average(3)
    assert head.weight.grad is None
    before = base.weight.tolist()
    with Undo(model):
        average(3)
    assert base.weight.tolist() == before


def test_frozen_parameters_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    real = _undo._copy
    monkeypatch.setattr(_undo, "_copy", lambda t, copies: copied.append(t) or real(t, copies))
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    Undo(True, lambda: model)
    assert {id(tensor) for tensor in copied} == {id(tensor) for tensor in model[1].parameters()}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("steps", [0, 1])
def test_of_sharded_parameters_this_ranks_part_is_copied(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)

    def step(n: int) -> None:
        (weight * n).sum().backward()
        optimizer.step()

    for _ in range(steps):
        step(2)
    before = weight.full_tensor().tolist()

    def refuse(tensor: object, copies: object) -> None:
        raise AssertionError("a deep copy would be on the device")

    monkeypatch.setattr(DTensor, "__deepcopy__", refuse)
    with Undo(True, step):
        step(3)
        optimizer.zero_grad()
    assert weight.full_tensor().tolist() == before
    if steps:
        assert isinstance(weight.grad, DTensor)
        assert weight.grad.full_tensor().tolist() == [[2.0, 2.0]] * 4
    else:
        assert weight.grad is None


def test_random_states_do_not_count_as_memory_in_use(
    monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    """Else work that holds nothing on the CPU would seem to, where a GPU is in use as well."""
    set_again: list[Any] = []
    accelerator = types.SimpleNamespace(
        is_initialized=lambda: True,
        get_rng_state_all=lambda: [torch.zeros(16, dtype=torch.uint8)],
        set_rng_state_all=set_again.extend,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda: accelerator)
    state = RandomState()
    assert brim.memory_stats("cpu").allocated == held
    state.put_back()
    assert set_again[0].tolist() == [0] * 16


def test_optimizer_state_in_containers_of_their_own_classes_is_put_back() -> None:
    class Record(dict[str, Any]):
        pass

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for own in self.state.values():
                own["record"]["sum"] += 1
                own["pair"][0].add_(1)

    weight = nn.Parameter(torch.ones(2))
    optimizer = Counting([weight], 0.1)
    optimizer.state[weight] = {"record": Record(sum=torch.ones(2)), "pair": (torch.ones(2),)}
    with Undo([optimizer]):
        optimizer.step()
    own = optimizer.state[weight]
    assert own["record"]["sum"].tolist() == own["pair"][0].tolist() == [1.0, 1.0]
