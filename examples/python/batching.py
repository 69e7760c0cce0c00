"""Train on sequences of different lengths: as many in a batch as a budget of bytes has room for."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import brim
from brim.data import PackedBatchSampler

BUDGET = "32MiB"
LETTERS = 20


class Sequences(Dataset[torch.Tensor]):
    """Random sequences, their lengths spread as those of proteins are."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        logarithms = torch.randn(count, generator=generator) * 0.6
        self.lengths = (logarithms.exp() * 60).round().clamp(10, 300).long()

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Letters as numbers from 1; 0 is padding."""
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, LETTERS + 1, (int(self.lengths[index]),), generator=generator)


def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    """One row a sequence, padded to the longest."""
    return pad_sequence(samples, batch_first=True)


class Trainer:
    """A small transformer that learns to give each letter back."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.embed = nn.Embedding(LETTERS + 1, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, LETTERS + 1)
        self.model = nn.ModuleList([self.embed, self.layer, self.head])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, letters: torch.Tensor) -> float:
        """One step of training; returns the loss."""
        hidden = self.layer(self.embed(letters), src_key_padding_mask=letters == 0)
        loss = nn.functional.cross_entropy(
            self.head(hidden).flatten(0, 1), letters.flatten(), ignore_index=0
        )
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def main() -> None:
    """Measure, batch, train; print what was planned and what was needed."""
    brim.install_cpu_allocator()
    dataset, trainer = Sequences(5_000), Trainer()
    sampler = PackedBatchSampler.fit(
        dataset,
        trainer.step,
        dataset.lengths,
        BUDGET,
        device="cpu",
        collate_fn=collate,
        shuffle=True,
    )
    print(sampler.model)
    print(sampler.report())

    limit = brim.parse_bytes(BUDGET)
    peaks, losses, counts = [], [], []
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
    with brim.budget(BUDGET, device="cpu"):
        for letters in loader:
            with brim.PeakMeter("cpu") as meter:
                losses.append(trainer.step(letters))
            peaks.append((meter.start + meter.peak) / limit)
            counts.append(len(letters))
    print(f"batches of {min(counts)} to {max(counts)} samples")
    mean = sum(peaks) / len(peaks)
    print(f"peak of a batch: mean {mean:.1%} of {BUDGET}, most {max(peaks):.1%}")
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")


if __name__ == "__main__":
    main()
