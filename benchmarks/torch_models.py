"""The models of ``backends.py`` for PyTorch, as programs: how each kind is written, and what its own loop is.

The programs are given the name of a model, the folder of its version, and the largest batch.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Kind(NamedTuple):
    """A kind of file."""

    write: str
    """Writes ``net`` of ``MODULES``, which is before it."""
    bare: str
    """Defines ``call(rows)``."""


MODULES: Final = """
import torch
from torch import Tensor, nn


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
        self.last = nn.Linear(32, 10)

    def forward(self, X: Tensor):
        x = torch.relu(self.second(torch.relu(self.first(X))))
        return {"OUT": self.last(x.mean((2, 3)))}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(768, 768) for _ in range(4))
        self.wide, self.narrow = nn.Linear(768, 3072), nn.Linear(3072, 768)
        self.before, self.after = nn.LayerNorm(768), nn.LayerNorm(768)

    def forward(self, X: Tensor):
        heads = [X.shape[0], 64, 12, 64]
        q, k, v = (each(X).view(heads).transpose(1, 2) for each in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(X.shape)
        x = self.before(X + self.out(mixed))
        x = self.after(x + self.narrow(nn.functional.gelu(self.wide(x))))
        return {"OUT": x.mean(2)}
"""
WRITE: Final = (
    MODULES
    + """
net = {"cnn": Cnn, "encoder": Encoder}[sys.argv[1]]().eval()
example = torch.zeros(2, *{"cnn": (3, 32, 32), "encoder": (64, 768)}[sys.argv[1]])
path = sys.argv[2] + "/model"
"""
)
_CALL: Final = """
def call(rows):
    with torch.inference_mode():
        return model(torch.from_numpy(rows))["OUT"].numpy()
"""
_BARE: Final = "import torch\ntorch.set_num_threads(1)\npath = sys.argv[2] + '/model'\n"
EXPORTED: Final = Kind(
    "program = torch.export.export(net, (example,), dynamic_shapes=({0: torch.export.Dim('b')},))\n"
    "torch.export.save(program, path + '.pt2')",
    _BARE + "model = torch.export.load(path + '.pt2').module()\n" + _CALL,
)
SCRIPTED: Final = Kind(
    "torch.jit.trace(net, example, strict=False).save(path + '.pt')",
    _BARE + "model = torch.jit.load(path + '.pt')\n" + _CALL,
)
EAGER: Final = Kind(
    f"open(path + '.py', 'w').write({MODULES!r})\n"
    "from safetensors.torch import save_file\n"
    "save_file(net.state_dict(), path + '.safetensors')\n"
    "if sys.argv[1] == 'encoder':\n"
    "    # The first by name is served.\n"
    f"    open(path + '.py', 'w').write({MODULES.replace('class Cnn', 'class Unused')!r})",
    _BARE + MODULES + "model = {'cnn': Cnn, 'encoder': Encoder}[sys.argv[1]]().eval()\n" + _CALL,
)
