"""The layers with autocast, saved-tensor hooks, checkpoints, copies, hooks and parametrizations."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import brim

from .nn_cases import ONE_OF_EACH, Case, cotangent_of, near, pair, same_bits, set_needs
from .nn_steps import ALL, IMAGES, WITH_WEIGHTS, same, small_net, step

FLOATS_OF_AUTOCAST = [c for c in ONE_OF_EACH if c.layer not in ("MaxPool3d", "AvgPool3d")]
MIXED_RMS_NORM = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")


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


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_autocast_with_one_layer_called_twice(frozen: bool, cache: bool) -> None:
    """With the cache of casts, both gradients are added in the low type; without it, in float32."""
    results = []
    for of in (brim.nn, nn):
        torch.manual_seed(0)
        layer = of.Linear(8, 8).requires_grad_(not frozen)
        x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            y = layer(torch.relu(layer(x)))
        wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
        results.append([y.detach(), *torch.autograd.grad(y.float().sum(), wanted)])
    assert same(*results)


def test_autocast_switched_off_inside() -> None:
    results = []
    for of in (brim.nn, nn):
        torch.manual_seed(0)
        layer = of.Linear(8, 8)
        x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
            with torch.autocast("cpu", enabled=False):
                y = layer(y.float())
            y = layer(y)
        results.append([y.detach(), *torch.autograd.grad(y.float().sum(), [x, layer.weight])])
    assert same(*results)


def test_a_weight_computed_for_the_call_is_kept_in_the_low_type() -> None:
    """Its float32 values would live for this layer alone."""
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(1, 64, dtype=torch.bfloat16, requires_grad=True)
    with brim.PeakMeter("cpu") as meter:
        with torch.autocast("cpu", torch.bfloat16):
            y = brim.nn.functional.linear(x, weight.clone())
        assert meter.left - y.nbytes == weight.nbytes // 2


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
    assert repr(ours).replace("brim.nn.", "") == repr(torchs)


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


# -- FSDP -----------------------------------------------------------------------------------------


@pytest.fixture
def _one_rank() -> Iterator[None]:
    """A process group that only pretends to communicate; FSDP frees parameters in it too."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _sharded(convert: bool, unit_per_layer: bool) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1,))
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()) for _ in range(3)]
    net = nn.Sequential(*blocks)
    if convert:
        brim.convert(net, recompute="cheap")
    for unit in [layer for block in blocks for layer in block[:2]] if unit_per_layer else blocks:
        fully_shard(unit, mesh=mesh)
    return fully_shard(net, mesh=mesh)


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("unit_per_layer", [False, True])
def test_recompute_with_units_of_fsdp(unit_per_layer: bool) -> None:
    """Parameters of another unit are gone when a layer would ask: it keeps its input."""
    found = []
    for convert in (True, False):
        net = _sharded(convert, unit_per_layer)
        net(torch.ones(5, 8).cumsum(0)).square().sum().backward()
        found.append([p.grad.to_local() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.filterwarnings("ignore")
def test_recompute_with_units_of_fsdp_under_hooks_says_what_to_do() -> None:
    """Hooks hold parameters in a way of their own: whether these are gone shows in backward."""
    net = _sharded(True, True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        loss = net(torch.randn(5, 8)).sum()
    with pytest.raises(RuntimeError, match="FSDP has freed those of another unit: put a layer"):
        loss.backward()


@pytest.mark.parametrize("name", ["Conv1d", "Conv2d", "ConvTranspose1d"])
def test_the_gradient_of_a_bias_alone_under_autocast(name: str) -> None:
    """torch's kernels for bfloat16 give the weight's gradient too, in another shape."""
    torch.manual_seed(0)
    layer = getattr(nn, name)(4, 8, 3)
    x = torch.randn(3, 4, *(6,) * (layer.weight.dim() - 2))
    ours = copy.deepcopy(layer)
    brim.convert(ours)
    found = []
    for each in (layer, ours):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(x.requires_grad_()).float().square().sum()
        found.append(torch.autograd.grad(loss, [each.bias, x]))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
