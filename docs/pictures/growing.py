"""Train a small residual network in float16 until it overflows, and write the page of the run.

python docs/pictures/growing.py docs/pictures/report.html
"""

import sys

import torch

import anynan


class Block(torch.nn.Module):
    """Add what two layers make of the input to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main(path: str) -> None:
    """Train until it fails."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), *(Block(32) for _ in range(6)), torch.nn.Linear(32, 1)
    ).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-4, momentum=0.9)

    @anynan.torch.track(advanced=anynan.Advanced(history=400))
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = -model(x).mean()  # nothing bounds it
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(2000):
        try:
            step(torch.rand(16, 8).half())
        except anynan.NonFiniteError as error:
            print(error)
            break
    step.to_html(path)


if __name__ == "__main__":
    main(sys.argv[1])
