"""All of a model in float16, the optimizer too: its eps of 1e-8 is 0 there, and so are squares.

The model tells the next letter of a word from the three before it. With --fixed eps is one
that float16 can hold. (Weights in float32, and autocast around the forward pass, are better.)
"""

import re
import sys
from pydoc_data.topics import topics
from statistics import median

import torch
from torch import nn

import anynan

FIXED = "--fixed" in sys.argv
STEPS = 200
torch.manual_seed(0)

words = re.findall(r"[a-z]{4,}", " ".join(topics.values()))
letters = torch.tensor([[ord(letter) - ord("a") for letter in word[:4]] for word in words])


class NextLetter(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.letter = nn.Embedding(26, width)
        self.hidden = nn.Linear(3 * width, 4 * width)
        self.head = nn.Linear(4 * width, 26)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.letter(x).flatten(1))))


model = NextLetter(16).half()
eps = 1e-4 if FIXED else 1e-8
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=eps)


@anynan.torch.track
def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
    loss = nn.functional.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


losses = []
for _ in range(STEPS):
    batch = letters[torch.randint(len(letters), (64,))]
    losses.append(train_step(batch[:, :3], batch[:, 3]))
first, last = median(losses[:20]), median(losses[-20:])
print(f"{STEPS} steps, every number finite; loss {first:.2f} -> {last:.2f}")
