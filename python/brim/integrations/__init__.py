"""Brim inside other frameworks: one module for each, imported by name.

| module | for |
| --- | --- |
| `brim.integrations.accelerate` | `find_executable_batch_size`, by foresight |
| `brim.integrations.datasets` | lengths of a column of Hugging Face datasets |
| `brim.integrations.lightning`, `.pytorch_lightning` | a callback: batch size, steps in parts |
| `brim.integrations.pyg` | batches of graphs under budgets of nodes and edges |
| `brim.integrations.transformers` | a callback for `Trainer`: converted layers, steps in parts |

Nothing of this is imported by `import brim`.
"""
