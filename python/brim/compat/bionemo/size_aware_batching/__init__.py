"""The face of `bionemo-size-aware-batching` 1.0.0: batches of samples whose sizes differ.

The names are in its modules, as in the original: `sampler`, `utils` and `memory_model`. The last,
and the defaults of `SizeAwareBatchSampler`'s loggers, are those of the release before 1.0.0.

Example:
    >>> from brim.compat.bionemo.size_aware_batching.sampler import SizeAwareBatchSampler
    >>> sampler = SizeAwareBatchSampler(range(5), [3, 1, 2, 2, 4], 4, info_logger=None)
    >>> list(sampler)
    [[0, 1], [2, 3], [4]]
"""
