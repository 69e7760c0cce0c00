"""The layers, as modules and as functions, and the conversion of a model."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Iterator
from typing import TypeVar

import torch

from brim.compat.memsave_torch.nn import functional
from brim.compat.memsave_torch.nn.BatchNorm import MemSaveBatchNorm2d
from brim.compat.memsave_torch.nn.Conv1d import MemSaveConv1d
from brim.compat.memsave_torch.nn.Conv2d import MemSaveConv2d
from brim.compat.memsave_torch.nn.Conv3d import MemSaveConv3d
from brim.compat.memsave_torch.nn.ConvTranspose1d import MemSaveConvTranspose1d
from brim.compat.memsave_torch.nn.ConvTranspose2d import MemSaveConvTranspose2d
from brim.compat.memsave_torch.nn.ConvTranspose3d import MemSaveConvTranspose3d
from brim.compat.memsave_torch.nn.Dropout import MemSaveDropout
from brim.compat.memsave_torch.nn.LayerNorm import (
    MemSaveLayerNorm,
    MemSaveRMSLayerNorm,
    RMSLayerNorm,
    epsilon_of,
)
from brim.compat.memsave_torch.nn.Linear import MemSaveLinear
from brim.compat.memsave_torch.nn.MaxPool import MemSaveMaxPool2d
from brim.compat.memsave_torch.nn.ReLU import MemSaveReLU

__all__ = [
    "MemSaveBatchNorm2d",
    "MemSaveConv1d",
    "MemSaveConv2d",
    "MemSaveConv3d",
    "MemSaveConvTranspose1d",
    "MemSaveConvTranspose2d",
    "MemSaveConvTranspose3d",
    "MemSaveDropout",
    "MemSaveLayerNorm",
    "MemSaveLinear",
    "MemSaveMaxPool2d",
    "MemSaveRMSLayerNorm",
    "MemSaveReLU",
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

    A layer is replaced if its type is exactly one of those chosen. Hooks, sharing, training flag,
    requires_grad and state_dict are those of the model.

    Args:
        model: any module, also a single layer; it is not changed.
        linear: whether to replace `Linear`.
        conv2d: whether to replace `Conv2d` and `ConvTranspose2d`.
        conv1d: whether to replace `Conv1d` and `ConvTranspose1d`.
        conv3d: whether to replace `Conv3d` and `ConvTranspose3d`.
        batchnorm2d: whether to replace `BatchNorm2d`.
        relu: whether to replace `ReLU`.
        maxpool2d: whether to replace `MaxPool2d`.
        dropout: whether to replace `Dropout`.
        verbose: print the name of each layer that is replaced.
        clone_params: give the copy parameters and buffers of its own. Without, it has those of the
            model: an optimizer of one trains both.
        layernorm: whether to replace `LayerNorm`, `RMSLayerNorm` and the RMS norms of T5, Mistral,
            Llama and Phi-3 in transformers.

    Returns:
        The copy.

    Raises:
        TypeError: if `model` is no module.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> saving = convert_to_memory_saving(model, relu=False, verbose=True)
        replaced 0
        >>> saving[0].weight is model[0].weight
        True
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r}")
    replacements: dict[type[torch.nn.Module], type[torch.nn.Module]] = {}
    for allowed, original, replacement in (
        (linear, torch.nn.Linear, MemSaveLinear),
        (relu, torch.nn.ReLU, MemSaveReLU),
        (maxpool2d, torch.nn.MaxPool2d, MemSaveMaxPool2d),
        (conv1d, torch.nn.Conv1d, MemSaveConv1d),
        (conv2d, torch.nn.Conv2d, MemSaveConv2d),
        (conv3d, torch.nn.Conv3d, MemSaveConv3d),
        (conv1d, torch.nn.ConvTranspose1d, MemSaveConvTranspose1d),
        (conv2d, torch.nn.ConvTranspose2d, MemSaveConvTranspose2d),
        (conv3d, torch.nn.ConvTranspose3d, MemSaveConvTranspose3d),
        (batchnorm2d, torch.nn.BatchNorm2d, MemSaveBatchNorm2d),
        (layernorm, torch.nn.LayerNorm, MemSaveLayerNorm),
        (dropout, torch.nn.Dropout, MemSaveDropout),
        *((layernorm, each, MemSaveRMSLayerNorm) for each in _rms_norms()),
    ):
        if allowed:
            replacements[original] = replacement
    shared = () if clone_params else itertools.chain(model.parameters(), model.buffers())
    saving = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    for name, layer in saving.named_modules():
        saver = replacements.get(type(layer))
        if saver is None or any(each.is_complex() for each in layer.parameters(recurse=False)):
            continue
        if saver is MemSaveRMSLayerNorm:
            layer.__dict__["eps"] = epsilon_of(layer)
        layer.__class__ = saver
        if verbose:
            print(f"replaced {name}")
    return saving


def recursive_setattr(
    obj: torch.nn.Module, attr: str, value: torch.nn.Module, clone_params: bool
) -> None:
    """Set a module inside of another, by its qualified name.

    Args:
        obj: the module to start from.
        attr: the name, such as "layer4.1.bn2".
        value: the module to put there.
        clone_params: give it parameters of its own, equal to those it has; frozen ones stay frozen.

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
