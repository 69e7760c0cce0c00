"""A plan of batches in a file: NumPy or Parquet."""

from __future__ import annotations

from pathlib import Path

from brim.data import Plan


def write_plan(plan: Plan, path: Path) -> None:
    """Write all batches.

    Parquet has a row per batch, with the column `indices`, a list. `.npz` has the arrays `offsets`
    and `indices`: batch b is `indices[offsets[b]:offsets[b + 1]]`. `.npy` has a row per sample: the
    number of its batch, and its index.
    """
    import numpy as np

    offsets, indices = plan.offsets.numpy(), plan.indices.numpy()
    if path.suffix.lower() == ".npz":
        np.savez(path, offsets=offsets, indices=indices)
    elif path.suffix.lower() == ".npy":
        batches = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        np.save(path, np.stack([batches, indices], axis=1))
    else:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise ImportError("Parquet files need pyarrow: pip install 'brim[arrow]'") from None
        lists = pa.LargeListArray.from_arrays(offsets, indices)
        pq.write_table(pa.table({"indices": lists}), path)
