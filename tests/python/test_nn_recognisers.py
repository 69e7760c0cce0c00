"""What convert recognises: the same results, isinstance, copies and pickles, and the way back."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  as everyone calls it
from torch import Tensor, nn

import brim
from brim.nn._derived import original_of

from .nn_modules import (
    KNOWN,
    NORMS,
    ChannelNorm,
    Gate,
    GatedMlp,
    LlamaNorm,
    MeanNorm,
    MyConv,
    MyLinear,
    Noisy,
    NormAct,
    OtherLinear,
    PackedMlp,
    Swish,
    TransposedLinear,
    close,
    run,
)


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_module_becomes_brims(name: str) -> None:
    make, what = KNOWN[name]
    module = make()
    kind = type(module)
    expected = run(module)
    report = brim.convert(module)
    assert [(each.type, each.recognised) for each in report.replaced] == [(kind.__name__, what)]
    assert f"{kind.__name__}" in str(report)
    assert what in str(report)
    assert isinstance(module, kind)
    assert type(module).__name__ == kind.__name__
    assert type(module).__module__ == kind.__module__
    assert original_of(type(module)) is kind
    y = module(torch.ones(2, 8, requires_grad=True))
    assert y.grad_fn.name().startswith("brim::")
    close(run(module), expected)
    assert not brim.convert(module).replaced
    brim.restore(module)
    assert type(module) is kind
    assert original_of(kind) is None


@pytest.mark.parametrize("name", [*KNOWN, "functions"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies_stay_converted(name: str, way: str) -> None:
    make = Gate if name == "functions" else KNOWN[name][0]
    module = make()
    brim.convert(module, recompute="cheap")
    if way == "deepcopy":
        other = copy.deepcopy(module)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(module))
    else:
        buffer = io.BytesIO()
        torch.save(module, buffer)
        other = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert type(other) is type(module)
    assert other.__dict__.keys() == module.__dict__.keys()
    close(run(other), run(module))
    brim.restore(other)
    assert type(other) is original_of(type(module))


def test_a_pickle_of_a_class_that_has_changed_since_is_not_converted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Swish()
    brim.convert(module)
    text = pickle.dumps(module)
    monkeypatch.setattr(Swish, "forward", lambda self, x: x * 2.0)
    assert type(pickle.loads(text)) is Swish


def test_hooks_state_and_keyword_arguments() -> None:
    module = nn.Sequential(MyLinear(8, 8), Swish())
    seen: list[str] = []
    module[1].register_forward_hook(lambda *_: seen.append("forward"))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    brim.convert(module)
    run(module)
    assert seen == ["forward"]
    assert module.state_dict().keys() == state.keys()
    module.load_state_dict(state)
    x = torch.randn(3)
    assert torch.equal(module[1](x=x), module[1](x))


def test_a_class_derived_by_another_tool_is_brims_already() -> None:
    module = Swish()
    brim.convert(module)
    module.__class__ = type("FSDPSwish", (type(module),), {})
    assert [each.reason for each in brim.convert(module).kept] == ["brim's already"]
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(module)  # as without brim


def test_an_attribute_of_the_same_name_is_not_touched() -> None:
    class Own(Gate):
        recompute = "mine"

        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            return F.relu(x)

    module = Own()
    brim.convert(module, recompute="cheap")
    assert module.recompute == "mine"
    brim.restore(module)
    assert vars(module).keys() == vars(Own()).keys()


@pytest.mark.parametrize("kind", [Noisy, nn.Tanhshrink])
def test_what_computes_something_else_is_left_alone(kind: type[nn.Module]) -> None:
    module = kind()
    report = brim.convert(module, functions=False)
    assert type(module) is kind
    assert [each.reason for each in report.kept] == ["brim has no counterpart"]


def test_a_subclass_with_a_forward_of_its_own_gets_its_functions_redirected() -> None:
    module = OtherLinear(8, 8)
    expected = run(module)
    report = brim.convert(module)
    assert [each.type for each in report.functions] == ["OtherLinear"]
    close(run(module), expected)


def test_nothing_is_touched_by_the_comparison() -> None:
    class Fresh(Swish):
        def forward(self, x: Tensor) -> Tensor:
            return F.silu(x)

    class FreshLinear(TransposedLinear):  # brim has not compared it yet
        pass

    torch.manual_seed(3)
    module = nn.Sequential(FreshLinear(8, 8), Fresh())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert len(brim.convert(module).replaced) == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_modules_without_memory_are_recognised() -> None:
    with torch.device("meta"):
        module = nn.Sequential(TransposedLinear(8, 8), Swish(), MyConv(2, 2, 1), LlamaNorm())
        found = [each.recognised for each in brim.convert(module).replaced]
    assert found == ["Linear", "silu", "Conv2d", "RMSNorm"]


def test_recompute_asks_the_layers_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), Swish(), TransposedLinear(8, 8))
    x = torch.randn(64, 8)
    expected = run(model, x)
    kept = {}
    for recompute in (None, "cheap"):
        brim.convert(model, recompute=recompute)
        kept[recompute] = brim.audit(model, x).brim
        close(run(model, x), expected)
    assert kept["cheap"] + 64 * 8 * 4 <= kept[None]
    brim.restore(model)
    assert not any("_brim_recompute" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("of_input", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16])
def test_norms_in_all_types(
    kind: type[nn.Module], of_input: torch.dtype, of_weight: torch.dtype
) -> None:
    """Types that brim's operator takes otherwise go to the module's own forward."""
    x = torch.linspace(-3, 3, 64).reshape(8, 8).to(of_input)
    module = kind().to(of_weight)
    expected = run(module, x)
    brim.convert(module)
    torch.testing.assert_close(run(module, x), expected)


def kept_by(module: nn.Module, x: Tensor) -> int:
    """Bytes of distinct storages, without parameters and the input."""
    known = {each.data_ptr() for each in (x, *module.parameters())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x)
    size = sum(size for place, size in kept.items() if place not in known)
    del y
    return size


@pytest.mark.parametrize("make", [GatedMlp, PackedMlp])
def test_gated_mlps_keep_gate_and_up(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make()
    x = torch.randn(64, 8, requires_grad=True)
    expected, torchs = run(module, x.detach()), kept_by(module, x)
    row = 64 * 16 * 4
    for recompute, most in ((None, 3), ("cheap", 2)):
        report = brim.convert(module, recompute=recompute)
        assert kept_by(module, x) <= most * row < torchs
        torch.testing.assert_close(run(module, x.detach()), expected, rtol=0, atol=0)
        if recompute is None:
            assert [each.recognised for each in report.replaced if not each.name] == ["gated MLP"]


def test_hooks_of_an_activation_in_a_gated_mlp_run() -> None:
    module = GatedMlp()
    brim.convert(module)
    seen: list[str] = []
    module.act_fn.register_forward_hook(lambda *_: seen.append("forward"))
    expected = run(module)
    assert seen == ["forward"]
    module.act_fn._forward_hooks.clear()
    close(run(module), expected)
    assert seen == ["forward"]


def test_an_activation_that_was_replaced_counts() -> None:
    module = GatedMlp()
    brim.convert(module)
    module.act_fn = nn.Tanh()
    other = GatedMlp(nn.Tanh())
    other.load_state_dict(module.state_dict())
    close(run(module), run(other))


def test_what_only_looks_like_a_norm_is_named() -> None:
    module = MeanNorm()
    report = brim.convert(module, functions=False)
    assert type(module) is MeanNorm
    assert [each.reason for each in report.kept] == [
        "it looks like RMSNorm, but its results differ from what brim knows"
    ]


@pytest.mark.parametrize(
    ("make", "what"),
    [(lambda: ChannelNorm(6), "LayerNorm"), (lambda: NormAct(2, 6), "GroupNorm")],
)
def test_normalisation_with_something_around(make: Callable[[], nn.Module], what: str) -> None:
    module = make()
    x = torch.linspace(-3, 3, 5 * 6 * 12).cos().reshape(5, 6, 4, 3)
    expected = run(module, x)
    report = brim.convert(module)
    assert [each.recognised for each in report.replaced if not each.name] == [what]
    close(run(module, x), expected)
    name = module(x.requires_grad_()).grad_fn.name()
    assert name.startswith(("brim::", "Permute"))


class WrittenOut(nn.BatchNorm2d):
    """Batch normalisation as a model writes it, with its counter."""

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.running_mean, self.running_var
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        options: Any = self.training, self.momentum, self.eps
        return F.batch_norm(x, mean, variance, self.weight, self.bias, *options)


class CountsTwice(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return super().forward(x)


@pytest.mark.parametrize(("kind", "is_same"), [(WrittenOut, True), (CountsTwice, False)])
def test_statistics_are_compared_too(kind: type[nn.BatchNorm2d], is_same: bool) -> None:
    layer = kind(6)
    report = brim.convert(layer, functions=False)
    assert len(report.replaced) == is_same
    assert "but its results differ" in str(report) or is_same
    assert layer.num_batches_tracked == 0


def test_another_way_that_is_switched_on_is_taken() -> None:
    class Fast(NormAct):
        def forward(self, x: Tensor) -> Tensor:
            if self._fast_norm:
                return x
            return super().forward(x)

    module = Fast(2, 6)
    brim.convert(module)
    module._fast_norm = True
    x = torch.randn(2, 6, 3, 3)
    assert torch.equal(module(x), x)


def test_a_replaced_forward_stays() -> None:
    module: Any = Swish()
    module.forward = lambda x: x
    report = brim.convert(module)
    assert [each.reason for each in report.kept] == ["its forward was replaced"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # of torch 2.11's compiler
@pytest.mark.parametrize("make", [Swish, Gate, lambda: TransposedLinear(8, 8)])
def test_compile_makes_one_graph(make: Callable[[], nn.Module]) -> None:
    module = make()
    expected = run(module)
    brim.convert(module, recompute="cheap")
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    close(run(compiled), expected)


# -- Attributes ----------------------------------------------------------------------------------


class WithAttributes(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor], power: int) -> None:
        super().__init__()
        self.act, self.pow = act, power

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x) ** self.pow


def test_instances_of_a_class_are_told_apart_by_their_attributes() -> None:
    x = torch.randn(64)
    for act, power in ((F.relu, 2), (F.relu, 3), (F.silu, 1), (F.relu, 1), (F.silu, 2)):
        module = WithAttributes(act, power)
        expected = module(x)
        brim.convert(module)
        assert torch.equal(module(x), expected)


def test_changed_attributes_count() -> None:
    module: Any = WithAttributes(F.silu, 2)
    brim.convert(module, recompute="cheap")
    x = torch.randn(64)
    for name, value, node in (
        ("pow", 1, "brim::silu_backward"),
        ("act", F.relu, "brim::relu_backward"),
        ("pow", 3, "PowBackward0"),  # brim would save nothing: the module's own forward
    ):
        setattr(module, name, value)
        plain = WithAttributes(module.act, module.pow)
        close(run(module, x), run(plain, x))
        assert module(x.clone().requires_grad_()).grad_fn.name() == node


def test_a_norms_eps_is_read_when_it_runs() -> None:
    module: Any = LlamaNorm()
    brim.convert(module)
    kind = type(module)
    module.variance_epsilon = 3.0
    assert type(module) is kind
    plain: Any = LlamaNorm()
    plain.variance_epsilon = 3.0
    close(run(module), run(plain))


def test_a_gain_of_one_number_is_left_to_the_module() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(1)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            h = x.to(torch.float32)
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * h.to(x.dtype)

    module, x = Gain(), torch.randn(3, 8)
    expected = module(x)
    brim.convert(module)
    assert torch.equal(module(x), expected)


# -- Self-attention --------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("trained", ["all", "biases"])
def test_self_attention_has_torchs_bits(batch_first: bool, autocast: bool, trained: str) -> None:
    results, kept = [], []
    for convert in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.LayerNorm(16), nn.Identity())
        attention = nn.MultiheadAttention(16, 4, dropout=0.3, batch_first=batch_first)
        model.append(attention)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained == "all" or name.endswith("bias"))
        if convert:
            report = brim.convert(model, recompute="cheap")
            assert "MultiheadAttention" in [each.type for each in report.functions]
        x = torch.randn(7, 64, 16).requires_grad_()
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            brim.PeakMeter("cpu") as meter,
        ):
            normal = model[0](x)
            y, weights = attention(normal, normal, normal, need_weights=False)
            del normal
            kept.append(meter.left)
        assert weights is None
        leaves = [x, *(each for each in model.parameters() if each.requires_grad)]
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    assert all(map(torch.equal, *results))
    assert kept[1] < kept[0] or (trained == "biases" and kept[1] == kept[0])


def test_attention_with_masks_weights_or_other_keys_has_torchs_bits() -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2)
    ours = copy.deepcopy(theirs)
    brim.convert(ours)
    x, other = torch.randn(5, 3, 8), torch.randn(6, 3, 8)
    for args, options in (
        ((x, x, x), {}),
        ((x, other, other), {"need_weights": False}),
        ((x, x, x), {"need_weights": False, "attn_mask": torch.ones(5, 5).triu(1).bool()}),
        ((x[:, 0], x[:, 0], x[:, 0]), {"need_weights": False}),
    ):
        expected, results = theirs(*args, **options), ours(*args, **options)
        assert torch.equal(results[0], expected[0])
        assert (results[1] is None) == (expected[1] is None)
    assert type(brim.restore(ours)) is nn.MultiheadAttention
