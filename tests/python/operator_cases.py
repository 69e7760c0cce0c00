"""Single operators and what makes their inputs, for `test_estimate_operators.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

Work = Callable[..., Any]
Case = tuple[Any, ...]  # a function, and what makes its inputs


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (256, 256), requires_grad=True)


def transposed() -> torch.Tensor:
    return torch.randn(256, 256).mT.requires_grad_()


def image() -> torch.Tensor:
    return torch.randn(4, 16, 32, 32, requires_grad=True)


def channels_last() -> torch.Tensor:
    return image().detach().to(memory_format=torch.channels_last).requires_grad_()


def target() -> torch.Tensor:
    return torch.rand(256, 256)


def indices(*shape: int, high: int = 256) -> torch.Tensor:
    return torch.randint(high, shape or (256, 256))


def definite() -> torch.Tensor:
    a = torch.randn(4, 64, 64)
    return (a @ a.mT + 64 * torch.eye(64)).requires_grad_()


def sized(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: matrix(*shape)


def picks(*shape: int, high: int = 256) -> Callable[[], torch.Tensor]:
    return lambda: indices(*shape, high=high)


def along(name: str, *args: Any) -> Work:
    """The operator with these arguments after the tensor."""
    return lambda x: getattr(torch, name)(x, *args)


def cast(fn: Work) -> Work:
    def run(*inputs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return fn(*inputs)

    return run


def half(fn: Work) -> Work:
    return lambda *inputs: fn(*(x.bfloat16() for x in inputs))


def reduced(name: str, reduction: str) -> Work:
    return lambda a, b: getattr(F, name)(a, b, reduction=reduction)


def resized(mode: str) -> Work:
    return lambda x: F.interpolate(x, scale_factor=2, mode=mode)


def padded(mode: str) -> Work:
    return lambda x: F.pad(x, (1, 2, 2, 1), mode)


def conv(stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1) -> Work:
    return lambda x, w: F.conv2d(x, w, None, stride, padding, dilation, groups)


def layer(new: Callable[[], nn.Module]) -> Work:
    module = new()

    def run(*inputs: torch.Tensor) -> Any:
        out = module(*inputs)
        return out[0] if isinstance(out, tuple) else out

    return run


def inference(new: Callable[[], nn.Module], *more: torch.Tensor) -> Work:
    module = new().eval()

    def run(x: torch.Tensor) -> Any:
        with torch.no_grad():
            return module(x, *more)

    return run


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 512, batch_first=True)


def assigned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a.clone()
    out[:, 64:128] = b
    return out


ACTIVATIONS = """
logsigmoid gelu silu mish elu selu softplus hardswish hardtanh leaky_relu
softsign tanhshrink hardsigmoid glu relu6 hardshrink softshrink
"""
UNARY = "relu sigmoid tanh exp sin erf abs neg square reciprocal floor sign"
BINARY = "add mul div maximum atan2 hypot logaddexp"
ALONG = """
sum mean prod var std amax logsumexp cumsum cumprod logcumsumexp median mode
sort argmax softmax log_softmax cummax
"""
TRANSPOSED = "sum softmax log_softmax sort cumsum logsumexp var amax"
heads, spread = sized(2, 4, 64, 32), sized(2, 64, 4, 32)
vector, weight3 = sized(256), sized(32, 16, 3, 3)
left, right = sized(8, 64, 128), sized(8, 128, 64)

POINTWISE: dict[str, Case] = {
    **{name: (getattr(torch, name), matrix) for name in UNARY.split()},
    **{name: (getattr(F, name), matrix) for name in ACTIVATIONS.split()},
    **{name: (getattr(torch, name), matrix, matrix) for name in BINARY.split()},
    "pow": (lambda a, b: a.abs() ** b, matrix, matrix),
    "add, broadcast": (torch.add, matrix, vector),
    "mul, broadcast": (torch.mul, matrix, vector),
    "div, transposed": (torch.div, matrix, transposed),
    "mul of bools": (lambda a: a * (a > 0), matrix),
    "add of integers": (lambda a, i: a + i, matrix, indices),
    "add in place of bfloat16": (lambda a: a.detach().bfloat16().add_(a.detach()), matrix),
    "division of integers": (lambda i: i / 3, indices),
    "sin of integers": (torch.sin, indices),
    "comparison of types": (lambda a, i: a.detach() > i, matrix, indices),
    "where": (lambda a, b: torch.where(a > 0, a, b), matrix, matrix),
    "clamp": (lambda a: a.clamp(-1, 1), matrix),
    "masked_fill": (lambda a: a.masked_fill(a > 0, 0.0), matrix),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), matrix, matrix),
    "addcmul": (torch.addcmul, matrix, matrix, matrix),
    "dropout": (lambda a: F.dropout(a, 0.3), matrix),
    "alpha_dropout": (lambda a: F.alpha_dropout(a, 0.3, True), matrix),
    "dropout2d": (lambda a: F.dropout2d(a, 0.3), image),
    "prelu": (F.prelu, image, sized(16)),
    "nan_to_num": (torch.nan_to_num, matrix),
    "to bfloat16": (lambda a: a.bfloat16(), matrix),
}

REDUCTIONS: dict[str, Case] = {
    **{
        f"{name}, dimension {dim}": (along(name, dim), matrix)
        for dim in (0, 1)
        for name in ALONG.split()
    },
    **{f"{name}, transposed": (along(name, 1), transposed) for name in TRANSPOSED.split()},
    **{f"{name} of all": (along(name), matrix) for name in ("sum", "mean", "var", "prod", "max")},
    "sum of bools": (lambda a: (a > 0).sum(1), matrix),
    "sum in float64": (lambda a: a.detach().sum(0, dtype=torch.float64), matrix),
    "norm": (lambda a: a.norm(dim=1), matrix),
    "max with indices": (lambda a: torch.max(a, 1), matrix),
    "topk": (lambda a: a.topk(32, 1), matrix),
    "kthvalue": (lambda a: a.kthvalue(8, 1), matrix),
    "var_mean": (along("var_mean", 1), matrix),
    "renorm": (lambda a: torch.renorm(a, 2, 0, 1.0), matrix),
    "normalize": (F.normalize, matrix),
    "cosine_similarity": (F.cosine_similarity, matrix, matrix),
    "pairwise_distance": (F.pairwise_distance, matrix, matrix),
}

MATRICES: dict[str, Case] = {
    "matmul": (torch.matmul, matrix, matrix),
    "matmul, transposed": (torch.matmul, matrix, transposed),
    "transposed matmul": (torch.matmul, transposed, matrix),
    "matmul, strided": (lambda a, b: a[:, ::2] @ b[::2], matrix, matrix),
    "matmul, float64": (lambda a, b: a.double() @ b.double(), matrix, matrix),
    "matmul, bfloat16": (half(torch.matmul), matrix, matrix),
    "batched matmul": (torch.matmul, left, right),
    "batched matmul, transposed": (lambda a, b: a @ b.mT, left, left),
    "batched matmul, permuted": (
        lambda a, b: a.transpose(0, 1) @ b.permute(1, 2, 0),
        sized(64, 8, 128),
        sized(64, 8, 128),
    ),
    "batched matmul, thin": (torch.matmul, sized(4, 4096, 3), sized(4, 3, 2)),
    "broadcast matmul": (torch.matmul, left, sized(128, 64)),
    "four dimensions": (lambda a, b: a.transpose(1, 2) @ b.permute(0, 2, 3, 1), spread, spread),
    "matrix and vector": (torch.mv, matrix, vector),
    "baddbmm": (torch.baddbmm, sized(8, 64, 64), left, right),
    "einsum, batched": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), left, right),
    "einsum, heads": (lambda a, b: torch.einsum("bihd,bjhd->bhij", a, b), spread, spread),
    "tensordot": (
        lambda a, b: torch.tensordot(a, b, dims=([1, 2], [1, 2])),
        sized(64, 16, 32),
        sized(64, 16, 32),
    ),
    "linear": (F.linear, matrix, matrix, vector),
    "linear without bias": (F.linear, matrix, matrix),
    "linear of batches": (F.linear, left, sized(256, 128), vector),
    "linear, transposed": (F.linear, transposed, matrix, vector),
    "linear, bfloat16": (half(F.linear), matrix, matrix, vector),
    "cdist": (torch.cdist, matrix, matrix),
    "cdist, p = 1": (lambda a, b: torch.cdist(a, b, p=1.0), matrix, matrix),
    "pdist": (torch.pdist, sized(128, 256)),
    "matrix_power": (along("matrix_power", 3), matrix),
    "svd": (lambda a: torch.linalg.svd(a, full_matrices=False), matrix),
    "qr": (torch.linalg.qr, matrix),
    "eigh": (torch.linalg.eigh, definite),
    "cholesky": (torch.linalg.cholesky, definite),
    "inv": (torch.linalg.inv, definite),
    "solve": (torch.linalg.solve, definite, sized(4, 64, 64)),
    "slogdet": (torch.linalg.slogdet, definite),
    "pinv": (torch.linalg.pinv, sized(4, 64, 64)),
    "matrix_exp": (lambda a: torch.matrix_exp(a / 64), sized(4, 64, 64)),
    "fft": (torch.fft.fft, matrix),
    "rfft": (torch.fft.rfft, matrix),
    "fft2": (torch.fft.fft2, sized(4, 128, 128)),
    "stft": (
        lambda a: torch.stft(a, 256, return_complex=True, window=torch.ones(256)),
        sized(4, 8192),
    ),
}

INDEXING: dict[str, Case] = {
    "index": (lambda a, i: a[i], matrix, picks(512)),
    "index of two": (lambda a, i, j: a[i, j], matrix, picks(512), picks(512)),
    "index, second dimension": (lambda a, i: a[:, i], matrix, picks(512)),
    "index_select": (lambda a, i: a.index_select(1, i), matrix, picks(512)),
    "gather": (lambda a, i: a.gather(1, i), matrix, indices),
    "scatter": (lambda a, i, b: a.scatter(1, i, b), matrix, indices, matrix),
    "scatter_add": (lambda a, i, b: a.scatter_add(1, i, b), matrix, indices, matrix),
    "index_add": (lambda a, i, b: a.index_add(0, i, b), matrix, picks(256), matrix),
    "index_copy": (
        lambda a, i, b: a.index_copy(0, i, b),
        matrix,
        lambda: torch.randperm(256),
        matrix,
    ),
    "index_put": (lambda a, i, b: a.index_put((i,), b, True), matrix, picks(256), matrix),
    "index_fill": (lambda a, i: a.index_fill(0, i, 1.0), matrix, picks(64)),
    "embedding": (F.embedding, picks(512), matrix),
    "embedding_bag": (F.embedding_bag, picks(64, 16), matrix),
    "cat": (lambda a, b: torch.cat([a, b], 1), matrix, matrix),
    "stack": (lambda a, b: torch.stack([a, b], -1), matrix, matrix),
    "split": (lambda a: [part * 2 for part in a.split(64, 1)], matrix),
    "repeat": (lambda a: a.repeat(2, 2), matrix),
    "expand": (lambda a: a[:, None].expand(256, 4, 256).contiguous(), matrix),
    "permute": (lambda a: a.permute(2, 0, 1).reshape(64, -1), sized(32, 64, 32)),
    "contiguous": (lambda a: a.contiguous(), transposed),
    "roll": (along("roll", 3, 1), matrix),
    "tril": (torch.tril, matrix),
    "diag_embed": (torch.diag_embed, sized(4, 128)),
    "slice": (lambda a: a[:, 10:200] * 2, matrix),
    "assignment": (assigned, matrix, sized(256, 64)),
    **{f"pad, {mode}": (padded(mode), image) for mode in ("reflect", "replicate", "circular")},
    "im2col": (lambda a: F.unfold(a, 3), image),
    "col2im": (lambda a: F.fold(a, (32, 32), 2, stride=2), sized(4, 64, 256)),
    "unfold": (lambda a: a.unfold(1, 16, 8) * 2, matrix),
    "complex": (lambda a, b: torch.view_as_real(torch.complex(a, b) * 2), matrix, matrix),
    "bucketize": (lambda a: torch.bucketize(a.detach(), torch.linspace(0, 1, 10)), matrix),
    "multinomial": (lambda a: torch.multinomial(a.detach().softmax(1), 4), matrix),
}

LOSSES: dict[str, Case] = {
    **{
        f"{name}, {reduction}": (reduced(name, reduction), matrix, target)
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")
        for reduction in ("mean", "none")
    },
    "mse_loss of two": (F.mse_loss, matrix, matrix),
    "cross_entropy": (F.cross_entropy, matrix, picks(256)),
    "cross_entropy of images": (F.cross_entropy, image, picks(4, 32, 32, high=16)),
    "cross_entropy of shares": (
        lambda a, b: F.cross_entropy(a, b.softmax(1)),
        matrix,
        matrix,
    ),
    "binary_cross_entropy": (
        lambda a, b: F.binary_cross_entropy(a.sigmoid(), b),
        matrix,
        target,
    ),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, matrix, target),
    "kl_div": (
        lambda a, b: F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean"),
        matrix,
        matrix,
    ),
    "triplet_margin_loss": (F.triplet_margin_loss, matrix, matrix, matrix),
    "layer_norm": (lambda x, w: F.layer_norm(x, (256,), w, w), matrix, vector),
    "layer_norm, transposed": (lambda x, w: F.layer_norm(x, (256,), w, w), transposed, vector),
    "rms_norm": (lambda x, w: F.rms_norm(x, (256,), w), matrix, vector),
}


def of_images(new: Callable[[], torch.Tensor]) -> dict[str, Case]:
    return {
        **{
            f"upsample {mode}": (resized(mode), new)
            for mode in ("nearest", "bilinear", "bicubic", "nearest-exact")
        },
        "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), new),
        "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), new),
        "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 8), new),
        "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 8), new),
        "batch_norm": (
            lambda x, w: F.batch_norm(x, None, None, w, w, training=True),
            new,
            sized(16),
        ),
        "group_norm": (lambda x, w: F.group_norm(x, 4, w, w), new, sized(16)),
        "instance_norm": (F.instance_norm, new),
        "conv2d 3x3": (conv(padding=1), new, weight3),
        "conv2d 3x3, stride 2": (conv(2, 1), new, weight3),
        "conv2d 3x3, dilated": (conv(1, 2, 2), new, weight3),
        "conv2d 1x1": (conv(), new, sized(32, 16, 1, 1)),
        "conv2d 7x7": (conv(padding=3), new, sized(8, 16, 7, 7)),
        "conv2d, depthwise": (conv(padding=1, groups=16), new, sized(16, 1, 3, 3)),
        "conv2d, grouped": (conv(padding=1, groups=4), new, sized(32, 4, 3, 3)),
        "conv_transpose2d": (
            lambda x, w: F.conv_transpose2d(x, w, None, 2, 1),
            new,
            sized(16, 16, 4, 4),
        ),
    }


IMAGES: dict[str, Case] = {
    **of_images(image),
    **{f"{name}, channels last": case for name, case in of_images(channels_last).items()},
    "conv2d 3x3, frozen input": (
        lambda x, w: F.conv2d(x.detach(), w, None, 1, 1),
        image,
        weight3,
    ),
    "conv2d 3x3, one image": (lambda x, w: F.conv2d(x[:1], w, None, 1, 1), image, weight3),
    "conv2d 3x3, bfloat16": (half(conv(padding=1)), image, weight3),
    "conv1d": (
        lambda x, w: F.conv1d(x, w, None, 1, 1),
        sized(4, 32, 512),
        sized(32, 32, 3),
    ),
    "conv3d": (
        lambda x, w: F.conv3d(x, w, None, 1, 1),
        sized(2, 8, 16, 16, 16),
        sized(8, 8, 3, 3, 3),
    ),
    "conv_transpose1d": (
        lambda x, w: F.conv_transpose1d(x, w, None, 2, 1),
        sized(4, 32, 256),
        sized(32, 32, 4),
    ),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), sized(4, 32, 512)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), sized(2, 8, 16, 16, 16)),
    "grid_sample": (
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        image,
        sized(4, 32, 32, 2),
    ),
    "affine_grid": (
        lambda t: F.affine_grid(t, [4, 3, 128, 128], align_corners=False),
        sized(4, 2, 3),
    ),
}


def attention(**options: Any) -> Work:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


LAYERS: dict[str, Case] = {
    "attention": (attention(), heads, heads, heads),
    "attention, causal": (attention(is_causal=True), heads, heads, heads),
    "attention, masked": (attention(attn_mask=torch.ones(64, 64).bool()), heads, heads, heads),
    "attention, dropout": (attention(dropout_p=0.1), heads, heads, heads),
    "attention, learned bias": (
        F.scaled_dot_product_attention,
        heads,
        heads,
        heads,
        sized(1, 4, 64, 64),
    ),
    "attention, transposed": (
        lambda *qkv: F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv)),
        spread,
        spread,
        spread,
    ),
    "attention, bfloat16": (half(F.scaled_dot_product_attention), heads, heads, heads),
    "encoder": (layer(encoder), sized(4, 64, 64)),
    "encoder, inference": (inference(encoder), sized(4, 64, 64)),
    "encoder, inference of short sequences": (inference(encoder), sized(32, 8, 64)),
    "encoder, inference with a mask": (
        inference(encoder, torch.ones(64, 64).triu(1).bool()),
        sized(4, 64, 64),
    ),
    "LSTM": (layer(lambda: nn.LSTM(64, 64)), sized(16, 8, 64)),
    "GRU": (layer(lambda: nn.GRU(64, 64)), sized(16, 8, 64)),
    "RNN": (layer(lambda: nn.RNN(64, 64)), sized(16, 8, 64)),
    "LSTMCell": (layer(lambda: nn.LSTMCell(64, 64)), sized(128, 64)),
    "autocast linear": (cast(F.linear), matrix, matrix, vector),
    "autocast batched matmul": (cast(torch.matmul), left, right),
    "autocast conv2d": (cast(conv(padding=1)), image, weight3),
    "autocast conv2d, channels last": (cast(conv(padding=1)), channels_last, weight3),
    "autocast conv2d 1x1": (cast(conv()), image, sized(32, 16, 1, 1)),
    "autocast conv2d, depthwise": (cast(conv(padding=1, groups=16)), image, sized(16, 1, 3, 3)),
    "autocast attention": (cast(F.scaled_dot_product_attention), heads, heads, heads),
    "autocast softmax": (cast(lambda x, w: F.linear(x, w).softmax(1)), matrix, matrix),
}

GROUPS = {
    "pointwise": POINTWISE,
    "reductions": REDUCTIONS,
    "matrices": MATRICES,
    "indexing": INDEXING,
    "losses": LOSSES,
    "images": IMAGES,
    "layers": LAYERS,
}
