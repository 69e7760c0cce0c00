"""The layers, as modules and as functions, and the conversion of a model."""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

import brim.nn
from brim.compat.memsave_torch.nn import functional
from brim.nn.convert import STAND_INS, check_module

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...  # the classes of `_LAYERS`


# By module: each layer of torch.nn, what makes one of it, and that function's argument.
_LAYERS = {
    "BatchNorm": ("BatchNorm2d", "from_nn_BatchNorm2d", "bn2d"),
    "Conv1d": ("Conv1d", "from_nn_Conv1d", "conv1d"),
    "Conv2d": ("Conv2d", "from_nn_Conv2d", "conv2d"),
    "Conv3d": ("Conv3d", "from_nn_Conv3d", "conv3d"),
    "ConvTranspose1d": ("ConvTranspose1d", "from_nn_ConvTranspose1d", "convT1d"),
    "ConvTranspose2d": ("ConvTranspose2d", "from_nn_ConvTranspose2d", "convT2d"),
    "ConvTranspose3d": ("ConvTranspose3d", "from_nn_ConvTranspose3d", "convT3d"),
    "Dropout": ("Dropout", "from_nn_dropout", "dropout"),
    "LayerNorm": ("LayerNorm", "from_nn_LayerNorm", "ln"),
    "Linear": ("Linear", "from_nn_Linear", "linear"),
    "MaxPool": ("MaxPool2d", "from_nn_MaxPool2d", "maxpool2d"),
    "ReLU": ("ReLU", "from_nn_ReLU", "relu"),
}

__all__ = [
    *(f"MemSave{name}" for name, _, _ in _LAYERS.values()),
    "MemSaveRMSLayerNorm",
    "RMSLayerNorm",
    "convert_to_memory_saving",
    "functional",
    "recursive_setattr",
    "transformers_imported",
]

transformers_imported: bool = "transformers" in sys.modules
"""Whether transformers was imported before this module; `convert_to_memory_saving` looks again."""

ModelT = TypeVar("ModelT", bound=torch.nn.Module)

# Classes of transformers that are an RMSLayerNorm; used where transformers has loaded them.
_RMS_NORMS = (
    ("transformers.models.t5.modeling_t5", "T5LayerNorm"),
    ("transformers.models.mistral.modeling_mistral", "MistralRMSNorm"),
    ("transformers.models.llama.modeling_llama", "LlamaRMSNorm"),
    ("transformers.models.phi3.modeling_phi3", "Phi3RMSNorm"),
)


def _layer(name: str, factory: str, argument: str) -> type[torch.nn.Module]:
    """`brim.nn`'s layer under the original's name, with its way to make one from torch.nn's."""
    signature = inspect.Signature(
        [
            inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for each in ("cls", argument)
        ]
    )

    def make(*args: Any, **kwargs: Any) -> Any:
        cls, layer = signature.bind(*args, **kwargs).args
        return _adopt(cls, argument, layer, getattr(torch.nn, name))

    vars(make)["__signature__"] = signature
    make.__doc__ = f"Make one with the options, tensors, hooks and training flag of `{argument}`."
    own = getattr(brim.nn, name)
    members = {factory: classmethod(make), "__doc__": own.__doc__, "__module__": __name__}
    return type(f"MemSave{name}", (own,), members)


def _adopt(cls: Any, argument: str, layer: Any, expected: type[torch.nn.Module]) -> Any:
    """Share the tensors of `layer`; parameters and hooks that are set later belong to one alone."""
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    if expected is torch.nn.Linear and conv1d is not None and isinstance(layer, conv1d):
        # A Linear with the transposed weight: a parameter of its own over the same memory.
        inputs, outputs = layer.weight.shape
        made = cls(inputs, outputs, bias=layer.bias is not None, device="meta")
        made.weight = torch.nn.Parameter(layer.weight.detach().T, layer.weight.requires_grad)
        made.bias = layer.bias
        return made.train(layer.training)
    if not isinstance(layer, expected):
        raise TypeError(f"{argument} must be a torch.nn.{expected.__name__}, got {layer!r}")
    if parametrize.is_parametrized(layer):
        raise ValueError(f"{argument} is parametrized: remove the parametrization first")
    if isinstance(layer, LazyModuleMixin):
        raise ValueError(f"{argument} is lazy: run it once first")
    made = cls.__new__(cls)
    made.__dict__ = {
        name: value.copy() if isinstance(value, dict) else value
        for name, value in layer.__dict__.items()
    }
    return made


class RMSLayerNorm(torch.nn.Module):
    """Division by the root of the mean square over the last dimension, then a learned scale.

    Sums are in float32 at least; the result has the weight's type where that is a half type.

    Example:
        >>> RMSLayerNorm(2, eps=0.0)(torch.tensor([3.0, 4.0])).pow(2).mean()
        tensor(1., grad_fn=<MeanBackward0>)
    """

    weight: Tensor

    def __init__(self, hidden_size: int | Sequence[int], eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The input, normalised."""
        norm = torch.nn.functional.rms_norm
        return functional.rms_norm_with(norm, hidden_states, self.weight, self.eps)


class MemSaveRMSLayerNorm(RMSLayerNorm):
    """`RMSLayerNorm` that keeps its input once."""

    def forward(self, x: Tensor) -> Tensor:
        """The input, normalised."""
        return functional.rms_norm_with(brim.nn.functional.rms_norm, x, self.weight, self.eps)

    @classmethod
    def from_existing(cls, ln: Any) -> MemSaveRMSLayerNorm:
        """Share the weight of a module with `eps`, or `variance_epsilon` as in transformers."""
        made = cls(0, _epsilon_of(ln))
        made.weight = ln.weight
        return made.train(ln.training)


STAND_INS[MemSaveRMSLayerNorm] = RMSLayerNorm


def _epsilon_of(layer: Any) -> float:
    for name in ("eps", "variance_epsilon"):
        value = getattr(layer, name, None)
        if value is not None:
            return float(value)
    raise TypeError(f"ln must have a number `eps` or `variance_epsilon`, got {layer!r}")


for _module, _row in _LAYERS.items():
    _members = {f"MemSave{_row[0]}": _layer(*_row)}
    if _module == "LayerNorm":
        _members |= {"MemSaveRMSLayerNorm": MemSaveRMSLayerNorm, "RMSLayerNorm": RMSLayerNorm}
    functional.add_submodule(__name__, _module, _members)


def convert_to_memory_saving(
    model: ModelT,
    linear: bool = True,
    conv2d: bool = True,
    conv1d: bool = True,
    conv3d: bool = True,
    batchnorm2d: bool = True,
    relu: bool = True,
    maxpool2d: bool = True,
    dropout: bool = True,
    verbose: bool = False,
    clone_params: bool = False,
    *,
    layernorm: bool = True,
) -> ModelT:
    """Copy a model with memory-saving layers in the place of those of `torch.nn`.

    A layer is replaced if its type is exactly one of those chosen. `conv1d` … `conv3d` also choose
    the transposed convolutions; `layernorm` also `RMSLayerNorm` and the RMS norms of T5, Mistral,
    Llama and Phi-3 in transformers. Hooks, sharing, training flag, requires_grad and state_dict are
    those of the model, which is not changed. Without `clone_params` the copy has the parameters and
    buffers of the model: an optimizer of one trains both. `verbose` prints what is replaced.

    Raises:
        TypeError: if `model` is no module.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> saving = convert_to_memory_saving(model, relu=False, verbose=True)
        replaced 0
        >>> saving[0].weight is model[0].weight
        True
    """
    flags = locals()  # by the lower-case names of the layers
    check_module(model)
    replacements: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
        getattr(torch.nn, name): globals()[f"MemSave{name}"]
        for name, _, _ in _LAYERS.values()
        if flags[name.replace("Transpose", "").lower()]
    }
    if layernorm:
        replacements |= dict.fromkeys(_rms_norms(), MemSaveRMSLayerNorm)
    shared = () if clone_params else itertools.chain(model.parameters(), model.buffers())
    saving = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    for name, layer in saving.named_modules():
        saver = replacements.get(type(layer))
        if saver is None or any(each.is_complex() for each in layer.parameters(recurse=False)):
            continue
        if saver is MemSaveRMSLayerNorm:
            layer.__dict__["eps"] = _epsilon_of(layer)
        layer.__class__ = saver
        if verbose:
            print(f"replaced {name}")
    return saving


def recursive_setattr(
    obj: torch.nn.Module, attr: str, value: torch.nn.Module, clone_params: bool
) -> None:
    """Set a module inside of another, by its qualified name such as "layer4.1.bn2".

    With `clone_params` the module gets parameters of its own, equal to those it has; frozen ones
    stay frozen.

    Raises:
        AttributeError: if there is no module of that name's first parts.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.ReLU()))
        >>> recursive_setattr(model, "0.0", torch.nn.Tanh(), False)
        >>> model[0][0]
        Tanh()
    """
    parent, _, name = attr.rpartition(".")
    setattr(obj.get_submodule(parent), name, value)
    if clone_params:
        for own, parameter in value._parameters.items():
            if parameter is not None:
                value._parameters[own] = torch.nn.Parameter(
                    parameter.detach().clone(), parameter.requires_grad
                )


def _rms_norms() -> Iterator[type[torch.nn.Module]]:
    yield RMSLayerNorm
    for module, name in _RMS_NORMS:
        found = getattr(sys.modules.get(module), name, None)
        if found is not None:
            yield found
