"""Callbacks for Lightning (`import pytorch_lightning`): the largest batch size, and steps in parts.

For programs that `import lightning`, see `brim.integrations.lightning`.
"""

from __future__ import annotations

from brim.integrations._lightning_finder import BatchSizeFinderLogic
from brim.integrations._lightning_steps import AdaptiveStepsLogic

try:
    import pytorch_lightning
except ImportError as error:
    raise ImportError(
        "brim.integrations.pytorch_lightning needs pytorch_lightning: pip install 'brim[lightning]'"
    ) from error

__all__ = ["AdaptiveSteps", "BatchSizeFinder"]


class AdaptiveSteps(AdaptiveStepsLogic, pytorch_lightning.Callback):  # noqa: D101
    __doc__ = AdaptiveStepsLogic.__doc__
    _package = pytorch_lightning


class BatchSizeFinder(BatchSizeFinderLogic, pytorch_lightning.Callback):  # noqa: D101
    __doc__ = BatchSizeFinderLogic.__doc__
    _package = pytorch_lightning
