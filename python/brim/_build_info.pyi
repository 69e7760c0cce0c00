"""Written by the build beside the C++ core."""

TORCH_VERSION: str
