"""The name space of `bionemo`; brim has its `size_aware_batching`."""
