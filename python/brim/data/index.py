"""Where samplers keep what takes a pass over all sizes."""

from __future__ import annotations

import mmap
import os
from typing import Any, NamedTuple, TypeAlias

from brim import _C
from brim._arguments import shown

Index: TypeAlias = "bool | str | os.PathLike[str] | None"


class IndexPlace(NamedTuple):
    """The folder of an index, and what tells its data from others; see `_C.SampleIndex`."""

    folder: str
    data: str


def index_place(index: Index, sizes: object) -> IndexPlace | None:
    """The argument `index` of a sampler of these sizes; None if there is to be none.

    Raises:
        TypeError: if it is no folder.
        ValueError: if the folder would lie beside a file that the sizes are not mapped from.
    """
    if index is None or index is False:
        return None
    file, data = _mapped_file(sizes)
    if index is True:
        if file is None:
            raise ValueError(
                "index=True keeps the index beside the file that sizes are mapped from, and these "
                "are not mapped read-only from a file (numpy.memmap with mode='r', or numpy.load "
                "with mmap_mode='r'): pass a folder instead"
            )
        return IndexPlace(file + ".brim", data)
    if not isinstance(index, (str, os.PathLike)):
        raise TypeError(f"index must be True or a folder, got {shown(index)}")
    return IndexPlace(os.path.abspath(os.fspath(index)), data)


def _mapped_file(sizes: Any) -> tuple[str | None, str]:
    """The file that a read-only `numpy.memmap` shows, and its state.

    A part of one, or one that may be written, is known by its values alone.
    """
    file = getattr(sizes, "filename", None)
    whole = isinstance(getattr(sizes, "base", None), mmap.mmap)
    if file is None or not whole or getattr(sizes, "mode", None) != "r":
        return None, ""
    state = _C.data_file_state(os.fspath(file))
    return os.fspath(file), f"{state}, from byte {sizes.offset} on"
