"""The layers, as modules and as functions, and the conversion of a model."""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections.abc import Sequence
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


# By module: the layer of torch.nn, the classmethod that converts one, and its argument.
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
"""Whether transformers was imported before this module; `convert_to_memory_saving` checks again."""

ModelT = TypeVar("ModelT", bound=torch.nn.Module)

# Models of transformers and their classes that are an RMSLayerNorm.
_RMS_NORMS = {
    "t5": "T5LayerNorm",
    "mistral": "MistralRMSNorm",
    "llama": "LlamaRMSNorm",
    "phi3": "Phi3RMSNorm",
}


def _layer(name: str, factory: str, argument: str) -> type[torch.nn.Module]:
    """`brim.nn`'s layer under the original's name, with the original's classmethod."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(each, kind) for each in ("cls", argument)])

    def make(*args: Any, **kwargs: Any) -> Any:
        cls, layer = signature.bind(*args, **kwargs).args
        return _adopt(cls, argument, layer, getattr(torch.nn, name))

    vars(make)["__signature__"] = signature
    make.__doc__ = f"Make one with the options, tensors, hooks and training flag of `{argument}`."
    own = getattr(brim.nn, name)
    members = {factory: classmethod(make), "__doc__": own.__doc__, "__module__": __name__}
    return type(f"MemSave{name}", (own,), members)


def _adopt(cls: Any, argument: str, layer: Any, expected: type[torch.nn.Module]) -> Any:
    """Share the tensors of `layer`, but not its dictionaries of parameters and hooks."""
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    if expected is torch.nn.Linear and conv1d is not None and isinstance(layer, conv1d):
        # A Linear with the transposed weight: another parameter over the same memory.
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
    """Division by the root mean square over the last dimension, then a learned scale.

    Sums are at least in float32. The result has the weight's dtype if that is a half precision one.

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
        """Normalise the input."""
        norm = torch.nn.functional.rms_norm
        return functional.rms_norm_with(norm, hidden_states, self.weight, self.eps)


class MemSaveRMSLayerNorm(RMSLayerNorm):
    """`RMSLayerNorm` that saves its input only once.

    Example:
        >>> MemSaveRMSLayerNorm(2, eps=0.0)(torch.tensor([3.0, 4.0])).detach()
        tensor([0.8485, 1.1314])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the input."""
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
    """Copy a model, with memory-saving layers instead of those of `torch.nn`.

    The flags choose layers by their exact type. `conv1d` … `conv3d` include the transposed
    convolutions; `layernorm` includes `RMSLayerNorm` and the RMS norms of T5, Mistral, Llama and
    Phi-3 in transformers. The copy has the model's hooks, sharing, training flags, requires_grad
    and state_dict. The model is not changed. Without `clone_params` both share parameters and
    buffers, so training one trains the other. `verbose` prints each replacement.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> saving = convert_to_memory_saving(model, relu=False, verbose=True)
        replaced 0
        >>> saving[0].weight is model[0].weight
        True
    """
    flags = locals()  # named like the layers, in lower case
    check_module(model)
    replacements: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
        getattr(torch.nn, name): globals()[f"MemSave{name}"]
        for name, _, _ in _LAYERS.values()
        if flags[name.replace("Transpose", "").lower()]
    }
    if layernorm:
        replacements[RMSLayerNorm] = MemSaveRMSLayerNorm
        for model_name, norm_name in _RMS_NORMS.items():
            module = sys.modules.get(f"transformers.models.{model_name}.modeling_{model_name}")
            if hasattr(module, norm_name):
                replacements[getattr(module, norm_name)] = MemSaveRMSLayerNorm
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
    """Set a module inside another by its qualified name, such as "layer4.1.bn2".

    With `clone_params` its parameters are cloned; frozen ones stay frozen.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.ReLU()))
        >>> recursive_setattr(model, "0.0", torch.nn.GELU(), clone_params=False)
        >>> model[0][0]
        GELU(approximate='none')
    """
    parent, _, name = attr.rpartition(".")
    setattr(obj.get_submodule(parent), name, value)
    if clone_params:
        for own, parameter in value._parameters.items():
            if parameter is not None:
                value._parameters[own] = torch.nn.Parameter(
                    parameter.detach().clone(), parameter.requires_grad
                )
