"""A byte budget in, batches out: samplers that measure the work and stay under the budget."""

from __future__ import annotations

import gc
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import brim
from brim.data import PackedBatchSampler, SizeAwareBatchSampler

VOCABULARY = 100


class Tagger(torch.nn.Module):
    """A layer of attention, written out so that memory grows with the square of the length."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.projection = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        query, key, value = self.projection(hidden).chunk(3, -1)
        attention = (query @ key.transpose(1, 2)).softmax(-1)
        return self.out(hidden + attention @ value)  # type: ignore[no-any-return]


class Perceptron(torch.nn.Module):
    """Memory grows with the number of tokens."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, width),
            torch.nn.Linear(width, 2 * width),
            torch.nn.GELU(),
            torch.nn.LayerNorm(2 * width),
            torch.nn.Linear(2 * width, VOCABULARY),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(tokens)  # type: ignore[no-any-return]


class Training:
    """Texts of log-normal lengths, and a step over a padded batch of them."""

    def __init__(self, model: type[torch.nn.Module], count: int, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.exp(torch.randn(count, generator=generator) * 0.5 + 3.5)
        self.lengths = lengths.long().clamp(4, 160)
        self.texts = [
            torch.randint(0, VOCABULARY, (int(length),), generator=generator)
            for length in self.lengths
        ]
        torch.manual_seed(0)
        self.device = device
        self.model = model().to(device)

    def step(self, tokens: torch.Tensor) -> None:
        self.model.zero_grad()
        tokens = tokens.to(self.device)
        logits = self.model(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        # By hand: torch.optim loads torch.compile, whose objects slow each later test's collection.
        with torch.no_grad():
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad

    def collate(self, texts: list[torch.Tensor]) -> torch.Tensor:
        return pad_sequence(texts, batch_first=True)

    def peaks_of(self, sampler: Any) -> list[int]:
        """Bytes held at most while each batch is trained on; to run out of memory is an error."""
        peaks = []
        for batch in sampler:
            tokens = self.collate([self.texts[index] for index in batch])
            with brim.PeakMeter(self.device) as meter:
                self.step(tokens)
            peaks.append(meter.start + meter.peak)
        return peaks


Fit = Callable[..., Any]
FITS: dict[str, Fit] = {
    "ordered by length": lambda *args, lengths, **options: SizeAwareBatchSampler.fit(
        *args, sampler=torch.argsort(lengths), **options
    ),
    "packed": lambda *args, lengths, **options: PackedBatchSampler.fit(*args, **options),
    "packed and shuffled": lambda *args, lengths, **options: PackedBatchSampler.fit(
        *args, shuffle=True, seed=3, **options
    ),
}


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize(("model", "budget"), [(Tagger, "6MiB"), (Perceptron, "8MiB")])
def test_training_never_runs_out_of_memory_and_fills_nine_tenths_of_the_budget(
    model: type[torch.nn.Module], budget: str, fit: str
) -> None:
    brim.install_cpu_allocator()
    training = Training(model, 1500)
    with brim.budget(budget, device="cpu") as limit:
        sampler = FITS[fit](
            training.texts,
            training.step,
            training.lengths,
            budget,
            "cpu",
            collate_fn=training.collate,
            lengths=training.lengths,
        )
        expected = len(sampler)
        peaks = training.peaks_of(sampler)
    assert len(peaks) == expected > 12
    assert sampler.report().batched == 1500
    assert max(peaks) <= limit.limit
    # The mean over all batches, the last one included, which is what was left over.
    assert sum(peaks) / len(peaks) >= 0.9 * limit.limit


@pytest.mark.parametrize("sampler", [SizeAwareBatchSampler, PackedBatchSampler])
def test_samples_laid_one_after_the_other_fill_nine_tenths_too(sampler: Any) -> None:
    brim.install_cpu_allocator()
    training = Training(Perceptron, 1500)
    layer = torch.nn.Linear(64, 64)

    def work(tokens: torch.Tensor) -> None:
        layer.zero_grad()
        features = torch.nn.functional.one_hot(tokens % 64, 64).float()
        layer(features).relu().square().sum().backward()

    peaks = []
    with brim.budget("4MiB", device="cpu") as limit:
        made = sampler.fit(
            training.texts, work, training.lengths, "4MiB", "cpu", cost="sum", collate_fn=torch.cat
        )
        for batch in made:
            tokens = torch.cat([training.texts[index] for index in batch])
            with brim.PeakMeter("cpu") as meter:
                work(tokens)
            peaks.append(meter.start + meter.peak)
    assert max(peaks) <= limit.limit
    assert sum(peaks) / len(peaks) >= 0.9 * limit.limit


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fit", FITS)
def test_training_on_a_cuda_device(fit: str) -> None:
    gc.collect()  # what an earlier test left would count, and then be gone
    training = Training(Tagger, 20_000, device="cuda")
    training.step(training.collate(training.texts[:8]))  # libraries take their workspaces
    # The budget is on what torch's allocator reserves, which is more than what tensors hold. Blocks
    # that earlier tests left beside a live one can be neither released nor used by everything.
    brim.release_cached("cuda")
    budget = brim.memory_stats("cuda").reserved + 256 * 2**20
    with brim.budget(budget, device="cuda"):
        sampler = FITS[fit](
            training.texts,
            training.step,
            training.lengths,
            budget,
            "cuda",
            collate_fn=training.collate,
            lengths=training.lengths,
        )
        peaks = training.peaks_of(sampler)
    assert max(peaks) <= budget
    assert sampler.max_total_size <= budget
    assert sum(peaks) / len(peaks) >= 0.85 * sampler.max_total_size
    assert sampler.max_total_size >= 0.7 * budget


# ---------------------------------------------------------------- what may be given


class Work:
    """Takes 1 KiB a number in the padded batch; a list of samples is padded here."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, samples: list[list[int]]) -> None:
        shape = (len(samples), max(map(len, samples)))
        self.shapes.append(shape)
        torch.zeros(shape[0] * shape[1], 1024, dtype=torch.uint8)


DATA = [[0] * (1 + index * 7 % 29) for index in range(300)]
LENGTHS = [len(sample) for sample in DATA]


def sample_length(sample: list[int]) -> int:
    return len(sample)


@pytest.mark.parametrize(
    "sizeof",
    [
        LENGTHS,
        torch.tensor(LENGTHS),
        torch.tensor(LENGTHS, dtype=torch.float32),
        LENGTHS.__getitem__,
        dict(enumerate(LENGTHS)),
        sample_length,  # cannot take an index, so it is given the sample
    ],
    ids=["list", "tensor", "floats", "of an index", "mapping", "of a sample"],
)
@pytest.mark.parametrize("sampler", [SizeAwareBatchSampler, PackedBatchSampler])
def test_sizes_for_fitting_are_given_in_any_way(sampler: Any, sizeof: Any, held: int) -> None:
    work = Work()
    made = sampler.fit(DATA, work, sizeof, held + 2**20, "cpu")
    assert isinstance(made, sampler)
    assert made.model.fitted
    assert 5 <= len(work.shapes) <= 30
    batches = list(made)
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(300))
    needs = [len(batch) * max(LENGTHS[index] for index in batch) * 1024 for batch in batches]
    assert max(needs) <= 2**20
    assert max(needs) >= 0.85 * 2**20


def test_options_are_passed_on_and_a_model_is_kept(held: int) -> None:
    budget = held + 2**20
    ordered = SizeAwareBatchSampler.fit(
        DATA, Work(), LENGTHS, budget, "cpu", sampler=range(10, 20), as_tensors=True
    )
    assert torch.cat(list(ordered)).tolist() == list(range(10, 20))  # type: ignore[arg-type]
    packed = PackedBatchSampler.fit(
        DATA, Work(), LENGTHS, budget, "cpu", shuffle=True, seed=5, window=50, world_size=2
    )
    assert (packed.window, packed.world_size) == (50, 2)
    assert packed.model is not None
    assert packed.max_total_size == budget


@pytest.mark.parametrize("sampler", [SizeAwareBatchSampler, PackedBatchSampler])
def test_a_budget_is_bytes_text_or_a_share_of_the_limit(sampler: Any) -> None:
    brim.install_cpu_allocator()
    with brim.budget("4MiB", device="cpu"):
        for budget in ("50%", "2MiB", 2 * 2**20):
            made = sampler.fit(DATA, Work(), LENGTHS, budget, "cpu")
            assert made.max_total_size == 2 * 2**20


@pytest.mark.parametrize("sampler", [SizeAwareBatchSampler, PackedBatchSampler])
@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"cost": "count"}, ValueError, 'cost must be "padded" or "sum" to be fitted, got \'count'),
        ({"dataset": []}, ValueError, "dataset is empty"),
        ({"dataset": Work()}, TypeError, "dataset must have samples by index, got <"),
        (
            {"work": [1, 2]},
            TypeError,
            r"work must be callable, got \[1, 2\]",
        ),
        ({"sizeof": None}, TypeError, "sizeof is missing, the sizes of the samples: call"),
        ({"budget": None}, TypeError, "budget is missing, the bytes that the device may hold: c"),
        ({"work": lambda: None}, TypeError, r"as work\(batch\), but it takes \(\)"),
        ({"sizeof": LENGTHS[:-1]}, ValueError, "sizeof has 299 sizes, and dataset 300 samples"),
        ({"sizeof": [0.5] * 300}, ValueError, "sizes must be whole numbers to fit"),
        ({"sizeof": [-1] * 300}, ValueError, "sizes must not be negative, got -1 at index 0"),
        ({"sizeof": [float("nan")] * 300}, ValueError, "sizes must be"),
        ({"sizeof": 5}, TypeError, "sizeof must be a callable"),
        ({"budget": "much"}, ValueError, "much"),
        ({"budget": -1}, ValueError, "-1"),
    ],
)
def test_wrong_argument_of_fit(
    sampler: Any, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    arguments = {
        "dataset": DATA,
        "work": Work(),
        "sizeof": LENGTHS,
        "budget": "1GiB",
        "device": "cpu",
        **changes,
    }
    with pytest.raises(error, match=text):
        sampler.fit(**arguments)


def test_an_error_of_the_work_comes_through() -> None:
    def work(samples: list[list[int]]) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        PackedBatchSampler.fit(DATA, work, LENGTHS, "1GiB", "cpu")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_work_that_fails_on_a_list_is_told_of_collate_fn() -> None:
    def work(batch: Any) -> None:
        batch.sum()

    with pytest.raises(AttributeError) as failed:
        PackedBatchSampler.fit(DATA, work, LENGTHS, "1GiB", "cpu")
    notes = ["there is no collate_fn, so the work got a list of samples"]
    assert getattr(failed.value, "__notes__", []) == notes
    with pytest.raises(AttributeError) as failed:
        PackedBatchSampler.fit(DATA, work, LENGTHS, "1GiB", "cpu", collate_fn=list)
    assert not hasattr(failed.value, "__notes__")


def test_samples_that_cannot_fit_are_left_out_and_told(held: int) -> None:
    data = [[0] * 10] * 50 + [[0] * 5000]
    lengths = [len(sample) for sample in data]
    with brim.budget(held + 2**20, device="cpu"):
        with pytest.warns(UserWarning, match="1 of 51 samples are left out, over budget: 50"):
            sampler = PackedBatchSampler.fit(data, Work(), lengths, held + 2**20, "cpu")
        for batch in sampler:
            Work()([data[index] for index in batch])
    assert sorted(itertools.chain.from_iterable(sampler)) == list(range(50))


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_fit_names_the_index_of_a_size_that_is_not_finite(wrong: float) -> None:
    with pytest.raises(ValueError, match="at index 1"):
        PackedBatchSampler.fit([1, 2], Work(), [1.0, wrong], "1MiB", "cpu")


def test_fit_refuses_a_budget_that_the_device_does_not_have() -> None:
    with (
        brim.budget("1MiB", device="cpu"),
        pytest.raises(ValueError, match="budget must not exceed"),
    ):
        PackedBatchSampler.fit(DATA, Work(), LENGTHS, "100MiB", "cpu")


def test_fit_warns_of_a_need_that_sizes_do_not_tell_and_stays_within_the_budget(held: int) -> None:
    def staircase(samples: list[list[int]]) -> None:
        torch.zeros(2 ** (len(samples) * max(map(len, samples))).bit_length(), 64)

    with pytest.warns(UserWarning, match=r"sizes of the samples do not determine.*up to \d+% more"):
        made = PackedBatchSampler.fit(DATA, staircase, LENGTHS, held + 2**20, "cpu")
    batches = ([DATA[index] for index in batch] for batch in made)
    assert max(brim.collect_peaks(staircase, batches, "cpu").peaks) <= held + 2**20


# ---------------------------------------------------------------- a job that is restarted


@pytest.mark.parametrize("cost", ["padded", "sum"])
@pytest.mark.parametrize("sampler", [SizeAwareBatchSampler, PackedBatchSampler])
def test_a_restarted_job_goes_on_with_the_model_of_its_state(
    sampler: Any, cost: str, held: int
) -> None:
    def fit(work: Any, **options: Any) -> Any:
        options = {"cost": cost, "shuffle": True, "seed": 1, **options}
        return sampler.fit(DATA, work, LENGTHS, held + 2**20, "cpu", **options)

    class More(Work):
        """Needs a little more, so that its model is another."""

        def __call__(self, batch: Any) -> None:
            kept = torch.zeros(10_000)
            super().__call__(batch)
            del kept

    stopped = fit(Work())
    running = iter(stopped)
    done = [next(running) for _ in range(3)]
    state = json.loads(json.dumps(stopped.state_dict()))
    rest = list(running)

    restarted = fit(More())
    assert restarted.model.state_dict() != stopped.model.state_dict()
    restarted.load_state_dict(state)
    assert restarted.max_total_size == stopped.max_total_size
    assert list(restarted) == rest

    unmeasured = fit(None, state=state)  # the work is not called
    assert unmeasured.model.state_dict() == stopped.model.state_dict()
    assert list(unmeasured) == rest
    shares = [fit(None, state=state, rank=rank, world_size=3) for rank in range(3)]
    given = itertools.chain(done, *shares)
    assert sorted(itertools.chain.from_iterable(given)) == list(range(300))


def test_a_state_of_another_fit_is_refused(held: int) -> None:
    made = PackedBatchSampler.fit(DATA, Work(), LENGTHS, held + 2**20, "cpu")
    state = made.state_dict()
    other = PackedBatchSampler.fit(DATA, Work(), LENGTHS, held + 2**21, "cpu")
    maximum = other.max_total_size
    with pytest.raises(ValueError, match=r"its budget is .*, here it is"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="its window is 10000, here it is 7"):
        PackedBatchSampler.fit(DATA, Work(), LENGTHS, held + 2**20, "cpu", window=7, state=state)
    with pytest.raises(ValueError, match=r"lacks \['fitted'\]"):
        other.load_state_dict(PackedBatchSampler(LENGTHS, 100).state_dict())
    assert other.max_total_size == maximum
