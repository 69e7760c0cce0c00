"""The namespace of `bionemo`; brim has its `size_aware_batching`."""
