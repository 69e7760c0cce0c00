"""A polynomial that predicts peak memory from a size."""

from __future__ import annotations

import torch

__all__ = ("PolynomialRegression",)


def _check_points(name: str, values: object) -> torch.Tensor:
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        kind = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
        raise TypeError(f"{name} must be a floating point tensor, but got {kind}")
    if values.ndim != 1:
        raise TypeError(f"{name} must be a 1D tensor, but got a shape of {tuple(values.shape)}")
    for index in torch.nonzero(~torch.isfinite(values)).flatten().tolist():
        raise ValueError(f"{name}[{index}] is {values[index].item()}; it must be a finite number")
    return values.detach().to("cpu", torch.float64)


class PolynomialRegression(torch.nn.Module):
    """A polynomial of one variable, fitted by least squares.

    It is computed in double precision on scaled points, for any dtype of the tensors: sizes up to
    1e9 are no problem. `brim.PolynomialRegression` takes several variables and has an inverse.

    Args:
        degree: at least 0, else it is a ValueError.
        has_degree0: whether it has a constant term.

    Attributes:
        coeffs: the coefficients, lowest power first; a buffer that may be set. After `fit` it has
            the dtype and device of x.

    Example:
        >>> model = PolynomialRegression(degree=2)
        >>> size = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> model.fit(size, 5 + 3 * size**2)
        >>> model(torch.tensor([10.0]))
        tensor([305.])
    """

    coeffs: torch.Tensor

    def __init__(self, degree: int, has_degree0: bool = True) -> None:
        super().__init__()
        if not isinstance(degree, int) or degree < 0:
            raise ValueError(f"degree must be a non-negative integer, but got {degree!r}")
        self.degree = degree
        self.has_degree0 = has_degree0
        self.n_degrees = degree + int(has_degree0)
        self.register_buffer("coeffs", torch.zeros(self.n_degrees, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The values at the numbers of x, a 1D tensor; in its dtype if it is floating point."""
        if not isinstance(x, torch.Tensor) or x.ndim != 1:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(f"x must be a 1D tensor, but got {shape}")
        points = x.double()
        value = torch.zeros_like(points)
        for coefficient in reversed(self.coeffs.to(points).unbind()):
            value = value * points + coefficient
        if not self.has_degree0:
            value = value * points
        return value.to(x.dtype if x.is_floating_point() else self.coeffs.dtype)

    def fit(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Fit to the values y at the points x, forgetting the previous fit.

        With fewer points than coefficients it passes through all of them.

        Raises:
            TypeError: if x or y is not a 1D tensor of floating point numbers.
            ValueError: if x and y differ in length, are empty, or hold NaN or an infinity.
        """
        points, values = _check_points("x", x), _check_points("y", y)
        if len(points) != len(values):
            raise ValueError(
                "The number of samples in x and y must be equal, but there are "
                f"{len(points)} and {len(values)}"
            )
        if len(points) == 0:
            raise ValueError("x and y are empty; a fit needs at least one sample")
        # Powers of numbers up to 1 have similar magnitudes; those of sizes do not.
        scale = points.abs().max()
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        first = 0 if self.has_degree0 else 1
        powers = torch.arange(first, first + self.n_degrees, device="cpu")
        columns = (points / scale).unsqueeze(1) ** powers
        if self.n_degrees > 0:
            found = torch.linalg.lstsq(columns, values.unsqueeze(1), driver="gelsd").solution
            # Coefficients in bytes do not fit float16.
            dtype = torch.promote_types(x.dtype, torch.float32)
            self.coeffs = (found.squeeze(1) / scale**powers).to(x.device, dtype)
