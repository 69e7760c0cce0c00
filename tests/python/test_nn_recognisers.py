"""What convert recognises: the same results, isinstance, copies and pickles, and the way back."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  as everyone calls it
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import brim
from brim.nn._derived import original_of

# -- Modules as people write them ------------------------------------------------------------------


class MyLinear(nn.Linear):
    """Computes what its base does."""

    def extra_repr(self) -> str:
        return "mine"


class MyConv(nn.Conv2d):
    pass


class OtherLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2.0


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


class ExactGelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = F.gelu

    def forward(self, input: Tensor) -> Tensor:
        return self.act(input)


class NewGelu(nn.Module):
    """As GPT-2 writes it."""

    def forward(self, x: Tensor) -> Tensor:
        scale = math.sqrt(2.0 / math.pi)
        return 0.5 * x * (1.0 + torch.tanh(scale * (x + 0.044715 * torch.pow(x, 3.0))))


class AlmostGelu(nn.Module):
    """Computes what brim has no function for, of its input alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.1)))


class Noisy(nn.Module):
    """Depends on more than its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * torch.sigmoid(x) if self.training else torch.tanh(x)


class GatedMlp(nn.Module):
    """As Llama, Mistral, Qwen and Gemma write it."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down_proj, self.act_fn = nn.Linear(16, 8, bias=False), act or Swish()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PackedMlp(nn.Module):
    """As Phi3 and GLM write it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(8, 32), nn.Linear(16, 8)
        self.activation_fn = nn.GELU(approximate="tanh")

    def forward(self, hidden_states: Tensor) -> Tensor:
        up_states = self.gate_up_proj(hidden_states)
        gate, up_states = up_states.chunk(2, dim=-1)
        up_states = up_states * self.activation_fn(gate)
        return self.down_proj(up_states)


class TransposedLinear(nn.Module):
    """As Hugging Face's Conv1D."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        size_out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class LlamaNorm(nn.Module):
    """As Llama, Mistral, Qwen and most others write it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class GemmaNorm(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.eps = 1e-5
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, width))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


class T5Norm(LlamaNorm):
    """Rounds to the weight's type instead of the input's."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class PlainNorm(GemmaNorm):
    """Calculates in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x) * self.weight


class BareNorm(nn.Module):
    eps: float

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)).type_as(x)


class MeanNorm(LlamaNorm):
    """Has the names of an RMSNorm."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        mean = hidden_states.mean(-1, keepdim=True)
        square = (hidden_states - mean).pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states - mean) * torch.rsqrt(square + self.variance_epsilon)


NORMS = [LlamaNorm, GemmaNorm, T5Norm, PlainNorm, BareNorm]


class ChannelNorm(nn.LayerNorm):
    """As the LayerNorm2d of timm and torchvision."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class NormAct(nn.GroupNorm):
    """As timm's GroupNormAct."""

    def __init__(self, groups: int, channels: int) -> None:
        super().__init__(groups, channels)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)
        self._fast_norm = False

    def forward(self, x: Tensor) -> Tensor:
        x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        x = self.drop(x)
        return self.act(x)


class Gate(nn.Module):
    """Calls functions, beside a child."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return F.relu(self.inner(x)) * scale


KNOWN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (lambda: MyLinear(8, 8), "Linear"),
    "activation": (Swish, "silu"),
    "activation in an attribute": (ExactGelu, "gelu"),
    "activation written out": (NewGelu, "new_gelu"),
    "unknown activation": (AlmostGelu, "a function that runs again"),
    "transposed linear": (lambda: TransposedLinear(8, 8), "Linear"),
    **{kind.__name__: (kind, "RMSNorm") for kind in NORMS},
}


def run(module: nn.Module, x: Tensor | None = None) -> list[Tensor]:
    x = torch.linspace(-2, 2, 48).reshape(6, 8) if x is None else x
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
    grads = [each.grad for each in (x, *module.parameters())]
    module.zero_grad()
    return [y.detach(), *(grad for grad in grads if grad is not None)]


def close(mine: list[Tensor], other: list[Tensor]) -> None:
    torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


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


@pytest.mark.parametrize("kind", [Noisy, nn.Softsign])
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

    torch.manual_seed(3)
    module = nn.Sequential(TransposedLinear(8, 8), Fresh())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        brim.convert(module)
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


# -- Functions -------------------------------------------------------------------------------------


def test_functions_in_a_forward_are_redirected() -> None:
    module = Gate()
    expected = run(module)
    report = brim.convert(module)
    assert [(each.name, each.type) for each in report.functions] == [("", "Gate")]
    assert "functions redirected in 1 module" in str(report)
    y = module(torch.ones(2, 8), scale=1)
    assert y.grad_fn.next_functions[0][0].name() == "brim::relu_backward"
    close(run(module), expected)
    brim.restore(module)
    assert type(module) is Gate


def test_methods_without_the_module_are_left_alone() -> None:
    class Helps(nn.Module):
        @staticmethod
        def twice(x: Tensor, by: Tensor) -> Tensor:
            return F.relu(x) * by

        @classmethod
        def thrice(cls, x: Tensor) -> Tensor:
            return F.relu(x) * x

        def forward(self, x: Tensor) -> Tensor:
            return self.thrice(self.twice(x, by=x))

    module = Helps()
    expected = run(module)
    brim.convert(module, recompute="cheap")
    close(run(module), expected)


def test_functions_can_be_left_alone() -> None:
    module = Gate()
    assert not brim.convert(module, functions=False).functions
    assert type(module) is Gate
    assert type(module.inner) is brim.nn.Linear


def test_containers_get_no_region() -> None:
    class Container(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()
            self.gate = Gate()
            self.scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            batch, width = x.shape
            return self.relu(self.gate(x.reshape(batch * 2, width // 2 * 2))) * self.scale * 3.0

    model = nn.Sequential(Container())
    assert [each.name for each in brim.convert(model).functions] == ["0.gate"]


def test_recompute_reaches_the_functions() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.gelu(self.norm(x)))

    torch.manual_seed(0)
    model = Block()
    x = torch.randn(64, 8)
    expected = run(model, x)
    brim.convert(model)
    without = brim.audit(model, x).brim
    brim.convert(model, recompute="cheap")
    assert brim.audit(model, x).brim + 2 * 64 * 8 * 4 <= without
    close(run(model, x), expected)


def test_the_region_ends_with_the_forward_even_by_an_error() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            F.relu(x)
            raise ZeroDivisionError

    module = Fails()
    brim.convert(module)
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ZeroDivisionError):
        module(x)
    assert not F.relu(x).grad_fn.name().startswith("brim::")


def test_no_region_where_nothing_is_kept() -> None:
    seen: list[int] = []

    class Watches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch._C._len_torch_function_stack())
            return F.relu(x)

    module = Watches()
    brim.convert(module)
    with torch.no_grad():
        module(torch.ones(2))
    module(torch.ones(2))
    assert seen == [0, 1]


def test_a_region_that_saves_nothing_is_left_out() -> None:
    depths: list[int] = []

    class Scales(nn.Module):
        """Its product is one of a tensor and a number; what it saves depends on the mode."""

        def __init__(self, inner: nn.Module | None = None) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, by: float) -> Tensor:
            depths.append(torch._C._len_torch_function_stack())
            x = F.dropout(x * by, 0.5, self.training)
            return x if self.inner is None else self.inner(x, by)

    module = Scales(Scales()).eval()
    brim.convert(module)
    x = torch.ones(3, requires_grad=True)
    for training in (False, True):
        module.train(training)
        module(x, 2.0)
        module(x, 2.0)
    assert depths == [1, 1, 0, 0, 1, 1, 1, 1]
    # The child alone saves: then it alone gets a region.
    module.inner.train()
    module.eval()
    module.inner.train()
    depths.clear()
    module(x, 2.0)
    assert depths == [0, 1]


def test_products_alone_are_redirected_only_to_run_again() -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gamma

    module = Products()
    x = torch.ones(3, requires_grad=True)
    names = []
    for recompute in (None, "cheap"):
        brim.convert(module, recompute=recompute)
        module(x)
        names.append(module(x).grad_fn.name())
    assert names == ["MulBackward0", "brim::mul_backward"]


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
            assert "self-attention" in [each.recognised for each in report.replaced]
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


def test_attention_with_masks_weights_or_other_keys_is_torchs() -> None:
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


# -- Regions and checkpoints, classes whose results depend on attributes ---------------------------


class Product(nn.Module):
    """Two factors of one shape: a checkpoint that mixed them up would not notice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.second(x)


class InHelper(Product):
    def forward(self, x: Tensor) -> Tensor:
        return multiplied(self.first(x), self.second(x))


def multiplied(a: Tensor, b: Tensor) -> Tensor:
    return a * b


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(checkpoint(self.block, x, use_reentrant=False))


@pytest.mark.parametrize("recompute", [None, "cheap"])
@pytest.mark.parametrize("block", [Product, InHelper])
def test_a_checkpoint_runs_the_same_functions_again(block: Any, recompute: str | None) -> None:
    torch.manual_seed(0)
    model = Checkpointed(block())
    x = torch.randn(4, 8, requires_grad=True)
    wanted = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).sum(), wanted)
    brim.convert(model, recompute=recompute)
    for _ in range(3):  # the first call decides whether a region is worth it
        close(torch.autograd.grad(model(x).sum(), wanted), expected)
    with brim.saving(recompute=recompute):
        y = checkpoint(lambda z: z * z.exp(), x, use_reentrant=False)
    close(torch.autograd.grad(y.sum(), [x]), [(x.exp() * (1 + x)).detach()])


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
