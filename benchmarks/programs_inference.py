"""Programs that do not train: inference, numerical work, and calls of uneven sizes inside."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable

import torch
from program_parts import (
    Make,
    Step,
    classified,
    conv_net,
    encoder,
    images,
    labels,
    mlp,
    program,
    rows,
    sgd,
    training,
    variants,
    varying,
    width,
)
from torch import nn
from torch.nn import functional

# ---- inference -----------------------------------------------------------------------------------


def _inference(mode: Callable[[], object]) -> Make:
    def make(rng: random.Random) -> Step:
        net = conv_net(rng, norm=True).eval()

        def step(n: int) -> list[int]:
            with mode():  # type: ignore[attr-defined]
                return net(images(n)).argmax(-1).tolist()  # type: ignore[no-any-return]

        return step

    return make


variants(
    "inference",
    [("no_grad", _inference(torch.no_grad)), ("inference mode", _inference(torch.inference_mode))],
)


@program
def inference_result_kept_by_the_caller(rng: random.Random) -> Step:
    net = mlp(rng, outputs=256)
    return torch.no_grad()(lambda n: net(rows(n)))  # type: ignore[no-any-return]


@program
def inference_result_with_its_graph(rng: random.Random) -> Step:
    net = mlp(rng)
    return lambda n: net(rows(n))


@program
def inference_results_collected(rng: random.Random) -> Step:
    net, results = mlp(rng), []

    @torch.no_grad()
    def step(n: int) -> None:
        results.append(net(rows(n)).softmax(-1))

    return step


@program
def generation_with_cached_keys(rng: random.Random) -> Step:
    qkv, head = nn.Linear(32, 96), nn.Linear(32, 50)
    embedding = nn.Embedding(50, 32)

    @torch.inference_mode()
    def step(n: int) -> torch.Tensor:
        tokens = labels(n, 1, classes=50)
        keys = values = torch.zeros(n, 0, 32)
        for _ in range(12):
            q, k, v = qkv(embedding(tokens[:, -1:])).chunk(3, -1)
            keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
            mixed = functional.scaled_dot_product_attention(q, keys, values)
            tokens = torch.cat([tokens, head(mixed[:, -1]).argmax(-1, keepdim=True)], 1)
        return tokens

    return step


@program
def encoder_on_padded_sequences(rng: random.Random) -> Step:
    net = encoder(rng).eval()
    features = net.layers[0].linear1.in_features

    @torch.no_grad()
    def step(n: int) -> object:
        lengths = [4 + (5 * i) % 13 for i in range(n)]
        x = nn.utils.rnn.pad_sequence([torch.rand(k, features) for k in lengths], True)
        hidden = torch.arange(x.shape[1]) >= torch.tensor(lengths)[:, None]
        return net(x, src_key_padding_mask=hidden).mean(1)

    return step


# ---- numerical work ------------------------------------------------------------------------------


def _computed(compute: Callable[[torch.Tensor], object], *shape: int) -> Make:
    return lambda rng: lambda n: compute(torch.rand(n, *shape))


def _iou(corners: torch.Tensor) -> torch.Tensor:
    boxes = torch.cat([corners[:, :2], corners[:, :2] + corners[:, 2:]], 1)
    low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    common = (high - low).clamp(min=0).prod(-1)
    areas = corners[:, 2:].prod(-1)
    return (common / (areas[:, None] + areas - common) > 0.5).sum(1)


def _solved(a: torch.Tensor) -> torch.Tensor:
    """Conjugate gradients for a batch of systems."""
    a = a @ a.mT + torch.eye(a.shape[-1])
    x = torch.zeros(*a.shape[:2], 1)
    residual = direction = torch.ones_like(x)
    for _ in range(6):
        ahead = a @ direction
        size = residual.square().sum(1, keepdim=True)
        length = size / (direction * ahead).sum(1, keepdim=True)
        x = x + length * direction
        residual = residual - length * ahead
        direction = residual + residual.square().sum(1, keepdim=True) / size * direction
    return x


def _clusters(x: torch.Tensor) -> torch.Tensor:
    centres = torch.rand(20, x.shape[1])
    for _ in range(4):
        nearest = torch.cdist(x, centres).argmin(1)
        counts = torch.bincount(nearest, minlength=20).clamp(min=1)
        centres = torch.zeros_like(centres).index_add_(0, nearest, x) / counts[:, None]
    return centres


def _gaussian_process(x: torch.Tensor) -> torch.Tensor:
    kernel = (-torch.cdist(x, x).square()).exp() + torch.eye(len(x))
    return torch.cholesky_solve(torch.ones(len(x), 1), torch.linalg.cholesky(kernel))


def _spectrum(x: torch.Tensor) -> torch.Tensor:
    return torch.stft(x, 64, 16, window=torch.ones(64), return_complex=True).abs().square().log1p()


def _knn(x: torch.Tensor) -> torch.Tensor:
    return torch.cdist(x, torch.rand(500, 16)).topk(3, largest=False).indices


variants(
    "computed",
    [
        ("distances to others", _computed(_knn, 16)),
        ("distances among all", _computed(lambda x: torch.cdist(x, x).sort(1).indices[:, :3], 8)),
        ("overlap of boxes", _computed(_iou, 4)),
        ("FFT filter", _computed(lambda x: torch.fft.irfft(torch.fft.rfft(x) * 0.5), 512)),
        ("spectrogram", _computed(_spectrum, 512)),
        ("einsum", _computed(lambda x: torch.einsum("bij,bkj->bik", x, x).softmax(-1), 24, 24)),
        ("sort and topk", _computed(lambda x: x.sort(1).values.topk(5).values, 300)),
        ("SVD", _computed(lambda x: torch.linalg.svd(x, full_matrices=False)[1], 12, 8)),
        ("conjugate gradients", _computed(_solved, 16, 16)),
        ("k-means", _computed(_clusters, 16)),
        ("Gaussian process", _computed(_gaussian_process, 8)),
        ("windows", _computed(lambda x: x.unfold(1, 16, 4).contiguous().std(-1), 256)),
        ("double", _computed(lambda x: x.double().logcumsumexp(1).float(), 200)),
    ],
)


@varying
def rows_chosen_by_value(rng: random.Random) -> Step:
    def step(n: int) -> torch.Tensor:
        x = torch.rand(n, 128)
        return x[x[:, 0] > 0.5].exp().sum(1).unique()

    return step


@program
def hessian_vector_products(rng: random.Random) -> Step:
    net = mlp(rng, outputs=1, depth=1)

    def step(n: int) -> torch.Tensor:
        x = rows(n)
        slope = torch.func.grad(lambda x: net(x).tanh().sum())
        return torch.func.jvp(slope, (x,), (torch.ones_like(x),))[1]

    return step


# ---- uneven sizes inside -------------------------------------------------------------------------


def _padded(pad: Callable[[int], int]) -> Make:
    def make(rng: random.Random) -> Step:
        net = mlp(rng)
        return training(
            sgd(net),
            lambda n: classified(net, functional.pad(rows(n), (0, 0, 0, pad(n) - n))),
        )

    return make


variants(
    "padded",
    [
        ("to powers of two", _padded(lambda n: 1 << (n - 1).bit_length())),
        ("to multiples of 8", _padded(lambda n: -(-n // 8) * 8)),
        ("to multiples of 32", _padded(lambda n: -(-n // 32) * 32)),
    ],
)


def _in_parts(part: int | None, *, together: bool) -> Make:
    """In parts of `part` of the n items, or all 500 items in parts of n."""

    def make(rng: random.Random) -> Step:
        net = mlp(rng, depth=2)
        data = rows(500)

        @torch.no_grad()
        def step(n: int) -> object:
            parts = rows(n).split(part) if part else data.split(n)
            results = [net(x) for x in parts]
            return torch.cat(results) if together else [r.argmax(-1) for r in results]

        return step

    return make


variants(
    "in parts",
    [
        ("of a fixed size", _in_parts(16, together=True)),
        ("of n, concatenated", _in_parts(None, together=True)),
        ("of n, kept", _in_parts(None, together=False)),
    ],
)


@program
def masked_losses(rng: random.Random) -> Step:
    net = mlp(rng)

    def loss_of(n: int) -> torch.Tensor:
        losses = functional.cross_entropy(net(rows(n)), labels(n), reduction="none")
        return losses[losses > losses.median()].sum()

    return training(sgd(net), loss_of)


@program
def only_hard_items_trained_on(rng: random.Random) -> Step:
    net = mlp(rng)

    def loss_of(n: int) -> torch.Tensor:
        x, y = rows(n), labels(n)
        with torch.no_grad():
            hardest = functional.cross_entropy(net(x), y, reduction="none").topk(-(-n // 4)).indices
        return functional.cross_entropy(net(x[hardest]), y[hardest])

    return training(sgd(net), loss_of)


@varying
def sequences_of_random_length(rng: random.Random) -> Step:
    net, head = nn.GRU(16, width(rng), batch_first=True), nn.LazyLinear(10)
    head(torch.zeros(1, net.hidden_size))

    def loss_of(n: int) -> torch.Tensor:
        length = int(torch.randint(8, 13, ()))
        return classified(head, net(torch.rand(n, length, 16))[0][:, -1])

    return training(sgd(net, head), loss_of)


@program
def pool_of_buffers_by_size(rng: random.Random) -> Step:
    net = mlp(rng)
    pool: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def step(n: int) -> None:
        if n not in pool:
            pool[n] = torch.empty(n, 2)
        net(functional.pad(pool[n].uniform_(), (0, 62))).argmax(-1)

    return step


@program
def buffers_of_the_last_two_sizes(rng: random.Random) -> Step:
    net = mlp(rng)
    pool: collections.OrderedDict[int, torch.Tensor] = collections.OrderedDict()
    train = training(
        sgd(net), lambda n: classified(net, functional.pad(pool[n].uniform_(), (0, 56)))
    )

    def step(n: int) -> None:
        if n not in pool:
            pool[n] = torch.empty(n, 8)
        pool.move_to_end(n)
        while len(pool) > 2:
            pool.popitem(last=False)
        train(n)

    return step


@program
def scratch_that_only_grows(rng: random.Random) -> Step:
    net = mlp(rng)
    scratch = torch.empty(0)

    def loss_of(n: int) -> torch.Tensor:
        nonlocal scratch
        if scratch.numel() < 4 * n:
            scratch = torch.empty(4 * n)
        return classified(net, functional.pad(scratch[: 4 * n].view(n, 4).uniform_(), (0, 60)))

    return training(sgd(net), loss_of)


@program
def mostly_constant(rng: random.Random) -> Step:
    table = torch.rand(2000, 64)

    def step(n: int) -> torch.Tensor:
        return (rows(n) @ (table * 2).softmax(-1).T).amax(1)

    return step


@program
def few_large_items(rng: random.Random) -> Step:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 3))
    return training(sgd(net), lambda n: net(torch.rand(n, 1, 48, 48)).square().mean())
