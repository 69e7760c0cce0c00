"""No batch of a fitted sampler is over the budget, whatever the program needs."""

from __future__ import annotations

import math
import random
import statistics
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import brim
from brim.data import PackedBatchSampler, SizeAwareBatchSampler

from .fit_cases import run_case


@pytest.mark.filterwarnings("ignore:the sizes of the samples do not determine")  # more or less
@pytest.mark.parametrize("way", ["packed", "in order"])
def test_attention_inside_samples_that_are_laid_one_after_the_other(way: str, held: int) -> None:
    # What a batch needs depends on the squares of its lengths, and the budget is for a total.
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(300, generator=generator).mul(0.7).add(3.5).exp().long().clamp(8, 256)
    texts = [torch.zeros(int(length), dtype=torch.long) for length in lengths]
    embedding, layer = torch.nn.Embedding(10, 8), torch.nn.Linear(8, 24)

    def step(batch: list[torch.Tensor]) -> None:
        parts = layer(embedding(torch.cat(batch))).split([len(text) for text in batch])
        out = []
        for query, key, value in (part.chunk(3, -1) for part in parts):
            out.append((query @ key.T).softmax(-1) @ value)
        torch.cat(out).sum().backward()
        embedding.zero_grad()
        layer.zero_grad()

    budget = brim.memory_stats("cpu").allocated + 3 * 2**20
    sampler: Any = PackedBatchSampler if way == "packed" else SizeAwareBatchSampler
    made = sampler.fit(texts, step, lengths, budget, "cpu", cost="sum", shuffle=True, seed=7)
    assert made.report().batched == 300
    for epoch in range(2):
        made.set_epoch(epoch)
        batches = ([texts[index] for index in batch] for batch in made)
        peaks = brim.collect_peaks(step, batches, "cpu").peaks
        assert max(peaks) <= budget
        # In order, batches with many long samples come up by chance, and room is left for them.
        # Packed, it is left for other orders within a batch, which change the need by a fifth.
        assert max(peaks) - held >= (0.75 if way == "packed" else 0.4) * (budget - held)


def test_a_pooled_network_with_a_wide_head_and_a_loss_for_each_token(held: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(3000, generator=generator).mul(0.7).add(4.1).exp().long().clamp(8, 512)
    texts = [torch.zeros(int(length), dtype=torch.long) for length in lengths]
    embedding = torch.nn.Embedding(100, 32)
    head = torch.nn.Sequential(
        torch.nn.Linear(32, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 100)
    )

    def step(tokens: torch.Tensor) -> None:
        out = head(embedding(tokens).mean(1))[:, None].expand(-1, tokens.shape[1], -1)
        loss = torch.nn.functional.cross_entropy(out.reshape(-1, 100), tokens.flatten())
        loss.backward()
        embedding.zero_grad()
        head.zero_grad()

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return pad_sequence(samples, batch_first=True)

    budget = brim.memory_stats("cpu").allocated + 48 * 2**20
    made = PackedBatchSampler.fit(
        texts, step, lengths, budget, "cpu", collate_fn=collate, shuffle=True, seed=7
    )
    batches = (collate([texts[index] for index in batch]) for batch in made)
    peaks = brim.collect_peaks(step, batches, "cpu").peaks
    assert budget - 7 * 2**20 <= max(peaks) <= budget


def test_work_with_a_high_floor_is_not_refused(held: int) -> None:
    # An optimizer's step takes nearly all of the budget, whatever the batch.
    data = [[0] * (1 + index * 7 % 29) for index in range(300)]
    lengths = [len(sample) for sample in data]
    kept = torch.zeros(2**20, dtype=torch.uint8)

    def step(samples: list[list[int]]) -> None:
        needed = len(samples) * max(map(len, samples)) * 4096
        torch.empty(needed, dtype=torch.uint8)
        torch.empty(9 * 2**20, dtype=torch.uint8)

    budget = held + 11 * 2**20
    made = PackedBatchSampler.fit(data, step, lengths, budget, "cpu")
    assert made.report().batched == 300
    needs = [len(batch) * max(lengths[index] for index in batch) * 4096 for batch in made]
    assert 9 * 2**20 < max(needs) <= 10 * 2**20
    del kept


def test_samples_are_left_out_only_if_one_was_measured_to_be_too_large(held: int) -> None:
    # Nothing lies between the short samples and the long ones, so no model reaches so far.
    data = [[0] * 4] * 50 + [[0] * 900] * 3

    def step(samples: list[list[int]]) -> None:
        torch.empty(len(samples) * max(map(len, samples)) * 1024, dtype=torch.uint8)

    made = PackedBatchSampler.fit(data, step, [len(each) for each in data], held + 2**20, "cpu")
    assert made.report().batched == 53


class Peak(NamedTuple):
    """Bytes for a phase: what is held, and what comes for each sample, token and pair of tokens."""

    held: float
    sample: float
    token: float
    pair: float


def noise_free_case(seed: int) -> tuple[float, float]:
    """A program of the model's own kind: peak of the worst batch and the mean, by the budget."""
    dice = random.Random(seed)
    base = dice.choice([0.1, 1, 4]) * 2**20

    def phase() -> Peak:
        return Peak(
            base * dice.uniform(0.8, 1.5),
            dice.choice([0, 2 ** dice.uniform(8, 16)]),
            2 ** dice.uniform(6, 12),
            dice.choice([0, 0, 2 ** dice.uniform(2, 7)]),
        )

    phases = [phase() for _ in range(dice.choice([1, 2, 3]))]
    if dice.random() < 0.5:
        phases.append(Peak(base * dice.uniform(1.5, 4), 0, 0, 0))
    low, high, middle = dice.choice([(8, 512, 60), (8, 256, 40), (16, 2048, 200), (30, 1000, 200)])
    lengths = [
        min(max(int(dice.lognormvariate(math.log(middle), 0.7)), low), high) for _ in range(1000)
    ]

    def bytes_of(n: int, longest: int) -> int:
        return max(
            int(p.held + n * (p.sample + longest * (p.token + longest * p.pair))) for p in phases
        )

    def step(sizes: list[int]) -> None:
        torch.empty(bytes_of(len(sizes), max(sizes)), dtype=torch.uint8)

    held = brim.memory_stats("cpu").allocated
    room = max(dice.choice([24, 48, 100]) * 2**20, int(1.05 * bytes_of(1, high)))
    made = PackedBatchSampler.fit(
        lengths, step, lengths, held + room, "cpu", shuffle=True, seed=1 + seed
    )
    peaks = [bytes_of(len(batch), max(lengths[i] for i in batch)) / room for batch in made]
    assert made.report().batched == 1000
    return max(peaks), sum(peaks) / len(peaks)


def check_all(outcomes: list[tuple[float, float]]) -> None:
    print(
        f"{len(outcomes)} cases: {sum(o[0] > 1 for o in outcomes)} over; fill of the largest "
        f"batch: median {statistics.median(o[0] for o in outcomes):.3f}, of all batches: "
        f"median {statistics.median(o[1] for o in outcomes):.3f}"
    )
    assert max(largest for largest, _ in outcomes) <= 1
    assert statistics.median(largest for largest, _ in outcomes) >= 0.9


def test_no_batch_of_a_noise_free_program_is_over_the_budget(held: int) -> None:
    check_all([noise_free_case(seed) for seed in range(10)])


@pytest.mark.slow
def test_no_batch_of_450_noise_free_programs_is_over_the_budget(held: int) -> None:
    check_all([noise_free_case(seed) for seed in range(450)])


def network_outcomes(seeds: range) -> list[tuple[float, float]]:
    outcomes = []
    for seed in seeds:
        with warnings.catch_warnings():
            # Some needs cannot be predicted, and torch tells of matmuls that ran out of memory.
            warnings.filterwarnings("ignore", "the sizes of the samples do not determine|mkldnn_")
            outcome = run_case(seed)
        assert outcome.left_out == 0, outcome
        assert outcome.largest <= 1, outcome
        outcomes.append((outcome.largest, outcome.mean))
    return outcomes


def test_no_batch_of_a_random_network_is_over_the_budget() -> None:
    check_all(network_outcomes(range(4)))


@pytest.mark.slow
def test_no_batch_of_500_random_networks_is_over_the_budget() -> None:
    check_all(network_outcomes(range(500)))
