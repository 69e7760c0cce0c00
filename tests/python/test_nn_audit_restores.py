"""brim.audit leaves the model, its input, memory and the random state as they were."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import brim

from .audit_cases import ELEMENTS, C, by_name, image


class Everything(nn.Module):
    """Changes its buffers, its input and the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(inplace=True), nn.BatchNorm2d(C), nn.Dropout(0.5), nn.Conv2d(C, C, 3)
        )
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor, *, scale: float = 1.0, more: Any = None) -> dict[str, Tensor]:
        self.calls += random.random() + np.random.random()
        return {"y": self.layers(x) * scale + more["z"][0]}


def test_the_model_is_as_it_was() -> None:
    model = Everything()
    model.layers[0].eval()
    x = image()
    z = torch.ones((), requires_grad=True)
    model(x.clone(), more={"z": [z]})["y"].sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    buffers = {name: (id(b), b._version) for name, b in model.named_buffers()}
    classes = [type(module) for module in model.modules()]
    flags = [module.training for module in model.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    values, states = x.clone(), (torch.get_rng_state(), random.getstate())
    numpys = pickle.dumps(np.random.get_state())

    audit = brim.audit(model, x, scale=2.0, more={"z": [z]})
    assert 0 < audit.brim < audit.torch_nn

    assert torch.equal(x, values)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert {name: (id(b), b._version) for name, b in model.named_buffers()} == buffers
    assert "nothing" in model._buffers
    assert len(grads) == len(list(model.parameters()))
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)  # type: ignore[arg-type]
    assert [type(module) for module in model.modules()] == classes
    assert [module.training for module in model.modules()] == flags
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert pickle.dumps(np.random.get_state()) == numpys


def test_the_model_is_as_it_was_after_an_error() -> None:
    model = nn.Sequential(nn.BatchNorm2d(C), nn.Conv2d(3, 3, 3))
    mean = model[0].running_mean
    with pytest.raises((RuntimeError, ValueError)):
        brim.audit(model, image())
    assert [type(layer) for layer in model] == [nn.BatchNorm2d, nn.Conv2d]
    assert model[0].running_mean is mean
    assert torch.equal(mean, torch.zeros(C))  # type: ignore[arg-type]
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def scripted() -> nn.Sequential:
    norm = nn.BatchNorm2d(C)
    traced = torch.jit.trace(nn.BatchNorm2d(C).eval(), image())  # type: ignore[no-untyped-call]
    return nn.Sequential(nn.Conv2d(C, C, 1), torch.jit.script(norm), nn.ReLU(), traced)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")
@pytest.mark.parametrize("fails", [False, True])
def test_modules_of_torch_jit_are_measured_and_stay_as_they_were(fails: bool) -> None:
    model = scripted()
    if fails:
        model.append(nn.Conv2d(3, 3, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    addresses = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    classes = [type(module) for module in model.modules()]
    if fails:
        with pytest.raises((RuntimeError, ValueError)):
            brim.audit(model, image())
    else:
        figures = by_name(brim.audit(model, image()))
        # The scripted layers are not entered: what they keep is the model's.
        assert figures["(model)"][0] >= 4 * ELEMENTS
        assert figures["2"][:2] == (4 * ELEMENTS, ELEMENTS // 8)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == addresses
    assert [type(module) for module in model.modules()] == classes
    assert model[1].num_batches_tracked == 0
    if not fails:
        model(image()).sum().backward()
        assert model[1].num_batches_tracked == 1


def test_buffers_come_back_where_one_cannot_be_copied() -> None:
    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(2).as_subclass(NoCopy))

    model = nn.Sequential(nn.BatchNorm2d(C), Unusual(), nn.BatchNorm2d(C))
    buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
    with pytest.raises(RuntimeError, match="no copy"):
        brim.audit(model, image())
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == buffers


class NoCopy(Tensor):
    """A tensor that cannot be copied."""

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no copy")


def test_nothing_stays_in_memory() -> None:
    model = nn.Sequential(nn.Conv2d(C, C, 3), nn.ReLU())
    x = image()
    brim.install_cpu_allocator()
    brim.audit(model, x)
    with brim.PeakMeter("cpu") as meter:
        brim.audit(model, x)
    assert meter.left == 0


def test_lazy_layers_get_their_sizes_on_a_copy() -> None:
    def net(of: str) -> nn.Sequential:
        torch.manual_seed(0)
        sizes = {"": [(C,), (C,), (C,)], "Lazy": [(), (), ()]}[of]
        return nn.Sequential(
            getattr(nn, of + "Conv2d")(*sizes[0], C, 3),
            getattr(nn, of + "BatchNorm2d")(*sizes[1]),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            getattr(nn, of + "Linear")(*sizes[2], 2),
        )

    whole, lazy, x = net(""), net("Lazy"), image()
    state = torch.get_rng_state()
    found = brim.audit(lazy, x)
    kept = brim.assert_saved(lazy, x, at_most="1MiB")
    assert torch.equal(torch.get_rng_state(), state)
    assert found == brim.audit(whole, x)
    assert kept == found.torch_nn
    assert type(lazy[0]) is nn.LazyConv2d
    assert all(isinstance(p, nn.parameter.UninitializedParameter) for p in lazy.parameters())


def test_out_of_memory_is_raised_and_never_another_least() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    x = torch.ones(4, 8)
    right = brim.audit(model, x)
    with brim.testing.inject_oom(at=2**40) as counted:
        brim.audit(model, x)
    raised = 0
    for at in range(1, counted.allocations + 1, 3):
        try:
            with brim.testing.inject_oom(at=at):
                assert brim.audit(model, x) == right
        except torch.OutOfMemoryError:
            raised += 1
    assert raised > 0
    assert brim.audit(model, x) == right


def test_what_convert_left_out_stays_left_out() -> None:
    class Gate(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (
                torch.relu(self.inner(x)) * x
            )  # a product: its functions are redirected by a mode

    model = torch.nn.Sequential(Gate(), Gate())
    brim.convert(model, skip="1.inner")
    before = list(model[1].inner._forward_pre_hooks.values())
    assert before
    brim.audit(model, torch.ones(2, 4))
    assert list(model[1].inner._forward_pre_hooks.values()) == before
