"""Fine-tunes the first layer and the head of a frozen network, and shows what backward keeps."""

import torch
from torch import nn

import brim


def make_model() -> nn.Module:
    """A small convolutional network; everything but its first layer and its head is frozen."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    layers += [nn.MaxPool2d(2), nn.Dropout(0.1), nn.Flatten(), nn.Linear(16 * 8 * 8, 10)]
    model = nn.Sequential(*layers).requires_grad_(False)
    model[0].requires_grad_(True)
    model[-1].requires_grad_(True)
    for layer in model:
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()  # frozen: with the running statistics
    return model


def train(model: nn.Module, steps: int = 5) -> list[float]:
    """Losses of a few steps on random images."""
    torch.manual_seed(1)
    images, labels = torch.randn(32, 3, 16, 16), torch.randint(10, (32,))
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Audit, convert, train, and compare with the run of torch.nn."""
    print(brim.audit(make_model(), torch.randn(32, 3, 16, 16)))
    expected = train(make_model())
    model = make_model()
    print(f"\n{brim.convert(model)}\n")
    losses = train(model)
    print("losses:", ", ".join(f"{loss:.4f}" for loss in losses))
    torch.testing.assert_close(losses, expected)


if __name__ == "__main__":
    main()
