"""What `with brim.explain():` costs while nothing fails: time of a step inside of it and without.

The two take turns. Both run with brim's counting allocator on the CPU, as budgets do.

    ./dev bench explain
"""

from __future__ import annotations

import torch
from harness import Work, medians, row

import brim
