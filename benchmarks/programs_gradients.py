"""Training steps with special ways to inputs, losses and gradients."""

from __future__ import annotations

import random

import torch
from program_parts import (
    Make,
    Step,
    adam,
    classified,
    conv_net,
    dense,
    images,
    labels,
    mlp,
    program,
    rows,
    sgd,
    training,
    variants,
    width,
)
from torch import nn
from torch.nn import functional


@program
def gradient_penalty(rng: random.Random) -> Step:
    net = dense(64, 2 * width(rng), 1, between=nn.Softplus)

    def loss_of(n: int) -> torch.Tensor:
        x = rows(n).requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return slope.square().mean()

    return training(adam(net), loss_of)


@program
def inner_loop_of_meta_learning(rng: random.Random) -> Step:
    net = mlp(rng, depth=1)

    def loss_of(n: int) -> torch.Tensor:
        weights = dict(net.named_parameters())
        for _ in range(2):
            loss = classified(lambda x: torch.func.functional_call(net, weights, x), rows(n))  # noqa: B023
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {k: w - 0.1 * s for (k, w), s in zip(weights.items(), slopes, strict=True)}
        return classified(lambda x: torch.func.functional_call(net, weights, x), rows(n))

    return training(adam(net), loss_of)


@program
def gradients_per_sample(rng: random.Random) -> Step:
    net = dense(64, 32, 10)
    weights = {k: p.detach() for k, p in net.named_parameters()}

    def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, weights, x).square().mean()

    per_sample = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))

    def step(n: int) -> None:
        for name, slopes in per_sample(weights, rows(n)).items():
            norms = slopes.flatten(1).norm(dim=1).clamp(min=1)
            weights[name] = weights[name] - 1e-3 * (slopes.flatten(1) / norms[:, None]).mean(
                0
            ).view_as(weights[name])

    return step


def _autocast(*, scaler: bool) -> Make:
    def make(rng: random.Random) -> Step:
        net = mlp(rng)
        optimizer = adam(net)
        scale = torch.amp.GradScaler("cpu", enabled=False)

        def step(n: int) -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = classified(net, rows(n))
            if scaler:
                scale.scale(loss).backward()
                scale.step(optimizer)
                scale.update()
            else:
                loss.backward()
                optimizer.step()

        return step

    return make


variants(
    "autocast", [("plain", _autocast(scaler=False)), ("disabled scaler", _autocast(scaler=True))]
)


@program
def features_taken_by_hooks(rng: random.Random) -> Step:
    net, features = mlp(rng), {}
    for name, module in net.named_children():
        module.register_forward_hook(
            lambda _, __, out, name=name: features.__setitem__(name, out.detach())  # type: ignore[misc]
        )
    return training(adam(net), lambda n: classified(net, rows(n)))


@program
def activations_packed_to_half(rng: random.Random) -> Step:
    net = mlp(rng)

    def loss_of(n: int) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (t.dtype, t.half() if t.is_floating_point() else t),
            lambda packed: packed[1].to(packed[0]),
        ):
            return classified(net, rows(n))

    return training(sgd(net), loss_of)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@program
def function_with_its_own_backward(rng: random.Random) -> Step:
    first, last = nn.Linear(64, 2 * width(rng)), nn.LazyLinear(10)
    last(first(rows(1)))
    return training(adam(first, last), lambda n: classified(last, Squared.apply(first(rows(n)))))


@program
def spectral_norm(rng: random.Random) -> Step:
    net = mlp(rng)
    for layer in net:
        if isinstance(layer, nn.Linear):
            nn.utils.parametrizations.spectral_norm(layer)
    return training(sgd(net), lambda n: classified(net, rows(n)))


@program
def augmented_images_mixed_up(rng: random.Random) -> Step:
    net = conv_net(rng)

    def loss_of(n: int) -> torch.Tensor:
        x = images(n)
        x = torch.where(torch.rand(n, 1, 1, 1) < 0.5, x.flip(-1), x)
        x = functional.pad(x, (2, 2, 2, 2), mode="reflect")[..., 1:17, 3:19]
        x = (x + 0.1 * torch.randn_like(x)).clamp_(0, 1)
        share = float(torch.rand(()))
        return classified(net, share * x + (1 - share) * x[torch.randperm(n)])

    return training(sgd(net), loss_of)


@program
def denoising_at_random_levels(rng: random.Random) -> Step:
    net, times = mlp(rng, outputs=64), nn.Embedding(100, 64)

    def loss_of(n: int) -> torch.Tensor:
        x, level = rows(n), labels(n, classes=100)
        noise, share = torch.randn_like(x), (level / 100)[:, None]
        return functional.mse_loss(net((1 - share) * x + share * noise + times(level)), noise)

    return training(adam(net, times), loss_of)
