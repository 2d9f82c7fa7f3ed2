"""The vows of an adapter, kept by PyTorch's."""

from typing import Any

import torch

import anynan
from tests.conformance.contract import Contract, Subject
from tests.flat import split
from tests.torch_adapter.cause_parts import Body


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.log = torch.nn.Linear(2, 3), Body(lambda x: torch.log(x))
        self.head, self.drop = torch.nn.Linear(3, 1), torch.nn.Dropout(0.5)
        torch.nn.init.ones_(self.embed.weight)
        torch.nn.init.ones_(self.embed.bias)

    def forward(self, x: Any) -> Any:
        return self.head(self.drop(self.log(self.embed(x))))


class TestTorch(Contract):
    def make(self) -> Subject:
        torch.manual_seed(7)
        net = Net()
        optimizer = torch.optim.Adam(net.parameters(), 0.01)

        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        def state() -> dict[str, Any]:
            found = {f"weight {k}": x.detach().numpy().copy() for k, x in net.named_parameters()}
            for i, held in optimizer.state_dict()["state"].items():
                found |= {f"state {i} {k}": x.numpy().copy() for k, x in held.items()}
            return found | {"random": torch.get_rng_state().numpy().copy()}

        good, bad = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.0], [-3.0, -4.0]])
        owners = (torch, torch.Tensor, torch.nn.Linear, torch.optim.Optimizer, Body, Net)
        return Subject(net, step, good, bad, state, owners)

    def track(self, target: Any, **options: Any) -> Any:
        return anynan.torch.track(target, **split(options))
