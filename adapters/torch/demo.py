"""Train a small GPT on the text of Python's own help, until a real bug strikes.

``anynan demo`` runs this file. It reads as an ordinary training script: the text, the model,
the training step, the loop. Five lines can be the buggy one, each a bug that people file
issues about; ``broken`` says which. All of them run well for some dozens of steps.
"""

import math
import time
import warnings
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor, nn
from torch.nn import functional as F

import anynan
from anynan._cli.outcome import show
from anynan._cli.text import PAD, Text
from anynan.torch.tracking import track
from anynan.tracker import Tracker

BUGS = {
    "mask": "an empty paragraph: attention with every key masked",
    "where": "torch.where hides the slope of sqrt(0) in the forward pass only",
    "overflow": "attention scores in float16, from queries and keys that are not normalised",
    "batch": "a weight of 0/0 for an empty paragraph comes in with the batch",
    "mean": "a mean over the targets of a batch that has none",
    "lr": "a learning rate warm-up that does not end",
}

CONTEXT = 64
BATCH = 16
EPOCH = 40  # batches
WIDTH = 64
HEADS = 4
BLOCKS = 3
WARMUP = 10  # steps


# The text.


class Loader:
    """Cut the text into batches."""

    def __init__(self, seed: int, broken: str) -> None:
        self.text = Text(seed, EPOCH * BATCH)
        self.broken = broken

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, targets, and a weight for each paragraph: prose counts most."""
        start = step % EPOCH * BATCH
        texts = self.text.paragraphs[start : start + BATCH]
        tokens = torch.from_numpy(self.text.rows(start, BATCH, CONTEXT + 1)).long()
        letters = torch.tensor([float(sum(c.isalpha() for c in text)) for text in texts])
        length = torch.tensor([float(len(text)) for text in texts])
        if self.broken != "batch":
            length = length.clamp(min=1)
        return tokens[:, :-1], tokens[:, 1:], letters / length


# The model.


class Scores(nn.Module):
    """Compare every query with every key."""

    def __init__(self, *, half: bool) -> None:
        super().__init__()
        self.half_precision = half

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the dot products, in float16 if that was asked for, as on a GPU."""
        if self.half_precision:
            q, k = q.half(), k.half()
        return q @ k.transpose(-2, -1)


class Attention(nn.Module):
    """Let every position look at itself and at those before it."""

    def __init__(self, broken: str, *, half: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.scores = Scores(half=half)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.broken = broken

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Mix the positions of each row; ``real`` is False where there is only padding."""
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = torch.ones(length, length, dtype=torch.bool).tril() & real[:, None, :]
        if self.broken != "mask":
            seen = seen | torch.eye(length, dtype=torch.bool)  # every position sees itself
        scores = self.scores(q, k).float() / math.sqrt(WIDTH // HEADS)
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        weights = scores.softmax(dim=-1)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, length, WIDTH)
        y: Tensor = self.out(mixed)
        return y


class Block(nn.Module):
    """Attention, then a small network at every position."""

    def __init__(self, broken: str, *, half: bool) -> None:
        super().__init__()
        # Without this norm the queries and keys grow as the sum of all blocks before does.
        self.norm1 = nn.Identity() if broken == "overflow" else nn.LayerNorm(WIDTH)
        self.attention = Attention(broken, half=half)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Add both to what came in."""
        x = x + self.attention(self.norm1(x), real)
        x = x + self.mlp(self.norm2(x))
        return x  # noqa: RET504  as in every GPT


class GPT(nn.Module):
    """A character-level language model."""

    def __init__(self, letters: int, broken: str, *, half: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(letters, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(broken, half=half) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, letters)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the next character, and the last hidden state."""
        real = tokens != PAD
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x, real)
        hidden = self.norm(x) * real[..., None]  # nothing is left of the padding
        return self.head(hidden), hidden


# The training.


def hidden_size(hidden: Tensor, real: Tensor, broken: str) -> Tensor:
    """Return the mean length of the hidden states, padding left out; a regulariser."""
    square = hidden.square().sum(dim=-1)
    if broken == "where":
        size = torch.where(real, square.sqrt(), 0.0)
    else:
        size = torch.where(real, torch.where(real, square, 1.0).sqrt(), 0.0)
    return size.mean()


def make_step(model: GPT, optimizer: torch.optim.Optimizer, rate: float, broken: str) -> Any:
    """Return the training step: forward, loss, backward, update."""

    def train_step(step: int, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        warm = (step + 1) / WARMUP
        if broken != "lr":
            warm = min(warm, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate * warm

        logits, hidden = model(x)
        real = y != PAD
        loss = F.cross_entropy(logits.transpose(1, 2), y, ignore_index=PAD, reduction="none")
        loss = (loss * weight[:, None]).sum()
        count = real.sum()
        if broken != "mean":
            count = count.clamp(min=1)
        loss = loss / count
        loss = loss + 1e-4 * hidden_size(hidden, x != PAD, broken)

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train_step


def setup(bug: str, broken: str, seed: int) -> tuple[Tracker, Loader]:
    """Build the text, the model and the optimizer, and track the training step."""
    torch.manual_seed(seed)
    loader = Loader(seed, broken)
    half = bug == "overflow"
    model = GPT(len(loader.text.numbers) + 1, broken, half=half)
    optimizer: torch.optim.Optimizer
    if bug == "lr":
        rate = 0.2  # Adam bounds its steps, and would hide this bug for long
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    else:
        rate = 1e-2 if half else 3e-3
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    policy = anynan.Policy()
    if half:  # be told when less than 3 bits are left
        policy = anynan.Policy(headroom=3)
    elif bug == "lr":  # be told when the gradient is 10 times what is usual
        policy = anynan.Policy(spike=10)
    return track(make_step(model, optimizer, rate, broken), policy=policy), loader


def main(bug: str = "mask", *, fixed: bool = False, steps: int | None = None, seed: int = 0) -> int:
    """Train until the bug strikes; with ``fixed``, train on without it.

    Returns:
        0 if the bug was found, or stayed away from the fixed training; else 1.
    """
    torch.set_num_threads(1)  # so small a model is no faster with more
    steps = steps or (6 * EPOCH + 1 if fixed else 3 * EPOCH)

    def train(console: Console, broken: str, steps: int, losses: list[float]) -> Tracker:
        train_step, loader = setup(bug, broken, seed)
        with warnings.catch_warnings(), train_step, progress_bar(console) as bar:
            warnings.simplefilter("always", anynan.AnynanWarning)
            warnings.showwarning = lambda message, *_: console.print(f"warning: {message}")
            task = bar.add_task("train", total=steps, visible=False)
            for step in range(steps):
                start = time.perf_counter()
                losses.append(train_step(step, *loader.batch(step)).item())
                headroom = train_step.metrics().get("anynan/headroom", math.nan)
                speed = 1 / (time.perf_counter() - start)
                bar.update(
                    task, advance=1, visible=True, loss=losses[-1], headroom=headroom, speed=speed
                )
        return train_step

    return show(BUGS[bug], train, bug, fixed=fixed, steps=steps, epoch=EPOCH)


def progress_bar(console: Console) -> Progress:
    """Show the loss and the bits that are left before a number overflows."""
    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=30),
        TextColumn("loss {task.fields[loss]:.3g}"),
        TextColumn("headroom {task.fields[headroom]:.1f} bits"),
        TextColumn("{task.fields[speed]:.0f} steps/s"),
        console=console,
    )
