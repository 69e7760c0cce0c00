"""The layers as functions, under the original's names.

The `torch.autograd.Function`s behind the original's are not here: brim's are operators in C++.

Example:
    >>> import torch
    >>> from brim.compat.memsave_torch.nn.functional import reluMemSave
    >>> reluMemSave(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
"""

from brim.compat.memsave_torch.nn.functional.BatchNorm import batch_normMemSave
from brim.compat.memsave_torch.nn.functional.Conv import (
    conv1dMemSave,
    conv2dMemSave,
    conv3dMemSave,
    convMemSave,
)
from brim.compat.memsave_torch.nn.functional.ConvTranspose import (
    conv_transpose1dMemSave,
    conv_transpose2dMemSave,
    conv_transpose3dMemSave,
)
from brim.compat.memsave_torch.nn.functional.Dropout import dropoutMemSave
from brim.compat.memsave_torch.nn.functional.LayerNorm import layer_normMemSave, rms_normMemSave
from brim.compat.memsave_torch.nn.functional.Linear import linearMemSave
from brim.compat.memsave_torch.nn.functional.MaxPool import maxpool2dMemSave
from brim.compat.memsave_torch.nn.functional.ReLU import reluMemSave

__all__ = [
    "batch_normMemSave",
    "conv1dMemSave",
    "conv2dMemSave",
    "conv3dMemSave",
    "convMemSave",
    "conv_transpose1dMemSave",
    "conv_transpose2dMemSave",
    "conv_transpose3dMemSave",
    "dropoutMemSave",
    "layer_normMemSave",
    "linearMemSave",
    "maxpool2dMemSave",
    "reluMemSave",
    "rms_normMemSave",
]
