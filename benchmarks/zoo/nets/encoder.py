"""A block of BERT's size, as a module of PyTorch: also what the contestant in Python serves."""

from torch import Tensor, nn

WIDTH, HEADS, TOKENS = 768, 12, 64


class Encoder(nn.Module):
    """Attention and two layers behind it, each with a way around."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, X: Tensor) -> dict[str, Tensor]:
        """Compute a batch."""
        heads = [X.shape[0], TOKENS, HEADS, WIDTH // HEADS]
        q, k, v = (each(X).view(heads).transpose(1, 2) for each in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(X.shape)
        x = self.before(X + self.out(mixed))
        x = self.after(x + self.narrow(nn.functional.gelu(self.wide(x))))
        return {"OUT": x.mean(2)}
