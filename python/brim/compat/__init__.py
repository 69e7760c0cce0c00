"""Drop-in faces of other libraries: change the import line, keep the program.

Each face has the module tree, names, signatures, defaults, results and errors of the library that
it stands for, and runs on brim's core. What is better and what differs is in docs/compat.md.

| instead of | import |
| --- | --- |
| `torch_max_mem` 0.1.6 | `brim.compat.torch_max_mem` |
| `toma` 1.1.0 | `brim.compat.toma` |
| `bionemo.size_aware_batching` 1.0.0 | `brim.compat.bionemo.size_aware_batching` |
| `memsave_torch`, which has no release | `brim.compat.memsave_torch` |
"""
