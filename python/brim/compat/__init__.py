"""Drop-in replacements for other libraries: change the import lines and nothing else.

Each has the module tree, names, signatures, defaults, results and errors of the original, and runs
on brim's core. docs/coming_from lists what is better and what differs.

| instead of | import |
| --- | --- |
| `torch_max_mem` 0.1.6 | `brim.compat.torch_max_mem` |
| `toma` 1.1.0 | `brim.compat.toma` |
| `bionemo.size_aware_batching` 1.0.0 | `brim.compat.bionemo.size_aware_batching` |
| `memsave_torch`, which has no release | `brim.compat.memsave_torch` |
"""
