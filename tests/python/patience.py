"""How long tests wait for what must come."""

FOR_EVER = 600
"""Seconds that no test takes unless something hangs, on a machine however busy."""
