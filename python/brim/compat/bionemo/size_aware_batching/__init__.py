"""The face of `bionemo-size-aware-batching` 1.0.0: batches of samples whose sizes differ.

The names are in the modules `sampler`, `utils` and `memory_model`, as in the original. The last
module and the default loggers of `SizeAwareBatchSampler` are from the release before 1.0.0.

Example:
    >>> from brim.compat.bionemo.size_aware_batching.sampler import SizeAwareBatchSampler
    >>> sampler = SizeAwareBatchSampler(range(5), [3, 1, 2, 2, 4], 4, info_logger=None)
    >>> list(sampler)
    [[0, 1], [2, 3], [4]]
"""
