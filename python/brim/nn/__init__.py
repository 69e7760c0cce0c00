"""Layers that keep for backward only what backward needs, and what tells and changes it.

Each `brim.nn.X` is a `torch.nn.X`: the same constructor, parameters and state_dict, the same values
and gradients. What is kept follows from what needs a gradient at each call.

Example:
    >>> import torch, brim
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
    >>> print(brim.convert(model))
    2 layers replaced, 0 kept as they are
    >>> type(model[0]).__module__
    'brim.nn.modules.conv'
"""

from brim.nn import functional
from brim.nn.audit import Audit, LayerAudit, assert_saved, audit
from brim.nn.convert import ConversionReport, ConvertedLayer, convert, restore
from brim.nn.modules.activation import GELU, Hardtanh, LeakyReLU, ReLU, ReLU6, SiLU
from brim.nn.modules.conv import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from brim.nn.modules.dropout import Dropout
from brim.nn.modules.linear import Linear
from brim.nn.modules.norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    LayerNorm,
    RMSNorm,
)
from brim.nn.modules.pooling import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
)
from brim.nn.saving import Saving, saving

__all__ = [
    "GELU",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "Audit",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "ConversionReport",
    "ConvertedLayer",
    "Dropout",
    "GroupNorm",
    "Hardtanh",
    "LayerAudit",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "RMSNorm",
    "ReLU",
    "ReLU6",
    "Saving",
    "SiLU",
    "assert_saved",
    "audit",
    "convert",
    "functional",
    "restore",
    "saving",
]
