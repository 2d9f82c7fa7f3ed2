"""Graph networks of torch_geometric: a network of two layers for every convolution, and models."""

from collections.abc import Callable, Iterator

import torch
import torch_geometric.nn as graphs
from torch import Tensor, nn
from torch.nn import functional as F

from tests.wild.rows import Row
from tests.wild.torch_training import Program, rows

SAMPLE = ["GCNConv", "PNAConv"]
NODES, EDGES = 12, 40
Layer = Callable[[int, int], nn.Module]


def graph() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw features, edges, labels and what the edges carry."""
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(NODES, 8, generator=generator),
        torch.randint(0, NODES, (2, EDGES), generator=generator),
        torch.randint(0, 3, (NODES,), generator=generator),
        torch.rand(EDGES, 4, generator=generator),
    )


def perceptron(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, outputs)
    )


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


def network(layer: Layer, edges: str = "") -> Callable[[], Program]:
    def build() -> Program:
        x, pairs, labels, carried = graph()
        return Network(layer, edges), lambda model, i: F.nll_loss(
            model(x.roll(i, 0), pairs, carried), labels
        )

    return build


def with_edges(layer: Callable[..., nn.Module]) -> Callable[[], Program]:
    return network(lambda inputs, outputs: layer(inputs, outputs, edge_dim=4), "edge_attr")


class Pooled(nn.Module):
    """Classify whole graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = graphs.GIN(8, 16, 2, norm="batch_norm")
        self.pool = graphs.TopKPooling(16, 0.5)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        x, edges, _, batch, *_ = self.pool(self.body(x, edges), edges, batch=batch)
        return self.head(graphs.global_max_pool(x, batch))


def pooled() -> Program:
    x, edges, *_ = graph()
    edges = torch.cat([edges[:, :20] % 6, 6 + edges[:, 20:] % 6], 1)
    batch = torch.tensor([0] * 6 + [1] * 6)
    return Pooled(), lambda model, i: F.cross_entropy(model(x, edges, batch), torch.tensor([0, 1]))


def schnet() -> Program:
    pairs = torch.tensor([(a, b) for a in range(4) for b in range(4) if a != b]).T

    def near(places: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return pairs, (places[pairs[0]] - places[pairs[1]]).norm(dim=-1)

    model = graphs.SchNet(
        hidden_channels=16,
        num_filters=16,
        num_interactions=2,
        num_gaussians=8,
        cutoff=5.0,
        interaction_graph=near,
    )
    atoms = torch.tensor([1, 6, 8, 1])
    places = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))
    return model, lambda model, i: model(atoms, places).square().sum()


def propagated(inputs: int, outputs: int) -> nn.Module:
    return graphs.Sequential(
        "x, edge_index",
        [
            (nn.Linear(inputs, outputs), "x -> x"),
            (graphs.APPNP(3, 0.1), "x, edge_index -> x"),
        ],
    )


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
    "GINConv": network(lambda i, o: graphs.GINConv(perceptron(i, o))),
    "GINEConv": network(lambda i, o: graphs.GINEConv(perceptron(i, o), edge_dim=4), "edge_attr"),
    "ChebConv": network(lambda i, o: graphs.ChebConv(i, o, K=3)),
    "APPNP": network(propagated),
    "PNAConv": network(aggregated),
    "GENConv": network(lambda i, o: graphs.GENConv(i, o, aggr="softmax", learn_t=True)),
    "EGConv": network(lambda i, o: graphs.EGConv(i, o if o % 4 == 0 else 4, num_heads=4)),
    "NNConv": network(lambda i, o: graphs.NNConv(i, o, nn.Linear(4, i * o)), "edge_attr"),
    "GIN with TopKPooling": pooled,
    "SchNet": schnet,
}


def cases() -> list[str]:
    return list(PROGRAMS)


def run(case: str) -> Iterator[Row]:
    yield from rows("torch_geometric", case, PROGRAMS[case])
