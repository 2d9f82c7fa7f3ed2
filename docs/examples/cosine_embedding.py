"""Sentence embeddings compared by their angle: a text without a known word has none.

The two halves of a paragraph are to be found next to each other. An embedding is the mean of
its words' vectors, and of no words it is zero. With --fixed a zero vector stays zero.
"""

import sys
from collections import Counter
from pydoc_data.topics import topics
from statistics import median

import torch
from torch import nn

import anynan

FIXED = "--fixed" in sys.argv
STEPS = 200
torch.manual_seed(0)

words = Counter(" ".join(topics.values()).lower().split())
numbers = {word: i for i, (word, _) in enumerate(words.most_common(1000))}
halves = []
for topic in topics.values():
    for paragraph in topic.lower().split("\n\n"):
        text = paragraph.split()
        middle = len(text) // 2
        if middle > 4:
            halves.append((text[:middle], text[middle:]))


class Encoder(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(words, width)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, texts: tuple[list[str], ...]) -> torch.Tensor:
        known = [[numbers[word] for word in text if word in numbers] for text in texts]
        starts = torch.tensor([0] + [len(text) for text in known[:-1]]).cumsum(0)
        flat = torch.tensor([number for text in known for number in text])
        x = self.project(self.words(flat, starts))
        if FIXED:
            return nn.functional.normalize(x, dim=-1)  # divides by at least eps
        return x / x.norm(dim=-1, keepdim=True)


model = Encoder(len(numbers), width=32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


@anynan.torch.track
def train_step(pairs: list[tuple[list[str], list[str]]]) -> float:
    first, second = (model(texts) for texts in zip(*pairs, strict=True))
    similarity = first @ second.T / 0.1
    loss = nn.functional.cross_entropy(similarity, torch.arange(len(pairs)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


losses = [train_step([halves[i] for i in torch.randint(len(halves), (16,))]) for _ in range(STEPS)]
first, last = median(losses[:20]), median(losses[-20:])
print(f"{STEPS} steps, every number finite; loss {first:.2f} -> {last:.2f}")
