"""CLIP on a large batch: the time and the peak of a step, beside GradCache's method and CachedMNRL.

The contrastive loss of all pairs, with the gradients of the whole batch. Images and texts are on
the host and go to the device in parts. All three encode in parts without a graph, work the loss
out, and encode again; they differ in the parts and in the loss:

- brim.Microbatches finds its parts under the budget; `brim.nn.functional.linear_cross_entropy` does
  not hold the scores of all pairs at once.
- GradCache's method, as in its paper, with parts of `--chunk` pairs and the scores of all pairs.
- the method of sentence-transformers' CachedMultipleNegativesRankingLoss with as large parts, whose
  loss goes by `--chunk` rows of the scores, with a backward each.

On a GPU: ViT-B/32, 32,768 pairs, bfloat16 autocast, 10 GiB. On the CPU: a tiny model and 256 pairs.
Methods take turns. Random weights, nothing is downloaded.

    ./dev bench contrastive
    ./dev bench contrastive -- --pairs 4096 --rounds 1
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import progress, synchronize
from results import Panel, Table
from torch.nn.functional import cross_entropy, normalize
from transformers import CLIPConfig, CLIPModel

import brim
from brim.nn.functional import linear_cross_entropy

GIB = 2**30
LONGEST = 45.0  # seconds, after which no further round begins

Rows = dict[str, torch.Tensor]
Step = Callable[[Rows], torch.Tensor]


class Work:
    """The model, and what all methods share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type != "cpu"
        torch.manual_seed(0)
        small = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
        small |= {"num_attention_heads": 4}
        config = (
            CLIPConfig()  # ViT-B/32
            if self.on_gpu
            else CLIPConfig(
                vision_config={**small, "image_size": 64, "patch_size": 16},
                text_config={**small, "vocab_size": 1000, "eos_token_id": 999, "bos_token_id": 998},
                projection_dim=32,
            )
        )
        self.vision, self.text = config.vision_config, config.text_config
        self.model = CLIPModel(config).to(device).train()
        self.encoders: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "image": self.image,
            "text": self.texts,
        }

    def batch(self, pairs: int) -> Rows:
        """On the host: as many different ones as are quickly made, and again."""
        size, length = self.vision.image_size, self.text.max_position_embeddings
        few = min(pairs, 1024)
        images = torch.randint(0, 256, (few, 3, size, size), dtype=torch.uint8)
        texts = torch.randint(1, self.text.vocab_size - 2, (few, length))
        texts[:, -1] = self.text.eos_token_id
        times = -(-pairs // few)
        made = {
            "image": images.repeat(times, 1, 1, 1)[:pairs],
            "text": texts.repeat(times, 1)[:pairs],
        }
        if not self.on_gpu:
            return made
        return {name: each.pin_memory() for name, each in made.items()}

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.on_gpu)

    def image(self, part: torch.Tensor) -> torch.Tensor:
        pixels = part.to(self.device, non_blocking=True).float().div_(127.5).sub_(1)
        with self.autocast():
            return _tensor(self.model.get_image_features(pixel_values=pixels)).float()

    def texts(self, part: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            tokens = part.to(self.device, non_blocking=True)
            return _tensor(self.model.get_text_features(input_ids=tokens)).float()

    def both(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """What is multiplied to scores: normalised, with the temperature, in the loss's type."""
        a, b = (normalize(rows[name], dim=-1) for name in ("image", "text"))
        a = self.model.logit_scale.exp() * a
        kind = torch.bfloat16 if self.on_gpu else torch.float32
        return a.to(kind), b.to(kind)

    def loss(self, rows: Rows) -> torch.Tensor:
        """Without the scores of all pairs."""
        a, b = self.both(rows)
        labels = torch.arange(len(a), device=self.device)
        one = linear_cross_entropy(a, b, labels, in_float32=True)
        return (one + linear_cross_entropy(b, a, labels, in_float32=True)) / 2

    def plain_loss(self, rows: Rows) -> torch.Tensor:
        a, b = self.both(rows)
        scores = a @ b.T
        labels = torch.arange(len(a), device=self.device)
        return (cross_entropy(scores.float(), labels) + cross_entropy(scores.T.float(), labels)) / 2


def _tensor(output: Any) -> torch.Tensor:
    """The features: some versions of transformers return them in an output."""
    return output if isinstance(output, torch.Tensor) else output.pooler_output  # type: ignore[no-any-return]


def encode_all(work: Work, batch: Rows, chunk: int) -> Rows:
    with torch.no_grad():
        return {
            name: torch.cat([encode(part) for part in batch[name].split(chunk)])
            for name, encode in work.encoders.items()
        }


def encode_again(work: Work, batch: Rows, rows: Rows, chunk: int) -> None:
    for name, encode in work.encoders.items():
        gradients = rows[name].grad
        assert gradients is not None
        for part, gradient in zip(batch[name].split(chunk), gradients.split(chunk), strict=True):
            encode(part).backward(gradient)


def grad_cache(work: Work, chunk: int) -> Step:
    def step(batch: Rows) -> torch.Tensor:
        rows = {k: v.requires_grad_() for k, v in encode_all(work, batch, chunk).items()}
        loss = work.plain_loss(rows)
        loss.backward()
        encode_again(work, batch, rows, chunk)
        return loss.detach()

    return step


def cached_mnrl(work: Work, chunk: int) -> Step:
    """Its symmetric form."""

    def step(batch: Rows) -> torch.Tensor:
        rows = {k: v.requires_grad_() for k, v in encode_all(work, batch, chunk).items()}
        count = len(rows["image"])
        total = torch.zeros((), device=work.device)
        for begin in range(0, count, chunk):
            a, b = work.both(rows)
            end = min(begin + chunk, count)
            labels = torch.arange(begin, end, device=work.device)
            losses = [
                cross_entropy((of[begin:end] @ to.T).float(), labels) for of, to in ((a, b), (b, a))
            ]
            loss = (losses[0] + losses[1]) / 2 * ((end - begin) / count)
            loss.backward()
            total += loss.detach()
        encode_again(work, batch, rows, chunk)
        return total

    return step


def measured(work: Work, step: Step, batch: Rows) -> tuple[float, int, float]:
    """Seconds, peak in bytes with the model, and the loss."""
    work.model.zero_grad()
    with brim.PeakMeter(work.device) as meter:
        synchronize(work.device)
        begin = time.perf_counter()
        loss = step(batch)
        synchronize(work.device)
        seconds = time.perf_counter() - begin
    return seconds, meter.start + meter.peak, float(loss)


def difference(work: Work, step: Step, other: Step, batch: Rows) -> float:
    """Of the gradients that two steps leave, relative to their size."""
    found = []
    for each in (step, other):
        work.model.zero_grad()
        each(batch)
        found.append(
            torch.cat([p.grad.flatten() for p in work.model.parameters() if p.grad is not None])
        )
    work.model.zero_grad()
    return float((found[0] - found[1]).norm() / found[1].norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", help="default: the accelerator if there is one")
    parser.add_argument("--pairs", type=int, help="of the batch; 32768, on the CPU 256")
    parser.add_argument("--budget", type=float, help="in GiB; 10, on the CPU 0.15")
    parser.add_argument("--chunk", type=int, help="pairs of the other methods; 512, on the CPU 32")
    parser.add_argument("--rounds", type=int, default=2, help="steps of each that are timed")
    options = parser.parse_args()
    begun = time.perf_counter()
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    )
    work = Work(torch.device(options.device or accelerator or "cpu"))
    if not work.on_gpu:
        brim.install_cpu_allocator()
        work = Work(work.device)  # in memory that is counted
    pairs = options.pairs or (32768 if work.on_gpu else 256)
    chunk = options.chunk or (512 if work.on_gpu else 32)
    budget = int((options.budget or (10 if work.on_gpu else 0.15)) * GIB)
    name = "ViT-B/32" if work.on_gpu else "a tiny CLIP"
    timed, needed = "time of a step, s", "peak, GiB"
    table = Table(
        f"{name}, {pairs:,} pairs, a budget of {budget / GIB:g} GiB",
        ("method", "parts", timed, needed, "loss", "of brim's"),
        device=work.device,
        width=42,
        column=24,
        panels=[Panel(timed, [timed]), Panel(needed, [needed])],
    )

    brim_step = brim.Microbatches(encode=work.encoders, loss=work.loss, model=work.model)

    def ours(batch: Rows) -> torch.Tensor:
        with brim.budget(budget, device=work.device):
            return brim_step(batch)

    steps: dict[str, Step] = {
        "brim.Microbatches": ours,
        "GradCache's method": grad_cache(work, chunk),
        "CachedMNRL's method": cached_mnrl(work, chunk),
    }
    few = work.batch(min(pairs, 2 * chunk))
    progress("warming up, comparing gradients")
    apart = difference(work, ours, steps["GradCache's method"], few)
    progress(f"the batch, after {time.perf_counter() - begun:.0f} s")
    batch = work.batch(pairs)
    progress(f"the first step, after {time.perf_counter() - begun:.0f} s")
    first, first_peak, _ = measured(work, ours, batch)
    begun_with = "brim.Microbatches, first of this length"
    table.row(begun_with, "", f"{first:.2f}", f"{first_peak / GIB:.2f}")
    times: dict[str, list[float]] = {each: [] for each in steps}
    peaks: dict[str, int] = dict.fromkeys(steps, 0)
    losses: dict[str, float] = {}
    for turn in range(options.rounds):
        if turn > 0 and time.perf_counter() - begun > LONGEST:
            break
        for each, step in steps.items():
            progress(f"{each}, after {time.perf_counter() - begun:.0f} s")
            try:
                seconds, peak, losses[each] = measured(work, step, batch)
            except torch.OutOfMemoryError as error:
                progress(f"{each}: {str(error).partition('.')[0]}")
                continue
            times[each].append(seconds)
            peaks[each] = max(peaks[each], peak)
    best = min(times["brim.Microbatches"])
    for each, seconds in times.items():
        parts = str(brim_step.size if each == "brim.Microbatches" else chunk)
        if not seconds:
            table.row(each, parts, "out of memory")
            continue
        peak, own = peaks[each], peaks["brim.Microbatches"]
        table.row(
            *(each, parts, f"{min(seconds):.2f}", f"{peak / GIB:.2f}", f"{losses[each]:.4f}"),
            f"{min(seconds) / best:.2f}× time, {peak / own:.2f}× peak",
        )
    inside = "within" if peaks["brim.Microbatches"] <= budget else "OVER"
    print(f"  brim: {inside} the budget of {budget / GIB:g} GiB")
    print(f"  gradients of {len(few['text']):,} pairs differ from GradCache's by {apart:.1e}")


if __name__ == "__main__":
    main()
