"""Layers that keep only what backward needs, and tools to convert and measure models.

Each `brim.nn.X` is a `torch.nn.X`: the same constructor, parameters and state_dict, the same values
and gradients. What is kept depends on what needs a gradient at each call.

Example:
    >>> import torch, brim
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
    >>> report = brim.convert(model, recompute="cheap")
    >>> print(report)
    2 layers replaced, 0 kept as they are
    >>> print(model)
    Sequential(
      (0): brim.nn.Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
      (1): brim.nn.ReLU()
    )
"""

from brim.nn import functional, modules
from brim.nn._pressure import (
    Pressure,
    PressureMoment,
    PressureRecord,
    pressure,
    record_pressure,
    reset_pressure,
)
from brim.nn.audit import Audit, LayerAudit, assert_saved, audit
from brim.nn.convert import ConversionReport, ConvertedLayer, convert, restore
from brim.nn.modules import *  # noqa: F403
from brim.nn.saving import Saving, saving

__all__ = [
    "Audit",
    "ConversionReport",
    "ConvertedLayer",
    "LayerAudit",
    "Pressure",
    "PressureMoment",
    "PressureRecord",
    "Saving",
    "assert_saved",
    "audit",
    "convert",
    "functional",
    "pressure",
    "record_pressure",
    "reset_pressure",
    "restore",
    "saving",
]
__all__ += modules.__all__
