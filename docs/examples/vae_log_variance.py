"""A variational autoencoder whose log variance has no bound: one long text, and exp overflows.

It learns how often each character occurs in a paragraph of Python's own help; but the splitting
left some chapters whole. With --fixed the log variance is clamped, as in most published models.
"""

import sys
from pydoc_data.topics import topics
from statistics import median

import torch
from torch import nn

import anynan

FIXED = "--fixed" in sys.argv
STEPS = 240
torch.manual_seed(0)

chapters = list(topics.values())
texts = chapters[:20] + [text for chapter in chapters[20:] for text in chapter.split("\n\n")]
letters = sorted(set("".join(texts)))
counts = torch.tensor([[float(text.count(letter)) for letter in letters] for text in texts])


class VAE(nn.Module):
    def __init__(self, inputs: int, width: int, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 2 * latent)
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, inputs), nn.Softplus()
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        if FIXED:
            log_variance = log_variance.clamp(-30, 20)
        z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        variance = torch.exp(log_variance)
        divergence = 0.5 * (variance + mean.square() - log_variance - 1).sum(dim=-1)
        return self.decoder(z), divergence


model = VAE(len(letters), width=64, latent=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@anynan.torch.track
def train_step(x: torch.Tensor) -> float:
    rate, divergence = model(x)
    misfit = nn.functional.poisson_nll_loss(rate, x, log_input=False)
    loss = misfit + 1e-3 * divergence.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


losses = [train_step(counts[torch.randint(len(counts), (32,))]) for _ in range(STEPS)]
first, last = median(losses[:20]), median(losses[-20:])
print(f"{STEPS} steps, every number finite; loss {first:.2f} -> {last:.2f}")
