"""Public training steps in half precision, as in ``tests.benchmarks.precision``.

``python -m tests.benchmarks.precision_steps FOLDER OUT.jsonl [STEP...]`` takes copies of the
repositories, in folders named as in ``STEPS``. Of a script only its imports, classes and functions
are run, at their own lines. Data are drawn at random; model, loss and mode are the script's.
"""

import ast
import functools
import json
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import tests.wild.torchvision_here  # noqa: F401 - before what imports torchvision
from tests.benchmarks.precision import Case, judged, loss_pair, scaled, targets, told

EXAMPLES = "pytorch+examples"


def names_of(folder: Path, *files: str) -> Any:
    """Run what a script defines, and give it by name."""
    found: dict[str, Any] = {"__name__": "script"}
    for file in files:
        path = folder / file
        text = path.read_text()
        for node in ast.parse(text).body:
            kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
            if isinstance(node, kinds):
                with suppress(ImportError):
                    exec(compile(ast.Module([node], []), str(path), "exec"), found)
    return types.SimpleNamespace(**found)


Loss = Callable[[Any, Any], Any]
Made = tuple[Any, dict[str, Any], Loss]


def nll(model: Any, given: Any) -> Any:
    return F.nll_loss(model(given["x"]), given["y"])


def mnist(n: Any) -> Made:
    return n.Net(), {"x": torch.randn(4, 1, 28, 28), "y": torch.arange(4)}, nll


def vae(n: Any) -> Made:
    def loss(model: Any, given: Any) -> Any:
        recon, mu, logvar = model(given["x"])
        return n.loss_function(recon, given["x"], mu, logvar)

    return n.VAE(), {"x": torch.rand(4, 1, 28, 28)}, loss


def graph(model: Any) -> Made:
    def loss(model: Any, given: Any) -> Any:
        out = model(given["x"], given["adj"])
        return F.nll_loss(out, given["y"])

    adj = ((torch.rand(12, 12) > 0.5).float() + torch.eye(12)).clamp(max=1)
    given = {"x": torch.rand(12, 16), "adj": adj / adj.sum(1), "y": torch.arange(12) % 3}
    return model, given, loss


def gcn(n: Any) -> Made:
    return graph(n.GCN(16, 8, 3))


def gat(n: Any) -> Made:
    return graph(n.GAT(16, 8, 2, 3))


def super_resolution(n: Any) -> Made:
    def loss(model: Any, given: Any) -> Any:
        return F.mse_loss(model(given["x"]), given["y"])

    return n.Net(2), {"x": torch.rand(2, 1, 16, 16), "y": torch.rand(2, 1, 32, 32)}, loss


def rnn_language_model(n: Any) -> Made:
    def loss(model: Any, given: Any) -> Any:
        out, _ = model(given["x"], model.init_hidden(4))
        return F.nll_loss(out, given["y"])

    words = torch.randint(0, 50, (8, 4))
    return n.RNNModel("LSTM", 50, 16, 16, 2), {"x": words, "y": words.flatten()}, loss


def transformer_language_model(n: Any) -> Made:
    def loss(model: Any, given: Any) -> Any:
        return F.nll_loss(model(given["x"]).view(-1, 50), given["y"])

    words = torch.randint(0, 50, (8, 4))
    return n.TransformerModel(50, 16, 2, 32, 2), {"x": words, "y": words.flatten()}, loss


def style(n: Any) -> Made:
    def loss(model: Any, given: Any) -> Any:
        return F.mse_loss(model(given["x"]), given["x"]) * 1e5  # the script's content weight

    return n.TransformerNet(), {"x": torch.rand(1, 3, 32, 32)}, loss


def mingpt(n: Any) -> Made:
    def loss(model: Any, given: Any) -> Any:
        return model(given["x"], given["x"])[1]

    config = n.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=50, block_size=16)
    return n.GPT(config), {"x": torch.randint(0, 50, (2, 16))}, loss


def tokens(model: Any, words: int) -> Made:
    def loss(model: Any, given: Any) -> Any:
        return F.cross_entropy(model(given["x"]).flatten(0, 1), given["x"].flatten())

    return model, {"x": torch.randint(0, words, (2, 16))}, loss


def fsdp2(n: Any) -> Made:
    return tokens(n.Transformer(n.ModelArgs(vocab_size=50)), 50)


def llama2(n: Any) -> Made:
    args = n.ModelArgs(dim=32, n_layers=2, n_heads=2, vocab_size=50, max_seq_len=16)
    model = n.Transformer(args)
    model.init_weights()
    return tokens(model, 50)


def gpt_book(n: Any) -> Made:
    return tokens(
        n.GPTModel(
            {"vocab_size": 50, "context_length": 16, "emb_dim": 16, "n_heads": 2, "n_layers": 2,
             "drop_rate": 0.1, "qkv_bias": False}
        ), 50,
    )  # fmt: skip


def translation(n: Any) -> Made:
    def loss(model: Any, given: Any) -> Any:
        out = model(given["x"], given["x"], None, None, None, None, None)
        return F.cross_entropy(out.flatten(0, 1), given["x"].flatten())

    model = n.Translator(1, 1, 16, 2, 50, 50, 32, 0.1)
    return model, {"x": torch.randint(0, 50, (8, 2))}, loss


def triplet(n: Any) -> Made:
    def loss(model: Any, given: Any) -> Any:
        return n.TripletLoss(1.0)(*model(given["a"], given["b"], given["c"]))

    given = {name: torch.randn(4, 1, 28, 28) for name in "abc"}
    return n.TripletNet(n.EmbeddingNet()), given, loss


def gae(n: Any) -> Made:
    def loss(model: Any, given: Any) -> Any:
        out, mu, logvar = model(given["x"], given["adj"])
        return n.loss_function(out, given["adj"], mu, logvar, 12, 0.6, given["weight"])

    adj = ((torch.rand(12, 12) > 0.6).float() + torch.eye(12)).clamp(max=1)
    given = {"x": torch.rand(12, 16), "adj": adj, "weight": torch.tensor(3.0)}
    return n.GCNModelVAE(16, 8, 4, 0.0), given, loss


def diffusion(n: Any) -> Made:
    def loss(model: Any, given: Any) -> Any:
        return F.mse_loss(model(given["x"], given["t"]), given["noise"])

    given = {"x": torch.randn(8, 2), "noise": torch.randn(8, 2), "t": torch.arange(8)}
    return n.MLP(32, 2, 32), given, loss


def vit(n: Any) -> Made:
    def loss(model: Any, given: Any) -> Any:
        return F.cross_entropy(model(given["x"]), given["y"])

    model = n.SimpleViT(
        image_size=16, patch_size=4, num_classes=5, dim=16, depth=2, heads=2, mlp_dim=32, dim_head=8
    )
    return model, {"x": torch.randn(2, 3, 16, 16), "y": torch.arange(2)}, loss


# What makes the step, the folder, its scripts.
STEPS: dict[str, tuple[Callable[[Any], Made], str, tuple[str, ...]]] = {
    "mnist": (mnist, EXAMPLES, ("mnist/main.py",)),
    "mnist_rnn": (mnist, EXAMPLES, ("mnist_rnn/main.py",)),
    "vae": (vae, EXAMPLES, ("vae/main.py",)),
    "gcn": (gcn, EXAMPLES, ("gcn/main.py",)),
    "gat": (gat, EXAMPLES, ("gat/main.py",)),
    "super_resolution": (super_resolution, EXAMPLES, ("super_resolution/model.py",)),
    "word_rnn": (rnn_language_model, EXAMPLES, ("word_language_model/model.py",)),
    "word_transformer": (transformer_language_model, EXAMPLES, ("word_language_model/model.py",)),
    "style": (style, EXAMPLES, ("fast_neural_style/neural_style/transformer_net.py",)),
    "mingpt": (mingpt, EXAMPLES, ("distributed/minGPT-ddp/mingpt/model.py",)),
    "fsdp2": (fsdp2, EXAMPLES, ("distributed/FSDP2/model.py",)),
    "llama2": (llama2, EXAMPLES, ("distributed/tensor_parallelism/llama2_model.py",)),
    "translation": (translation, EXAMPLES, ("language_translation/src/model.py",)),
    "gpt_book": (gpt_book, "rasbt+LLMs-from-scratch", ("ch04/01_main-chapter-code/gpt.py",)),
    "triplet": (triplet, "adambielski+siamese-triplet", ("networks.py", "losses.py")),
    "gae": (gae, "zfjsail+gae-pytorch", ("gae/layers.py", "gae/model.py", "gae/optimizer.py")),
    "diffusion": (diffusion, "tanelp+tiny-diffusion", ("positional_embeddings.py", "ddpm.py")),
    "vit": (vit, "lucidrains+vit-pytorch", ("vit_pytorch/simple_vit.py",)),
}


class Step(Case):
    """One public training step."""

    def __init__(self, folder: Path, kind: str) -> None:
        make, where, files = STEPS[kind]
        torch.manual_seed(0)
        self.model, self.given, self._loss = make(names_of(folder / where, *files))
        self.factor: float | None = None

    def run(self, model: Any, given: Any) -> Any:
        """Give the loss of a batch; dropout draws the same each time."""
        torch.manual_seed(0)
        return self._loss(model, given)

    def target(self) -> Any:
        """Give the step, which uses the model."""
        model, run = self.model, self.run
        return lambda **given: run(model, given)


def pairs(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Multiply weights, and then the loss, until the real step fails."""
    make = functools.partial(Step, folder, kind)
    for how in ("cast", "autocast"):
        case = make()
        if judged(case, case.model, how) is None:
            yield {"kind": kind, "how": how, "phase": "none", "why": "it does not run"}
            continue
        for name in targets(case.model):
            case = make()
            held = scaled(case, name, how)
            if held is not None:
                what = f"{name} * {held[0]:g}"
                yield told(case, kind, how, "forward", what, held[1]["forward"])
        yield from loss_pair(make(), kind, how, 0)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, out, *kinds = sys.argv[1:]
    with Path(out).open("a") as file:
        for kind in kinds or STEPS:
            try:
                rows = list(pairs(Path(folder), kind))
            except Exception as error:
                rows = [{"kind": kind, "phase": "none", "why": repr(error)[:300]}]
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()


if __name__ == "__main__":
    main()
