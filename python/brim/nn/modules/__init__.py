"""The layers, one file per kind."""
# ruff: noqa: F403 (the names are those of each file's `__all__`)

from brim.nn.modules import activation, conv, dropout, linear, norm, pooling
from brim.nn.modules.activation import *
from brim.nn.modules.conv import *
from brim.nn.modules.dropout import *
from brim.nn.modules.linear import *
from brim.nn.modules.norm import *
from brim.nn.modules.pooling import *

__all__: list[str] = []
__all__ += activation.__all__
__all__ += conv.__all__
__all__ += dropout.__all__
__all__ += linear.__all__
__all__ += norm.__all__
__all__ += pooling.__all__
