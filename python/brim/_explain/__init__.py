"""Why memory ran out, who holds it, and what would help."""

from brim._explain._block import Explaining, explain, explain_uncaught
from brim._explain._explanation import Explanation
from brim._explain._remedies import Remedy

__all__ = ["Explaining", "Explanation", "Remedy", "explain", "explain_uncaught"]
