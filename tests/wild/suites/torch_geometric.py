"""Graph networks of torch_geometric: a network of two layers for every convolution, and a model."""

from collections.abc import Callable

import torch
import torch_geometric.nn as graphs
from torch import Tensor, nn
from torch.nn import functional as F

from tests.wild.torch_training import Program, drawn, suite_of

SAMPLE = ["GCNConv", "PNAConv"]
NODES, EDGES = 12, 40
Layer = Callable[[int, int], nn.Module]


class Network(nn.Module):
    """Two convolutions with what is usually between them."""

    def __init__(self, layer: Layer, edges: str) -> None:
        super().__init__()
        self.first, self.second, self.edges = layer(8, 16), layer(16, 3), edges

    def forward(self, x: Tensor, edges: Tensor, carried: Tensor) -> Tensor:
        more = {"edge_attr": carried, "edge_weight": carried[:, 0]}
        more = {name: value for name, value in more.items() if name == self.edges}
        x = F.dropout(F.elu(self.first(x, edges, **more)), 0.1, training=self.training)
        return F.log_softmax(self.second(x, edges, **more), -1)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = graphs.GIN(8, 16, 2, norm="batch_norm")
        self.pool = graphs.TopKPooling(16, 0.5)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        x, edges, _, batch, *_ = self.pool(self.body(x, edges), edges, batch=batch)
        return self.head(graphs.global_max_pool(x, batch))


def drawn_edges() -> Tensor:
    return torch.randint(0, NODES, (2, EDGES), generator=torch.Generator().manual_seed(3))


def pooled() -> Program:
    x, pairs = drawn(NODES, 8), drawn_edges()
    edges = torch.cat([pairs[:, :20] % 6, 6 + pairs[:, 20:] % 6], 1)
    batch, labels = torch.arange(NODES) // 6, torch.tensor([0, 1])
    return Pooled(), lambda model, i: F.cross_entropy(model(x, edges, batch), labels)


def network(layer: Layer, edges: str = "") -> Callable[[], Program]:
    def build() -> Program:
        x, pairs, carried = drawn(NODES, 8), drawn_edges(), drawn(EDGES, 4).sigmoid()
        labels = torch.arange(NODES) % 3
        loss = lambda model, i: F.nll_loss(model(x.roll(i, 0), pairs, carried), labels)  # noqa: E731
        return Network(layer, edges), loss

    return build


def with_edges(layer: Callable[..., nn.Module]) -> Callable[[], Program]:
    return network(lambda inputs, outputs: layer(inputs, outputs, edge_dim=4), "edge_attr")


def aggregated(inputs: int, outputs: int) -> nn.Module:
    return graphs.PNAConv(
        inputs,
        outputs,
        aggregators=["mean", "std", "max", "min", "var"],
        scalers=["identity", "amplification", "attenuation"],
        deg=torch.tensor([1, 2, 4, 3, 2]),
    )


PLAIN = (
    "SAGEConv", "TAGConv", "ARMAConv", "SGConv", "GeneralConv", "ResGatedGraphConv", "LEConv",
    "ClusterGCNConv", "SuperGATConv", "FiLMConv", "MFConv",
)  # fmt: skip
PROGRAMS: dict[str, Callable[[], Program]] = {
    **{name: network(getattr(graphs, name)) for name in PLAIN},
    "GCNConv": network(graphs.GCNConv, "edge_weight"),
    "GraphConv": network(graphs.GraphConv, "edge_weight"),
    "GATConv": with_edges(graphs.GATConv),
    "GATv2Conv": with_edges(graphs.GATv2Conv),
    "TransformerConv": with_edges(graphs.TransformerConv),
    "ChebConv": network(lambda i, o: graphs.ChebConv(i, o, K=3)),
    "GENConv": network(lambda i, o: graphs.GENConv(i, o, aggr="softmax", learn_t=True)),
    "NNConv": network(lambda i, o: graphs.NNConv(i, o, nn.Linear(4, i * o)), "edge_attr"),
    "PNAConv": network(aggregated),
    "GIN with TopKPooling": pooled,
}
cases, run = suite_of("torch_geometric", PROGRAMS)
