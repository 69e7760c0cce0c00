"""Training steps: where gradients are dropped, which optimizer, which network, what is kept."""

from __future__ import annotations

import collections
import copy
import random
from collections.abc import Callable

import torch
from program_parts import (
    Make,
    Step,
    adam,
    classified,
    conv_net,
    images,
    labels,
    mlp,
    program,
    rows,
    sgd,
    surviving,
    training,
    variants,
    varying,
)
from torch import nn
from torch.nn import functional

# ---- where gradients are dropped -----------------------------------------------------------------


def _zero_grad(where: str, *, to_none: bool = True) -> Make:
    def make(rng: random.Random) -> Step:
        net = mlp(rng)
        optimizer = adam(net)

        def step(n: int) -> None:
            if where == "first":
                optimizer.zero_grad(set_to_none=to_none)
            loss = classified(net, rows(n))
            if where == "before backward":
                optimizer.zero_grad(set_to_none=to_none)
            loss.backward()
            optimizer.step()
            if where == "last":
                optimizer.zero_grad(set_to_none=to_none)

        return step

    return make


variants(
    "zero_grad",
    [
        ("first", _zero_grad("first")),
        ("before backward", _zero_grad("before backward")),
        ("last", _zero_grad("last")),
        ("first, to zero", _zero_grad("first", to_none=False)),
        ("before backward, to zero", _zero_grad("before backward", to_none=False)),
    ],
)


@program
def gradients_by_autograd_grad(rng: random.Random) -> Step:
    net = mlp(rng)
    parameters = list(net.parameters())

    def step(n: int) -> None:
        gradients = torch.autograd.grad(classified(net, rows(n)), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 1e-3 * gradient

    return step


@program
def accumulation_inside_the_call(rng: random.Random) -> Step:
    net = mlp(rng)
    optimizer = adam(net)

    def step(n: int) -> None:
        optimizer.zero_grad()
        for _ in range(3):
            (classified(net, rows(n)) / 3).backward()
        optimizer.step()

    return step


@program
def accumulation_over_three_calls(rng: random.Random) -> Step:
    net = mlp(rng)
    optimizer = sgd(net)
    calls = 0

    def step(n: int) -> None:
        nonlocal calls
        (classified(net, rows(n)) / 3).backward()
        calls += 1
        if calls % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step


# ---- optimizers ----------------------------------------------------------------------------------


def _optimized(make: Callable[..., torch.optim.Optimizer], **options: object) -> Make:
    def made(rng: random.Random) -> Step:
        net = mlp(rng)
        return training(
            make(net.parameters(), lr=1e-3, **options), lambda n: classified(net, rows(n))
        )

    return made


variants(
    "optimizer",
    [
        ("SGD", _optimized(torch.optim.SGD)),
        ("momentum", _optimized(torch.optim.SGD, momentum=0.9, nesterov=True)),
        ("AdamW foreach", _optimized(surviving(torch.optim.AdamW), foreach=True)),
        ("AdamW fused", _optimized(surviving(torch.optim.AdamW), fused=True)),
        ("AMSGrad", _optimized(surviving(torch.optim.Adam), amsgrad=True)),
        ("RMSprop", _optimized(surviving(torch.optim.RMSprop), momentum=0.9, centered=True)),
        ("Adagrad", _optimized(torch.optim.Adagrad)),
    ],
)


@program
def optimizer_LBFGS(rng: random.Random) -> Step:  # noqa: N802
    net = mlp(rng, depth=1)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=1e-2, max_iter=3, history_size=3)

    def step(n: int) -> None:
        inputs, targets = rows(n), labels(n)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(inputs), targets)
            loss.backward()
            return loss

        try:
            optimizer.step(closure)
        except Exception:
            optimizer.state.clear()  # torch leaves half of it
            raise

    return step


@program
def state_much_larger_than_activations(rng: random.Random) -> Step:
    net = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64))
    return training(adam(net), lambda n: net(rows(n)).square().mean())


@program
def optimizer_made_by_the_first_call(rng: random.Random) -> Step:
    made: list[tuple[nn.Module, torch.optim.Optimizer]] = []

    def step(n: int) -> None:
        if not made:
            net = mlp(rng)
            made.append((net, adam(net)))
        net, optimizer = made[0]
        optimizer.zero_grad()
        classified(net, rows(n)).backward()
        optimizer.step()

    return step


def _clipped(clip: Callable[..., object], limit: float) -> Make:
    def make(rng: random.Random) -> Step:
        net = mlp(rng)
        optimizer = adam(net)

        def step(n: int) -> None:
            classified(net, rows(n)).backward()
            clip(net.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


variants(
    "gradients clipped",
    [
        ("by norm", _clipped(nn.utils.clip_grad_norm_, 1.0)),
        ("by value", _clipped(nn.utils.clip_grad_value_, 0.1)),
    ],
)


@program
def scheduler_and_weight_average(rng: random.Random) -> Step:
    net = mlp(rng)
    optimizer = sgd(net)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    average = torch.optim.swa_utils.AveragedModel(net)
    train = training(optimizer, lambda n: classified(net, rows(n)))

    def step(n: int) -> None:
        train(n)
        scheduler.step()
        average.update_parameters(net)

    return step


@program
def moving_average_by_state_dict(rng: random.Random) -> Step:
    net = mlp(rng)
    shadow = copy.deepcopy(net.state_dict())
    train = training(adam(net), lambda n: classified(net, rows(n)))

    def step(n: int) -> None:
        nonlocal shadow
        train(n)
        shadow = {k: 0.99 * shadow[k] + 0.01 * v for k, v in net.state_dict().items()}

    return step


@program
def best_weights_kept(rng: random.Random) -> Step:
    net = mlp(rng)
    train = training(adam(net), lambda n: classified(net, rows(n)))
    best, weights = float("inf"), None

    def step(n: int) -> object:
        nonlocal best, weights
        loss = train(n)
        if loss < best:  # type: ignore[operator]
            best, weights = loss, copy.deepcopy(net.state_dict())  # type: ignore[assignment]
        return weights

    return step


# ---- what is kept between calls ------------------------------------------------------------------


@program
def last_output_kept(rng: random.Random) -> Step:
    net = mlp(rng, outputs=64)
    optimizer = sgd(net)
    last = None

    def step(n: int) -> None:
        nonlocal last
        optimizer.zero_grad()
        out = net(rows(n))
        out.square().mean().backward()
        optimizer.step()
        last = out.detach()

    return step


@program
def last_loss_kept_with_its_graph(rng: random.Random) -> Step:
    net = mlp(rng)
    optimizer = adam(net)
    loss = torch.zeros(())

    def step(n: int) -> None:
        nonlocal loss
        optimizer.zero_grad()
        loss = classified(net, rows(n))
        loss.backward(retain_graph=True)
        optimizer.step()

    return step


def _outputs_kept(most: int | None) -> Make:
    def make(rng: random.Random) -> Step:
        net = mlp(rng)
        optimizer = adam(net)
        kept: collections.deque[torch.Tensor] = collections.deque(maxlen=most)

        def step(n: int) -> None:
            optimizer.zero_grad()
            out = net(rows(n))
            functional.cross_entropy(out, labels(n)).backward()
            optimizer.step()
            kept.append(out.detach())

        return step

    return make


variants("outputs kept", [("all", _outputs_kept(None)), ("the last three", _outputs_kept(3))])


@program
def metrics_kept_in_lists(rng: random.Random) -> Step:
    net = conv_net(rng)
    optimizer = adam(net)
    losses: list[torch.Tensor] = []
    hits: list[torch.Tensor] = []

    def step(n: int) -> None:
        targets = labels(n)
        out = net(images(n))
        loss = functional.cross_entropy(out, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        hits.append((out.argmax(-1) == targets).detach())

    return step


@varying
def validation_every_third_call(rng: random.Random) -> Step:
    net = mlp(rng)
    train = training(adam(net), lambda n: classified(net, rows(n)))
    calls = 0

    def step(n: int) -> None:
        nonlocal calls
        train(n)
        calls += 1
        if calls % 3 == 0:
            with torch.no_grad():
                net(rows(2 * n)).argmax(-1)

    return step


@program
def hidden_state_carried_over(rng: random.Random) -> Step:
    net, head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 10)
    optimizer = adam(net, head)
    state: tuple[torch.Tensor, torch.Tensor] | None = None

    def step(n: int) -> None:
        nonlocal state
        if state is not None and state[0].shape[1] != n:
            state = None
        optimizer.zero_grad()
        out, hidden = net(torch.rand(n, 10, 16), state)
        classified(head, out[:, -1]).backward()
        optimizer.step()
        state = hidden[0].detach(), hidden[1].detach()

    return step
