"""ResNet-8 of MLPerf Tiny, as a module of PyTorch: also what the contestant in Python serves."""

from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1)
        self.second = nn.Conv2d(after, after, 3, 1, 1)
        self.around = nn.Conv2d(before, after, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Compute a batch."""
        return nn.functional.relu(self.second(nn.functional.relu(self.first(x))) + self.around(x))


class Cnn(nn.Module):
    """Three blocks over 16, 32 and 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.last = nn.Linear(64, 10)

    def forward(self, X: Tensor) -> dict[str, Tensor]:
        """Compute a batch."""
        x = self.blocks(nn.functional.relu(self.stem(X)))
        return {"OUT": self.last(x.mean((2, 3)))}
