"""Serves requests of growing size under a budget: one that is too large is refused, no more."""

import torch

import brim


def serve(rows: int) -> torch.Tensor:
    """For `rows` random points, how far the nearest of 4096 others is."""
    x = torch.rand(rows, 16)
    y = torch.rand(4096, 16)
    return torch.cdist(x, y).amin(dim=1)


def main() -> None:
    """Print one line a request."""
    refused = []
    with brim.budget("64MiB", device="cpu"):
        for rows in (256, 1024, 4096, 16384):
            with brim.PeakMeter("cpu") as meter:
                try:
                    serve(rows)
                except Exception as error:
                    cause = brim.classify_error(error)
                    if not cause:
                        raise
                    asked = brim.format_bytes(cause.requested or 0)
                    print(f"{rows} rows: refused, {cause.kind.name}, {asked} asked for")
                    refused.append(rows)
                    continue
            print(f"{rows} rows: peak {brim.format_bytes(meter.peak)}")
    print(f"still held: {brim.format_bytes(brim.memory_stats('cpu').allocated)}")
    assert refused == [4096, 16384], "these do not fit 64 MiB"


if __name__ == "__main__":
    main()
