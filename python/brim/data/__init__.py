"""Batches of samples of different sizes, under a budget: samplers for torch's DataLoader.

Example:
    >>> import torch
    >>> from brim.data import PackedBatchSampler
    >>> lengths = torch.tensor([5, 2, 8, 3, 7, 1, 4])
    >>> sampler = PackedBatchSampler(lengths, max_total_size=16)
    >>> list(sampler)
    [[2, 4], [0, 6, 3], [1, 5]]
    >>> print(sampler.report())
    7 of 7 samples in 3 batches
      fill       72.92 %
      padding    14.29 %
"""

from brim._C import PaddedNeed, PlanReport
from brim.adapt._packed import PackedBatch
from brim.data.base import BatchSamplerBase, Plan
from brim.data.bucket import BucketBatchSampler, Buckets, create_buckets, least_padding_boundaries
from brim.data.collate import DocumentPart, PackedCollator, SplitDocuments
from brim.data.even import Even, even
from brim.data.fit import FitReport
from brim.data.fit_attempts import FitAttempt
from brim.data.mixture import Mixture, mix
from brim.data.ordered import SizeAwareBatchSampler, size_aware_batching
from brim.data.packed import PackedBatchSampler
from brim.data.parts import balance, flops
from brim.data.shards import Shards
from brim.data.stream_batches import StreamBatches
from brim.data.streams import bucket_stream, pack_stream

__all__ = [
    "BatchSamplerBase",
    "BucketBatchSampler",
    "Buckets",
    "DocumentPart",
    "Even",
    "FitAttempt",
    "FitReport",
    "Mixture",
    "PackedBatch",
    "PackedBatchSampler",
    "PackedCollator",
    "PaddedNeed",
    "Plan",
    "PlanReport",
    "Shards",
    "SizeAwareBatchSampler",
    "SplitDocuments",
    "StreamBatches",
    "balance",
    "bucket_stream",
    "create_buckets",
    "even",
    "flops",
    "least_padding_boundaries",
    "mix",
    "pack_stream",
    "size_aware_batching",
]
