"""Callbacks for Lightning (`import lightning`): the largest batch size, and steps in parts.

For programs that `import pytorch_lightning`, see `brim.integrations.pytorch_lightning`.
"""

from __future__ import annotations

from brim.integrations._lightning_finder import BatchSizeFinderLogic
from brim.integrations._lightning_steps import AdaptiveStepsLogic

try:
    from lightning import pytorch
except ImportError as error:
    raise ImportError(
        "brim.integrations.lightning needs lightning: pip install 'brim[lightning]'"
    ) from error

__all__ = ["AdaptiveSteps", "BatchSizeFinder"]


class AdaptiveSteps(AdaptiveStepsLogic, pytorch.Callback):  # noqa: D101
    __doc__ = AdaptiveStepsLogic.__doc__
    _package = pytorch


class BatchSizeFinder(BatchSizeFinderLogic, pytorch.Callback):  # noqa: D101
    __doc__ = BatchSizeFinderLogic.__doc__
    _package = pytorch
