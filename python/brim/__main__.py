"""`python -m brim` is the command line."""

import sys

from brim.cli import main

sys.exit(main())
