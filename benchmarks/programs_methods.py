"""Training methods: more than one network, losses of pairs, graphs, special ways to gradients."""

from __future__ import annotations

import copy
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
    surviving,
    training,
    variants,
    varying,
    width,
)
from torch import nn
from torch.nn import functional

# ---- several networks ----------------------------------------------------------------------------


@program
def gan(rng: random.Random) -> Step:
    maker, judge = dense(16, 2 * width(rng), 64), dense(64, 2 * width(rng), 1)
    maker_steps, judge_steps = adam(maker), adam(judge)

    def step(n: int) -> None:
        fake = maker(torch.rand(n, 16))
        judge_steps.zero_grad()
        loss = functional.softplus(-judge(rows(n))) + functional.softplus(judge(fake.detach()))
        loss.mean().backward()
        judge_steps.step()
        maker_steps.zero_grad()
        functional.softplus(-judge(fake)).mean().backward()
        maker_steps.step()

    return step


@program
def wasserstein_gan_with_penalty(rng: random.Random) -> Step:
    maker, judge = dense(16, 64, 64), dense(64, 2 * width(rng), 1, between=nn.Tanh)
    maker_steps, judge_steps = adam(maker), adam(judge)

    def step(n: int) -> None:
        for _ in range(2):
            real = rows(n)
            with torch.no_grad():
                fake = maker(torch.rand(n, 16))
            share = torch.rand(n, 1)
            mixed = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            judge_steps.zero_grad()
            (judge(fake).mean() - judge(real).mean() + 10 * penalty).backward()
            judge_steps.step()
        maker_steps.zero_grad()
        (-judge(maker(torch.rand(n, 16))).mean()).backward()
        maker_steps.step()

    return step


@program
def vae(rng: random.Random) -> Step:
    encoder, decoder = dense(64, 2 * width(rng), 16), dense(8, 2 * width(rng), 64)

    def loss_of(n: int) -> torch.Tensor:
        x = rows(n)
        mean, scale = encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (scale / 2).exp()
        divergence = (mean.square() + scale.exp() - scale - 1).sum(-1).mean()
        return functional.mse_loss(decoder(z), x) + 0.01 * divergence

    return training(adam(encoder, decoder), loss_of)


@program
def distillation(rng: random.Random) -> Step:
    teacher, student = mlp(rng, depth=4).eval(), mlp(rng, depth=1)

    def loss_of(n: int) -> torch.Tensor:
        x = rows(n)
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        return functional.kl_div(student(x).log_softmax(-1), wanted, reduction="batchmean")

    return training(adam(student), loss_of)


@program
def siamese_with_momentum_encoder(rng: random.Random) -> Step:
    online = mlp(rng, outputs=32)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = adam(online)

    def step(n: int) -> None:
        x = rows(n)
        with torch.no_grad():
            wanted = target(x + 0.1 * torch.randn_like(x))
        found = online(x + 0.1 * torch.randn_like(x))
        optimizer.zero_grad()
        (-functional.cosine_similarity(found, wanted).mean()).backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(target.parameters(), online.parameters(), strict=True):
                old.lerp_(new, 0.01)

    return step


@program
def tasks_with_one_trunk(rng: random.Random) -> Step:
    trunk, heads = mlp(rng, outputs=48), nn.ModuleList(nn.Linear(48, 10) for _ in range(3))

    def loss_of(n: int) -> torch.Tensor:
        shared = trunk(rows(n)).relu()
        return torch.stack([classified(head, shared) for head in heads]).sum()

    return training(adam(trunk, heads), loss_of)


@program
def tasks_each_with_its_backward(rng: random.Random) -> Step:
    trunk, heads = mlp(rng, outputs=48), nn.ModuleList(nn.Linear(48, 10) for _ in range(3))
    optimizer = adam(trunk, heads)

    def step(n: int) -> None:
        optimizer.zero_grad()
        shared = trunk(rows(n))
        for i, head in enumerate(heads):
            classified(head, shared).backward(retain_graph=i < 2)
        optimizer.step()

    return step


@program
def frozen_backbone(rng: random.Random) -> Step:
    backbone, head = conv_net(rng)[:-1].requires_grad_(False).eval(), nn.LazyLinear(10)
    head(backbone(images(1)))
    return training(adam(head), lambda n: classified(head, backbone(images(n))))


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


@program
def low_rank_adapters(rng: random.Random) -> Step:
    net = nn.Sequential(
        *(LowRank(m, 4) if isinstance(m, nn.Linear) else m for m in mlp(rng, depth=4))
    )
    optimizer = surviving(torch.optim.AdamW)([p for p in net.parameters() if p.requires_grad])
    return training(optimizer, lambda n: classified(net, rows(n)))


# ---- losses of pairs, graphs ---------------------------------------------------------------------


@program
def contrastive_loss(rng: random.Random) -> Step:
    net = mlp(rng, outputs=32)

    def loss_of(n: int) -> torch.Tensor:
        x = rows(n)
        one, two = (functional.normalize(net(x + torch.randn_like(x))) for _ in range(2))
        return functional.cross_entropy(one @ two.T / 0.1, torch.arange(n))

    return training(adam(net), loss_of)


@program
def triplet_loss(rng: random.Random) -> Step:
    net = mlp(rng, outputs=32)

    def loss_of(n: int) -> torch.Tensor:
        return functional.triplet_margin_loss(*(net(rows(n)) for _ in range(3)))

    return training(sgd(net), loss_of)


@program
def hardest_pairs_of_a_batch(rng: random.Random) -> Step:
    net = mlp(rng, outputs=32)

    def loss_of(n: int) -> torch.Tensor:
        targets = labels(n, classes=4)
        distances = torch.cdist(out := net(rows(n)), out)
        same = targets[:, None] == targets
        far = distances.masked_fill(~same, 0).amax(1)
        near = distances.masked_fill(same, 1e3).amin(1)
        return (far - near + 0.2).relu().mean()

    return training(adam(net), loss_of)


@program
def attention_between_all_items(rng: random.Random) -> Step:
    qkv, head = nn.Linear(64, 96), nn.Linear(32, 10)

    def loss_of(n: int) -> torch.Tensor:
        q, k, v = qkv(rows(n)).chunk(3, -1)
        return classified(head, (q @ k.T / 6).softmax(-1) @ v)

    return training(adam(qkv, head), loss_of)


def _graph(*, sparse: bool) -> Make:
    def make(rng: random.Random) -> Step:
        first, second = nn.Linear(64, width(rng)), nn.LazyLinear(10)
        second(first(rows(1)))

        def loss_of(n: int) -> torch.Tensor:
            if sparse:
                ends = labels(2, 8 * n, classes=n)
                adjacency = torch.sparse_coo_tensor(ends, torch.ones(8 * n) / 8, (n, n))
            else:
                adjacency = (torch.rand(n, n) < 0.1).float()
            hidden = (adjacency @ first(rows(n))).relu()
            return classified(second, adjacency @ hidden)

        return training(adam(first, second), loss_of)

    return make


variants("graph convolution", [("dense", _graph(sparse=False)), ("sparse", _graph(sparse=True))])


@varying
def graph_messages_on_random_edges(rng: random.Random) -> Step:
    message, head = dense(128, 64, 32), nn.Linear(32, 10)

    def loss_of(n: int) -> torch.Tensor:
        x = rows(n)
        edges = int(torch.randint(4 * n, 6 * n + 1, ()))  # another number in each call
        source, target = labels(2, edges, classes=n)
        messages = message(torch.cat([x[source], x[target]], 1))
        return classified(head, torch.zeros(n, 32).index_add(0, target, messages))

    return training(adam(message, head), loss_of)


# ---- reinforcement learning ----------------------------------------------------------------------


def _replay(most: int | None) -> Make:
    def make(rng: random.Random) -> Step:
        net, memory = mlp(rng), []
        optimizer = adam(net)

        def step(n: int) -> None:
            memory.append(rows(2))
            if most and len(memory) > most:
                del memory[0]
            held = torch.cat(memory)
            optimizer.zero_grad()
            classified(net, held[labels(n, classes=len(held))]).backward()
            optimizer.step()

        return step

    return make


variants("replay buffer", [("grows", _replay(None)), ("evicts", _replay(3))])


@program
def deep_q_learning(rng: random.Random) -> Step:
    net = mlp(rng, outputs=4)
    target = copy.deepcopy(net)
    optimizer = adam(net)
    calls = 0

    def step(n: int) -> None:
        nonlocal calls
        calls += 1
        with torch.no_grad():
            wanted = torch.rand(n) + 0.99 * target(rows(n)).amax(1)
        found = net(rows(n)).gather(1, labels(n, 1, classes=4)).squeeze(1)
        optimizer.zero_grad()
        functional.smooth_l1_loss(found, wanted).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10)
        optimizer.step()
        if calls % 4 == 0:
            target.load_state_dict(net.state_dict())

    return step


@program
def policy_gradient_over_a_rollout(rng: random.Random) -> Step:
    policy = dense(16, width(rng), 4)
    optimizer = adam(policy)

    def step(n: int) -> None:
        state, logs, rewards = torch.rand(n, 16), [], []
        for _ in range(8):
            choice = torch.distributions.Categorical(logits=policy(state))
            action = choice.sample()
            logs.append(choice.log_prob(action))
            rewards.append((action == 0).float())
            state = (state + 0.1 * torch.randn_like(state)).clamp(0, 1)
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        optimizer.zero_grad()
        (-(torch.stack(logs) * returns).mean()).backward()
        optimizer.step()

    return step


@program
def proximal_policy_epochs_over_a_rollout(rng: random.Random) -> Step:
    policy = dense(16, width(rng), 4)
    optimizer = adam(policy)

    def step(n: int) -> None:
        with torch.no_grad():
            states = torch.rand(8 * n, 16)
            old = policy(states).log_softmax(-1)[:, 0]
        for _ in range(2):
            for part in torch.randperm(8 * n).split(2 * n):
                ratio = (policy(states[part]).log_softmax(-1)[:, 0] - old[part]).exp()
                optimizer.zero_grad()
                (-torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()).backward()
                optimizer.step()

    return step
