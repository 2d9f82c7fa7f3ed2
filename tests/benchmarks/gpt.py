"""The GPT that the benchmarks train, at the two sizes of the design."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.benchmarks.timing import machine, options, publish, table


@dataclass(frozen=True)
class Size:
    name: str
    width: int
    batch: int
    length: int
    layers: int = 4
    heads: int = 4
    vocabulary: int = 256


SMALL = Size("d=64 B=2 T=32", 64, 2, 32)
LARGE = Size("d=256 B=8 T=128", 256, 8, 128)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform (batch, length, width)."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.down(self.act(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.place = nn.Embedding(size.length, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def training(size: Size, device: str = "cpu") -> tuple[GPT, Callable[[], None]]:
    torch.manual_seed(0)
    model = GPT(size).to(device)
    return model, train_step(model, model, size, device)


def train_step(
    call: Callable[..., Any], model: nn.Module, size: Size, device: str = "cpu"
) -> Callable[[], None]:
    """Return the training step of a model that is run by way of a call."""
    optimizer = torch.optim.AdamW(model.parameters())
    shape = (size.batch, size.length)
    tokens = torch.randint(0, size.vocabulary, shape, device=device)
    targets = torch.randint(0, size.vocabulary, shape, device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(call(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()

    return step


def publish_sizes(
    mark: str,
    description: str | None,
    measure: Callable[[Size, int, str], dict[str, float]],
    goals: dict[str, str],
) -> None:
    """Measure both sizes as the command line says; print the table and write it down."""
    chosen = options(description)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    rounds = {SMALL: chosen.rounds * 5, LARGE: chosen.rounds}
    results = {size.name: measure(size, n, chosen.device) for size, n in rounds.items()}
    software = f"{torch.get_num_threads()} threads", f"PyTorch {torch.__version__}"
    text = (
        f"{machine(*software)}; medians of {' and '.join(str(n) for n in rounds.values())} "
        f"interleaved steps.\n\n{table(results, 'variant', goals)}\n"
    )
    publish(mark, text, chosen.write)
