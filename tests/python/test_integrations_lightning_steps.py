"""Training steps of Lightning in parts.

All of this is slow, since importing Lightning is; conftest.py leaves the file out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import brim

pytest.importorskip("lightning")

import lightning

from brim.integrations.lightning import AdaptiveSteps

from .lightning_modules import MARKS, Net, train, trainer

pytestmark = MARKS

SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "accumulation": ({"dict": True}, {}, {"accumulate_grad_batches": 3}),
    "clipping": ({}, {}, {"gradient_clip_val": 0.01}),
    "sum": ({"sum": True}, {"reduction": "sum"}, {}),
}


@pytest.mark.parametrize(("net", "options", "settings"), SETTINGS.values(), ids=SETTINGS)
def test_training_in_parts_is_the_same_training(
    net: dict[str, Any], options: dict[str, Any], settings: dict[str, Any]
) -> None:
    expected, plain = train(Net(**net), **settings)
    whole = Net(**net)
    weights, watch = train(whole, AdaptiveSteps(**options), **settings)
    assert all(map(torch.equal, weights, expected))
    assert watch.logged == plain.logged
    steps = AdaptiveSteps(size=3, **options)
    parts = Net(**net)
    weights, watch = train(parts, steps, **settings)
    assert max(parts.seen) == 3
    for ours, theirs in zip(weights, expected, strict=True):
        assert ours.allclose(theirs, rtol=1e-12)
    assert watch.backwards == plain.backwards
    for ours, theirs in zip(watch.outputs, plain.outputs, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(ours[name].allclose(theirs[name]) for name in theirs)
    if "sum" not in net:
        for ours, theirs in zip(watch.logged, plain.logged, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)


def test_a_batch_that_does_not_fit_is_split(held: int) -> None:
    class Wide(Net):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 64
            self.net = nn.Sequential(nn.Linear(8, 2000), nn.Tanh(), nn.Linear(2000, 1)).double()

    torch.manual_seed(0)
    plain, net = Wide(), Wide()
    net.load_state_dict(plain.state_dict())
    expected, seen = train(plain)
    steps = AdaptiveSteps()
    with brim.budget(brim.memory_stats("cpu").allocated + 2 * 2**20, device="cpu"):
        weights, watch = train(net, steps)
    assert steps.step is not None
    assert steps.step.size < 64
    for ours, theirs in zip(weights, expected, strict=True):
        assert ours.allclose(theirs, rtol=1e-12)
    assert len(watch.logged) == len(seen.logged)  # failed attempts logged nothing
    for mine, other in zip(watch.logged, seen.logged, strict=True):
        assert mine == pytest.approx(other, rel=1e-6)


def test_mixed_precision_with_a_scaler() -> None:
    plugin = lightning.pytorch.plugins.MixedPrecision

    def precision() -> Any:
        made = plugin("bf16-mixed", "cpu")
        made.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        return made

    expected, _ = train(Net(), plugins=precision())
    weights, _ = train(Net(), AdaptiveSteps(), plugins=precision())
    assert all(map(torch.equal, weights, expected))
    weights, _ = train(Net(), AdaptiveSteps(size=5), plugins=precision())
    for ours, theirs in zip(weights, expected, strict=True):
        assert ours.allclose(theirs, rtol=0.05, atol=1e-3)


def test_metrics_count_each_sample_once() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(Net):
        def __init__(self, fails: bool) -> None:
            super().__init__()
            self.error = torchmetrics.MeanSquaredError()
            self.fails = fails

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.seen.append(len(batch[0]))
            prediction = self.net(batch[0])
            self.error(prediction.flatten(), batch[1].flatten())
            self.log("mse", self.error, on_step=False, on_epoch=True)
            # Here, and not at some allocation of the whole fit: that might be one of the loader.
            if self.fails and batch_idx == 2:
                self.fails = False
                raise torch.OutOfMemoryError("CPU out of memory. Tried to allocate 1.00 GiB.")
            return (prediction - batch[1]).square().mean()

    results = []
    for options, fails in (({}, False), ({"size": 3}, False), ({}, True)):
        made, net = trainer(AdaptiveSteps(**options), max_epochs=1), Measured(fails)
        made.fit(net)
        results.append(float(made.callback_metrics["mse"]))
        assert not net.fails
        assert (min(net.seen) < 8) == (bool(options) or fails)
    assert results == pytest.approx([results[0]] * 3, rel=1e-6)


def test_a_skipped_batch_stays_skipped() -> None:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("index", float(batch_idx))
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    expected, plain = train(Skips())
    weights, watch = train(Skips(), AdaptiveSteps())
    assert all(map(torch.equal, weights, expected))
    assert watch.logged == plain.logged  # also what a step logged that returned None
    with pytest.raises(ValueError, match="None for a part"):
        train(Skips(), AdaptiveSteps(size=2))


def test_what_cannot_be_in_parts_is_refused() -> None:
    class Manual(Net):
        automatic_optimization = False

    class Backward(Net):
        def backward(self, loss: torch.Tensor) -> None:
            loss.backward()

    class Contrast(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return (batch[0] @ self.net[0].weight.T).var(0, correction=0).mean()

    with pytest.raises(ValueError, match=r"needs automatic optimization; use brim\.Microbatches"):
        train(Manual(), AdaptiveSteps())
    with pytest.raises(ValueError, match="Backward has a backward of its own"):
        train(Backward(), AdaptiveSteps())
    train(Contrast(), AdaptiveSteps())  # fits
    with pytest.raises(ValueError, match="does not follow from their own"):
        train(Contrast(), AdaptiveSteps(size=4))
    net = Net()
    net.norm = nn.BatchNorm1d(1)
    with pytest.raises(ValueError, match=r"norm \(BatchNorm1d\)"):
        train(net, AdaptiveSteps())
    with pytest.raises(ValueError, match="count is for a mean"):
        AdaptiveSteps("sum", count=len)
    with pytest.raises(TypeError, match="unknown option"):
        AdaptiveSteps(sice=3)
    for name in ("model", "scaler"):
        with pytest.raises(TypeError, match=f"AdaptiveSteps sets {name} itself"):
            AdaptiveSteps(**{name: None})


# ---------------------------------------------------------------- what the loss is a mean over


class Tokens(Net):
    """Texts with these numbers of labels. At first, every sample has the same loss."""

    def __init__(self, loss: Any = None, counts: tuple[int, ...] = (6, 6, 1, 1)) -> None:
        super().__init__()
        self.net = nn.Linear(8, 5).double()
        nn.init.zeros_(self.net.weight)
        nn.init.zeros_(self.net.bias)
        self.loss, self.counts = loss or of_tokens, counts

    def loader(self) -> Any:
        x = torch.rand(len(self.counts), 6, 8, generator=torch.Generator().manual_seed(1))
        y = torch.arange(6).remainder(5).repeat(len(self.counts), 1)
        kept = torch.arange(6) < torch.tensor(self.counts)[:, None]
        if self.loss is not of_mask:
            y = y.where(kept, -100)
        return DataLoader(TensorDataset(x.to(self.net.weight), y, kept), batch_size=4)

    train_dataloader = loader

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(len(batch[0]))
        return self.loss(self.net, *batch)


def losses(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(net(x).mT, y, reduction="none")


def of_tokens(net: nn.Module, x: torch.Tensor, y: torch.Tensor, kept: torch.Tensor) -> Any:
    return losses(net, x, y).sum() / kept.sum().clamp(min=1)


def of_shifted_tokens(net: nn.Module, x: torch.Tensor, y: torch.Tensor, _: object) -> Any:
    return losses(net, x[:, :-1], y[:, 1:]).sum() / (y[:, 1:] != -100).sum()


def of_samples(net: nn.Module, x: torch.Tensor, y: torch.Tensor, kept: torch.Tensor) -> Any:
    return (losses(net, x, y).sum(1) / kept.sum(1)).mean()


def of_mask(net: nn.Module, x: torch.Tensor, y: torch.Tensor, kept: torch.Tensor) -> Any:
    return (losses(net, x, y) * kept).sum() / kept.sum()


def of_noise(net: nn.Module, x: torch.Tensor, *_: object) -> torch.Tensor:
    return (net(x) + torch.randn(len(x), 6, 5)).square().mean()


def of_slope(net: nn.Module, x: torch.Tensor, *_: object) -> torch.Tensor:
    x = x.clone().requires_grad_()
    out = (1 + net(x)).square().sum()
    return torch.autograd.grad(out, x, create_graph=True)[0].add(1).square().mean()


@pytest.mark.parametrize("loss", [of_tokens, of_shifted_tokens, of_samples])
@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_what_a_mean_is_over_is_found_out(loss: Any, precision: str) -> None:
    """Although the first two samples have equally many labels."""
    exact = precision == "64-true"

    def parts(*callbacks: Any) -> tuple[Tokens, list[torch.Tensor]]:
        net = Tokens(loss, (6, 6, 2, 3, 6, 5, 6, 5))
        net = net if exact else net.float()
        return net, train(net, *callbacks, precision=precision, max_epochs=1)[0]

    _, expected = parts()
    net, weights = parts(AdaptiveSteps(size=2))
    assert net.seen[-1] == 2
    for ours, theirs in zip(weights, expected, strict=True):
        assert ours.allclose(theirs, rtol=1e-10 if exact else 0.02, atol=1e-12 if exact else 1e-4)


@pytest.mark.parametrize("counts", [(6, 6, 1, 1), (6, 6, 6, 6, 6, 2, 1, 1)])
@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_a_mean_over_something_unknown_is_refused(counts: tuple[int, ...], precision: str) -> None:
    """In the second case, the first batch that is split does not show it."""
    for callback in (AdaptiveSteps(size=2), AdaptiveSteps(size=2, count=lambda batch: 1)):
        with pytest.raises(ValueError, match="does not follow from their own"):
            train(Tokens(of_mask, counts).float(), callback, precision=precision)
    expected, _ = train(Tokens(of_mask, counts))
    weights, _ = train(
        Tokens(of_mask, counts), AdaptiveSteps(size=2, count=lambda batch: batch[2].sum())
    )
    for ours, theirs in zip(weights, expected, strict=True):
        assert ours.allclose(theirs, rtol=1e-10)


def test_pairs_that_do_not_fit_with_a_graph_are_compared_without(held: int) -> None:
    def of_deep(net: nn.Module, x: torch.Tensor, *_: object) -> torch.Tensor:
        wide = net(x).repeat(1, 1, 2**12)  # 960 KiB per sample
        for _ in range(12):
            wide = wide.sin()
        return wide.mean()

    net, steps = Tokens(of_deep, (6,) * 4), AdaptiveSteps()
    nn.init.ones_(net.net.weight)
    with brim.budget(brim.memory_stats("cpu").allocated + 18 * 2**20, device="cpu"):
        train(net, steps, max_epochs=1)
    assert steps.step is not None
    assert steps.step.size == 1


def test_losses_that_draw_random_numbers() -> None:
    with pytest.raises(ValueError, match=r"the loss is random.*check=False"):
        train(Tokens(of_noise), AdaptiveSteps(size=2))
    net = Tokens(of_noise)
    train(net, AdaptiveSteps(size=2, check=False), max_epochs=1)
    assert net.seen == [2, 2]


def test_steps_that_differentiate() -> None:
    expected, _ = train(Tokens(of_slope, (6,) * 4))
    weights, _ = train(Tokens(of_slope, (6,) * 4), AdaptiveSteps(size=2))
    for ours, theirs in zip(weights, expected, strict=True):
        assert ours.allclose(theirs, rtol=1e-10)


def test_a_split_batch_in_which_nothing_counts() -> None:
    counts = (6, 5, 1, 1, 0, 0, 0, 0)
    expected, plain = train(Tokens(counts=counts))
    steps = AdaptiveSteps(size=2, count=lambda batch: batch[2].sum())
    weights, watch = train(Tokens(counts=counts), steps)
    for ours, theirs in zip(weights, expected, strict=True):
        assert ours.allclose(theirs, rtol=1e-10)
    losses = [[float(out["loss"]) for out in each.outputs] for each in (watch, plain)]
    assert losses[0] == pytest.approx(losses[1])
    assert losses[0][1] == 0
