"""Counts predicted through exp: what was learned on short texts explodes on a long one.

The model tells how many words a text has from how often each character occurs, in Python's
own help, from the shortest paragraph to the longest chapter. With --fixed it is given the
logarithms of the counts.
"""

import sys
from pydoc_data.topics import topics
from statistics import median

import torch
from torch import nn

import anynan

FIXED = "--fixed" in sys.argv
torch.manual_seed(0)

paragraphs = [text for chapter in topics.values() for text in chapter.split("\n\n")]
texts = sorted([*paragraphs, *topics.values()], key=len)
letters = sorted(set("".join(texts)) - {" ", "\n"})
counts = torch.tensor([[float(text.count(letter)) for letter in letters] for text in texts])
words = torch.tensor([float(len(text.split())) for text in texts])

model = nn.Sequential(nn.Linear(len(letters), 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


@anynan.torch.track
def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
    if FIXED:
        x = x.log1p()
    log_rate = model(x).squeeze(-1)
    rate = torch.exp(log_rate)
    loss = (rate - y * log_rate).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return (rate - y).abs().mean().item() / y.mean().item()


batches = list(zip(counts.split(32), words.split(32), strict=True))
errors = [train_step(*batch) for _ in range(3) for batch in batches]
first, last = median(errors[:20]), median(errors[-20:])
print(f"{len(errors)} steps, every number finite; error {first:.0%} -> {last:.0%}")
