"""brim.nn inside the rest of torch: what must go on working, and what must be refused clearly."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import brim

from .nn_cases import ONE_OF_EACH, Case, cotangent_of, near, pair, same_bits, set_needs

ALL = [pytest.param(case, id=case.layer) for case in ONE_OF_EACH]
WITH_WEIGHTS = [pytest.param(case, id=case.layer) for case in ONE_OF_EACH if len(case.needs()) > 1]
FLOATS_OF_AUTOCAST = [c for c in ONE_OF_EACH if c.layer not in ("MaxPool3d", "AvgPool3d")]


@pytest.fixture(scope="module", autouse=True)
def _load_what_torch_loads_late() -> None:
    """torch.compile brings a million objects; frozen, they slow no later collection."""
    import torch._dynamo
    import torch._inductor  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture
def _compiler() -> Iterator[None]:
    """A fresh one; what it leaves behind slows no later collection either."""
    with warnings.catch_warnings():  # some versions of torch use what they deprecate
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.compiler.reset()
    yield
    torch.compiler.reset()
    gc.collect()
    gc.freeze()


def small_net(of: Any = brim.nn) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        of.Conv2d(3, 4, 3, padding=1),
        of.BatchNorm2d(4),
        of.ReLU(inplace=True),
        of.MaxPool2d(2),
        of.Conv2d(4, 4, 3),
        of.GELU(),
        of.Dropout(0.2),
        of.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        of.Linear(4, 2),
    )


def step(
    net: nn.Module, x: torch.Tensor, call: Callable[..., torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """The loss, and the gradients of the input and of all parameters."""
    x = x.detach().clone().requires_grad_()
    net.zero_grad()
    torch.manual_seed(5)
    y = net(x) if call is None else call(x)
    y.backward(cotangent_of(y, "contiguous"))
    grads = [p.grad for p in (x, *net.parameters()) if p.grad is not None]
    assert grads
    return [y.detach(), *(g.clone() for g in grads)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# torch's own: it loads parts of itself late, and tells of slow ways that give the right result.
TORCH_LOADS = pytest.mark.filterwarnings("ignore:`torch.jit.script")
NO_BATCHING_RULE = pytest.mark.filterwarnings("ignore:There is a performance drop")
MIXED_RMS_NORM = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


# -- Autocast -------------------------------------------------------------------------------------


@MIXED_RMS_NORM
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.layer) for c in FLOATS_OF_AUTOCAST])
def test_autocast(case: Case, dtype: torch.dtype, frozen: bool) -> None:
    """An input in either type; the weights are float32."""
    results = []
    for layer in pair(case, torch.float32):
        set_needs(layer, frozenset() if frozen else frozenset(["weight", "bias"]))
        leaf = case.input(dtype).requires_grad_()
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(leaf)
        wanted = [t for t in (leaf, *layer.parameters()) if t.requires_grad]
        results.append([y.detach(), *torch.autograd.grad(y, wanted, cotangent_of(y, "contiguous"))])
    ours, torchs = results
    assert same_bits(ours[0], torchs[0], case.keeps_sign_of_zero)
    exact = case.exact(frozenset(["input"] if frozen else ["input", "weight", "bias"]))
    for a, b in zip(ours[1:], torchs[1:], strict=True):
        assert same_bits(a, b, case.keeps_sign_of_zero) if exact else near(a, b)


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_autocast_with_one_layer_called_twice(frozen: bool) -> None:
    """The cache of casts must serve both calls."""
    results = []
    for of in (brim.nn, nn):
        torch.manual_seed(0)
        layer = of.Linear(8, 8).requires_grad_(not frozen)
        x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(torch.relu(layer(x)))
        wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
        results.append([y.detach(), *torch.autograd.grad(y.float().sum(), wanted)])
    assert same(*results)


def test_autocast_within_a_net() -> None:
    ours, torchs = small_net(), small_net(nn)
    for net in (ours, torchs):
        net.train()

    def under_autocast(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        def call(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return net(x)

        return call

    assert same(
        step(ours, IMAGES, under_autocast(ours)), step(torchs, IMAGES, under_autocast(torchs))
    )


# -- Saved tensors elsewhere ----------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL)
def test_save_on_cpu(case: Case) -> None:
    ours, torchs = pair(case, torch.float32)

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=False):
            return ours(x)

    mine, theirs = (
        step(ours, case.input(torch.float32), call),
        step(torchs, case.input(torch.float32)),
    )
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b) if case.exact(frozenset(["input", "weight"])) else near(a, b)


@pytest.mark.parametrize("case", ALL)
def test_everything_kept_passes_the_hooks(case: Case) -> None:
    """What a hook gives back is what backward uses, and nothing is kept beside it."""
    ours, _ = pair(case, torch.float64)
    x = case.input(torch.float64).requires_grad_()
    kept: list[torch.Tensor] = []
    unpacked = []

    def pack(tensor: torch.Tensor) -> int:
        kept.append(tensor.detach().clone())
        return len(kept) - 1

    def unpack(place: int) -> torch.Tensor:
        unpacked.append(place)
        return kept[place]

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = ours(x)
    y.sum().backward()
    assert set(unpacked) <= set(range(len(kept)))
    if not case.layer.startswith(("Avg", "Adaptive")):
        assert unpacked


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool) -> None:
    ours, torchs = small_net(), small_net(nn)
    # In train mode the second forward would move the running statistics once more, as in torch.
    for net in (ours, torchs):
        net[1].eval()

    def call(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(ours, x, use_reentrant=reentrant)

    assert same(step(ours, IMAGES, call), step(torchs, IMAGES))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("case", ALL)
def test_checkpoint_of_each_layer(case: Case, reentrant: bool) -> None:
    ours, torchs = pair(case, torch.float32)
    mine = step(
        ours,
        case.input(torch.float32),
        lambda x: checkpoint(ours, x.clone(), use_reentrant=reentrant),
    )
    theirs = step(torchs, case.input(torch.float32))
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b) if case.exact(frozenset(["input", "weight"])) else near(a, b)


def test_a_kept_tensor_changed_in_place_is_seen() -> None:
    conv = brim.nn.Conv2d(3, 4, 3)
    x = torch.randn(1, 3, 5, 5, requires_grad=True)
    hidden = x * 2
    y = conv(hidden)
    hidden.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    conv.weight.requires_grad_(False)  # then the input is not kept and may change
    hidden = x * 2
    y = conv(hidden)
    hidden.mul_(2)
    y.sum().backward()
    relu = brim.nn.ReLU()
    y = relu(x * 2)
    expected = torch.autograd.grad((y * 1).sum(), x, retain_graph=True)[0]
    y.mul_(3)  # bits are kept, not the output
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], 3 * expected)


def test_a_weight_changed_in_place_is_seen() -> None:
    linear = brim.nn.Linear(3, 2)
    y = linear(torch.randn(4, 3, requires_grad=True))
    with torch.no_grad():
        linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# -- Copies, states, hooks ------------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies(case: Case, way: str) -> None:
    layer, _ = pair(case, torch.float32)
    if way == "deepcopy":
        other = copy.deepcopy(layer)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    else:
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        other = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert type(other) is type(layer) is getattr(brim.nn, case.layer)
    x = case.input(torch.float32)
    assert same(step(layer, x), step(other, x))
    for a, b in zip(layer.parameters(), other.parameters(), strict=True):
        assert a.data_ptr() != b.data_ptr()


@pytest.mark.parametrize("case", ALL)
def test_states_go_both_ways(case: Case) -> None:
    ours, torchs = case.make(brim.nn, torch.float32), case.make(nn, torch.float32)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    with torch.no_grad():
        for tensor in ours.state_dict().values():
            tensor.add_(1)
    assert torchs.load_state_dict(ours.state_dict()) == ours.load_state_dict(torchs.state_dict())
    for a, b in zip(ours.state_dict().values(), torchs.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert repr(ours) == repr(torchs)


def test_a_checkpoint_file_of_weights_only() -> None:
    buffer = io.BytesIO()
    torch.save(small_net().state_dict(), buffer)
    buffer.seek(0)
    torchs = small_net(nn)
    torchs.load_state_dict(torch.load(buffer, weights_only=True))


@pytest.mark.parametrize("case", ALL)
def test_forward_and_backward_hooks(case: Case) -> None:
    seen: dict[str, list[str]] = {}
    for name, layer in zip(("brim", "torch"), pair(case, torch.float32), strict=True):
        calls: list[str] = []
        layer.register_forward_pre_hook(lambda *_, c=calls: c.append("before"))
        layer.register_forward_hook(lambda *_, c=calls: c.append("after"))
        layer.register_full_backward_pre_hook(lambda *_, c=calls: c.append("back before"))
        layer.register_full_backward_hook(
            lambda m, gi, go, c=calls: c.append(f"back {[tuple(g.shape) for g in (*gi, *go)]}")
        )
        x = case.input(torch.float32).requires_grad_()
        x.register_hook(lambda g, c=calls: c.append(f"input {tuple(g.shape)}"))
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, c=calls: c.append("parameter"))
        y = layer(x)
        y.register_hook(lambda g, c=calls: c.append(f"output {tuple(g.shape)}"))
        y.sum().backward()
        seen[name] = sorted(calls)
    assert seen["brim"] == seen["torch"]
    assert len(seen["brim"]) >= 6


def test_a_backward_hook_can_change_the_gradient() -> None:
    layer = brim.nn.Linear(3, 2)
    layer.register_full_backward_hook(lambda m, gi, go: (gi[0] * 10,))
    x = torch.randn(4, 3, requires_grad=True)
    layer(x).sum().backward()
    assert torch.allclose(x.grad, 10 * layer.weight.sum(0).expand(4, 3))


# -- Parametrizations, functional calls -----------------------------------------------------------


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
@pytest.mark.parametrize("layer", ["Linear", "Conv2d", "ConvTranspose2d"])
def test_parametrizations_are_honoured(layer: str, name: str) -> None:
    results = []
    for of in (brim.nn, nn):
        torch.manual_seed(0)
        made = of.Linear(6, 4) if layer == "Linear" else getattr(of, layer)(6, 4, 3)
        getattr(torch.nn.utils.parametrizations, name)(made)
        x = torch.randn((5, 6) if layer == "Linear" else (2, 6, 5, 5))
        results.append(step(made.train(), x))
        results[-1] += step(made.eval(), x)
    assert same(*results)


def test_convert_leaves_a_parametrized_layer_alone() -> None:
    net = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.ReLU())
    report = brim.convert(net)
    assert isinstance(net[1], brim.nn.ReLU)
    assert not isinstance(net[0], brim.nn.Linear)
    assert "parametriz" in str(report)


@pytest.mark.parametrize("case", WITH_WEIGHTS)
def test_functional_call(case: Case) -> None:
    ours, torchs = pair(case, torch.float32)
    found = []
    for layer in (ours, torchs):
        own = {name: (p * 2).detach().requires_grad_() for name, p in layer.named_parameters()}
        x = case.input(torch.float32).requires_grad_()
        y = functional_call(layer, own, (x,))
        found.append([y, *torch.autograd.grad(y.sum(), [x, *own.values()])])
        assert all(p.grad is None for p in layer.parameters())
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b) if case.exact(frozenset(["weight"])) else near(a, b)


# -- torch.func -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL)
def test_func_grad(case: Case) -> None:
    ours, torchs = pair(case, torch.float32)
    results = []
    for layer in (ours, torchs):
        parameters = dict(layer.named_parameters())

        def loss(p: dict[str, torch.Tensor], x: torch.Tensor, layer: nn.Module = layer) -> Any:
            return functional_call(layer, p, (x,)).square().sum()

        torch.manual_seed(0)
        layer.train(layer.training and not case.layer.startswith("BatchNorm"))
        for_parameters, for_input = grad(loss, argnums=(0, 1))(
            parameters, case.input(torch.float32)
        )
        results.append([*for_parameters.values(), for_input])
    for a, b in zip(*results, strict=True):
        assert near(a, b)  # norms take their differentiable formula here


@NO_BATCHING_RULE
@TORCH_LOADS
@pytest.mark.parametrize("case", ALL)
def test_vmap_gives_the_result_or_says_why_not(case: Case) -> None:
    ours, torchs = pair(case, torch.float32)
    layers = [layer.eval().requires_grad_(False) for layer in (ours, torchs)]
    x = torch.stack([case.input(torch.float32)] * 3)
    try:
        mine = vmap(layers[0])(x)
    except (RuntimeError, NotImplementedError) as error:
        assert any(word in str(error) for word in ("vmap", "batching rule")), error  # noqa: PT017
    else:
        torch.testing.assert_close(mine, vmap(layers[1])(x))


@TORCH_LOADS
@pytest.mark.parametrize("case", ALL)
def test_forward_mode_is_refused(case: Case) -> None:
    layer, _ = pair(case, torch.float32)
    x = case.input(torch.float32)
    if case.layer.startswith("BatchNorm"):
        layer.eval()
    with pytest.raises(NotImplementedError, match="forward"):
        jvp(layer, (x,), (torch.ones_like(x),))


# -- torch.compile --------------------------------------------------------------------------------


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(
    ("case", "frozen"),
    [pytest.param(case, False, id=case.layer) for case in ONE_OF_EACH]
    + [
        pytest.param(case, True, id=f"{case.layer}-frozen")
        for case in ONE_OF_EACH
        if len(case.needs()) > 1
    ],
)
def test_compile_with_one_graph(case: Case, frozen: bool) -> None:
    ours, torchs = pair(case, torch.float32)
    for layer in (ours, torchs):
        layer.requires_grad_(not frozen)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = case.input(torch.float32)
    mine, theirs = step(ours, x, compiled), step(torchs, x)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(ours.buffers(), torchs.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_compile_of_a_net_with_changing_batches(frozen: bool) -> None:
    ours, torchs = small_net(), small_net(nn)
    for net in (ours, torchs):
        net.requires_grad_(not frozen)
        net[6].p = 0.0  # the compiler draws other random numbers
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (2, 5, 7):
        x = torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(n))
        for a, b in zip(step(ours, x, compiled), step(torchs, x), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("_compiler")
@TORCH_LOADS
@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_inductor(frozen: bool) -> None:
    ours, torchs = small_net(), small_net(nn)
    for net in (ours, torchs):
        net.requires_grad_(not frozen)
        net[6].p = 0.0
    compiled = torch.compile(ours, fullgraph=True)
    for a, b in zip(step(ours, IMAGES, compiled), step(torchs, IMAGES), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# -- Modes and devices ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(case: Case, mode: Callable[[], Any]) -> None:
    ours, torchs = pair(case, torch.float32)
    with mode():
        torch.manual_seed(0)
        mine = ours(case.input(torch.float32))
        torch.manual_seed(0)
        theirs = torchs(case.input(torch.float32))
    assert same_bits(mine, theirs, case.keeps_sign_of_zero)
    assert not mine.requires_grad
    assert mine.is_inference() == theirs.is_inference()


@pytest.mark.parametrize("case", ALL)
def test_meta_device(case: Case) -> None:
    ours, torchs = (layer.to("meta") for layer in pair(case, torch.float32))
    found = []
    for layer in (ours, torchs):
        x = torch.empty(case.shape, device="meta", requires_grad=True)
        y = layer(x)
        y.backward(torch.empty_like(y))
        found.append([y.detach(), *(p.grad for p in (x, *layer.parameters()))])
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()


@pytest.mark.parametrize("case", ALL)
def test_empty_batch(case: Case) -> None:
    """The same result as torch.nn, or the same kind of error."""
    found: list[Any] = []
    for layer in pair(case, torch.float32):
        shape = (0, *case.shape[1:]) if len(case.shape) > 1 else (0, *case.shape)
        x = torch.empty(shape, requires_grad=True)
        try:
            y = layer(x)
            grads = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
            found.append([y.detach(), *grads])
        except (RuntimeError, ValueError) as error:
            found.append(type(error))
    if isinstance(found[1], type):
        assert found[0] is found[1]
    else:
        for a, b in zip(*found, strict=True):
            assert same_bits(a, b)


# -- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=["c64", "c128"])
@pytest.mark.parametrize("case", ALL)
def test_complex_input_is_refused(case: Case, dtype: torch.dtype) -> None:
    layer, _ = pair(case, torch.float32)
    x = torch.zeros(case.shape, dtype=dtype, requires_grad=True)
    with pytest.raises(TypeError, match=r"float|floating"):
        layer(x)


@pytest.mark.parametrize("case", WITH_WEIGHTS)
def test_whole_numbers_are_refused(case: Case) -> None:
    layer, _ = pair(case, torch.float32)
    with pytest.raises(TypeError, match=r"float|floating"):
        layer(torch.zeros(case.shape, dtype=torch.int64))


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        (Case("Conv1d", (), (4, 6, 3)), (2, 3, 9)),
        (Case("Conv2d", (), (4, 6, 3)), (2, 3, 9, 9)),
        (Case("Conv2d", (), (4, 6, 3)), (9, 9)),
        (Case("Conv2d", (), (4, 6, 3)), (2, 4, 2, 2)),
        (Case("Conv3d", (), (4, 6, 3)), (1, 2, 4, 5, 5, 5)),
        (Case("ConvTranspose2d", (), (4, 6, 3)), (2, 3, 9, 9)),
        (Case("Linear", (), (4, 6)), (3, 5)),
        (Case("Linear", (), (4, 6)), ()),
        (Case("BatchNorm1d", (), (4,)), (3, 4, 5, 6)),
        (Case("BatchNorm2d", (), (4,)), (3, 4, 5)),
        (Case("BatchNorm2d", (), (4,)), (3, 5, 2, 2)),
        (Case("BatchNorm2d", (), (4,)), (1, 4, 1, 1)),
        (Case("BatchNorm3d", (), (4,)), (3, 4, 5)),
        (Case("LayerNorm", (), (8,)), (3, 7)),
        (Case("LayerNorm", (), ((5, 8),)), (8,)),
        (Case("GroupNorm", (), (2, 6)), (3, 4, 5)),
        (Case("GroupNorm", (), (2, 6)), (6,)),
        (Case("RMSNorm", (), (8,)), (3, 7)),
        (Case("MaxPool1d", (), (2,)), (3,)),
        (Case("MaxPool2d", (), (2,)), (3, 4)),
        (Case("MaxPool2d", (), (5,)), (2, 3, 4, 4)),
        (Case("MaxPool2d", (), (2,), {"padding": 2}), (2, 3, 4, 4)),
        (Case("MaxPool3d", (), (2,)), (3, 4, 4)),
        (Case("AvgPool2d", (), (2,)), (3, 4)),
        (Case("AvgPool2d", (), (5,)), (2, 3, 4, 4)),
        (Case("AvgPool2d", (), (2,), {"padding": 2}), (2, 3, 4, 4)),
        (Case("AvgPool3d", (), (2,), {"divisor_override": 0}), (2, 3, 4, 4, 4)),
        (Case("AdaptiveAvgPool1d", (), (2,)), (4,)),
        (Case("AdaptiveAvgPool2d", (), (2,)), (4, 4)),
        (Case("AdaptiveAvgPool3d", (), (2,)), (3, 4, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("needs_grad", [True, False], ids=["grad", "no_grad"])
def test_wrong_shapes_raise_where_torch_raises(
    case: Case, shape: tuple[int, ...], needs_grad: bool
) -> None:
    ours, torchs = case.make(brim.nn, torch.float32), case.make(nn, torch.float32)
    for layer in (torchs, ours):
        layer.requires_grad_(needs_grad)
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            layer(torch.zeros(shape, requires_grad=needs_grad))


@pytest.mark.parametrize("layer", ["ReLU", "ReLU6", "LeakyReLU", "Hardtanh", "SiLU", "Dropout"])
def test_in_place_on_a_leaf_is_refused(layer: str) -> None:
    x = torch.randn(5, requires_grad=True)
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        getattr(brim.nn, layer)(inplace=True)(x)
    assert torch.equal(x.detach(), before)


@pytest.mark.parametrize("layer", ["ReLU", "LeakyReLU", "Hardtanh", "SiLU", "Dropout"])
def test_in_place_gives_its_input_back(layer: str) -> None:
    made = getattr(brim.nn, layer)(inplace=True)
    x = torch.randn(5)
    assert made(x) is x
    hidden = torch.randn(5, requires_grad=True) * 1
    version = hidden._version
    assert made(hidden) is hidden
    assert hidden._version > version


# -- Graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL)
def test_backward_twice(case: Case) -> None:
    """Fails as torch's own does, and works with retain_graph."""
    layer, _ = pair(case, torch.float32)
    x = case.input(torch.float32).requires_grad_()
    torch.manual_seed(0)
    loss = layer(x * 1).sum()
    wanted = [x, *layer.parameters()]
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    second = torch.autograd.grad(loss, wanted)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    if case.layer.startswith(("Avg", "Adaptive")):
        return  # nothing was kept, so nothing is missing
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, wanted)


def test_one_layer_used_twice_in_a_graph() -> None:
    for case in (Case("Linear", (5, 4), (4, 4)), Case("Conv2d", (2, 3, 6, 6), (3, 3, 3, 1, 1))):
        ours, torchs = pair(case, torch.float32)
        x = case.input(torch.float32)
        mine = step(ours, x, lambda x: ours(F.relu(ours(x))) + ours(x))  # noqa: B023
        assert same(mine, step(torchs, x, lambda x: torchs(F.relu(torchs(x))) + torchs(x)))  # noqa: B023


def test_an_output_used_by_several_consumers() -> None:
    results = []
    for of in (brim.nn, nn):
        torch.manual_seed(0)
        first, second, relu = of.Conv2d(3, 3, 3), of.Conv2d(3, 3, 3), of.ReLU()
        x = torch.linspace(-1, 1, 147).reshape(1, 3, 7, 7).requires_grad_()
        y = relu(x)
        out = (first(y) * second(y)).sum() + y.square().sum()
        parameters = [*first.parameters(), *second.parameters()]
        results.append([out.detach(), *torch.autograd.grad(out, [x, *parameters])])
    assert same(*results)


def test_some_outputs_without_a_gradient() -> None:
    pool = brim.nn.MaxPool2d(2, return_indices=True)
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    y, indices = pool(x)
    assert not indices.requires_grad
    assert y.requires_grad
    unpooled = nn.MaxUnpool2d(2)(y, indices)
    unpooled.sum().backward()
    assert int((x.grad != 0).sum()) == 8


def test_gradient_accumulation_over_batches() -> None:
    ours, torchs = small_net(), small_net(nn)
    for net in (ours, torchs):
        torch.manual_seed(0)
        for n in range(4):
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(n))
            (net(x).square().mean() / 4).backward()
    assert same([p.grad for p in ours.parameters()], [p.grad for p in torchs.parameters()])


def test_freezing_between_forward_and_backward() -> None:
    """What needs none at backward gets none, as in torch; the rest is as if nothing were."""
    results = []
    for of in (brim.nn, nn):
        torch.manual_seed(0)
        layer = of.Linear(3, 2)
        x = torch.ones(4, 3, requires_grad=True)
        y = layer(x)
        layer.requires_grad_(False)
        y.sum().backward()
        assert layer.weight.grad is None
        x_grad = x.grad.clone()
        layer.requires_grad_(True)
        layer(x).sum().backward()
        results.append([x_grad, x.grad, layer.weight.grad, layer.bias.grad])
    assert same(*results)


def test_two_threads_at_once() -> None:
    ours = small_net().eval()
    expected = step(copy.deepcopy(ours), IMAGES)
    x = IMAGES
    failures: list[str] = []

    def work() -> None:
        net = copy.deepcopy(ours)
        for _ in range(20):
            if not same(step(net, x), expected):
                failures.append("differs")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_two_threads_share_one_graph() -> None:
    net = small_net().eval()
    x = IMAGES.clone().requires_grad_()
    loss = net(x).sum()
    expected = torch.autograd.grad(loss, x, retain_graph=True)[0]
    found: list[torch.Tensor] = []

    def work() -> None:
        found.append(torch.autograd.grad(loss, x, retain_graph=True)[0])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(each, expected) for each in found)


# -- Several processes ----------------------------------------------------------------------------

TRAIN = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import brim

rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)


def train(convert):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2),
        nn.GELU(), nn.Flatten(), nn.Linear(16, 2),
    )
    if convert:
        assert len(brim.convert(net).replaced) == 7
    net[0].requires_grad_(False)
    net = DistributedDataParallel(net)
    for step in range(3):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        net.zero_grad()
        net(x).square().mean().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    return [parameter.detach().clone() for parameter in net.parameters()]


ours, torchs = train(True), train(False)
assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))
print([parameter.double().sum().item().hex() for parameter in ours])
dist.destroy_process_group()
"""


@pytest.mark.parametrize("world", [1, 2])
def test_distributed_data_parallel(world: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(world), tmp_path / "store"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    printed = []
    for process in processes:
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        printed.append(out)
    assert len(set(printed)) == 1, "the ranks agree"
