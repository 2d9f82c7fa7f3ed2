"""How many planted bugs ``anynan.compare`` finds in the right layer, and how often it cries wolf.

``python -m tests.benchmarks.rounding [ARCHITECTURE...]`` prints the table of
docs/rounding-measured.md.
"""

import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

import anynan.torch
from tests.wild.tiny_configs import TINY

TEXT = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gpt_neox", "gpt2", "opt", "phi", "bert",
        "roberta", "mixtral", "olmo2"]  # fmt: skip
IMAGES = ["resnet", "mobilenet_v2", "vit", "regnet"]
ACTIVATIONS = ("GELU", "SiLU", "ReLU", "Activation", "Tanh")


def tiny(name: str) -> tuple[Any, Callable[[], Any]]:
    """Make a small model of an architecture, trained a little, and something to call it with."""
    config = transformers.CONFIG_MAPPING[name]()
    for key, value in TINY.items():
        if hasattr(config, key) and isinstance(getattr(config, key), type(value)):
            setattr(config, key, value)
    for key, value in {"num_stages": 4, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1],
                       "embedding_size": 8, "groups_width": 8, "num_hidden_layers": 3,
                       "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
                       "layer_types": ["full_attention"] * 3}.items():  # fmt: skip
        counted = key == "num_hidden_layers" and hasattr(config, "hidden_sizes")
        if getattr(config, key, None) is not None and not counted:
            setattr(config, key, value)
    torch.manual_seed(0)
    images = name in IMAGES
    kind: Any = transformers.AutoModel if images else transformers.AutoModelForCausalLM
    if name in ("bert", "roberta"):
        kind = transformers.AutoModelForMaskedLM
    model = kind.from_config(config)
    shape = (2, 3, 32, 32)

    def batch() -> Any:
        return torch.randn(shape) if images else torch.randint(3, 90, (2, 12))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        out = model(batch())[0]
        loss = out.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), batch


def named(model: Any, wanted: Callable[[Any], bool]) -> list[tuple[str, Any]]:
    found = [(name, module) for name, module in model.named_modules() if name and wanted(module)]
    return found[len(found) // 2 :] + found[: len(found) // 2]


def bugs(model: Any) -> Iterator[tuple[str, str, Callable[[Any], None]]]:
    """Yield what can be broken: what, in which layer, and how."""
    norms = named(model, lambda m: "Norm" in type(m).__name__ and _eps(m) is not None)
    if norms:
        yield (
            "eps",
            norms[0][0],
            lambda m: setattr(m, str(_eps(m)), max(1e-4, 100 * getattr(m, _eps(m)))),
        )
    scaled = named(model, lambda m: isinstance(getattr(m, "scaling", None), float))
    shared = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    layers = named(model, lambda m: _matrix(m) and id(m.weight) not in shared)
    if scaled:
        yield "scale", scaled[0][0], lambda m: setattr(m, "scaling", m.scaling * 1.01)
    else:
        yield "scale", layers[1][0], lambda m: m.weight.data.mul_(1.01)
    acts = named(model, lambda m: type(m).__name__.endswith(ACTIVATIONS) and not _children(m))
    if acts:
        yield "activation", acts[0][0], _other_activation
    yield "rows", layers[0][0], lambda m: setattr(m.weight, "data", m.weight.data.flip(0))
    turning = named(model, lambda m: hasattr(m, "inv_freq"))
    places = named(model, lambda m: isinstance(m, torch.nn.Embedding))
    if turning:
        yield "rope", turning[0][0], lambda m: m.inv_freq.mul_(1.01)
    elif len(places) > 1:
        yield "positions", places[0][0], lambda m: m.weight.data.copy_(m.weight.data.roll(1, 0))
    masked = named(model, lambda m: "Attention" in type(m).__name__ and _takes_mask(m))
    if masked and hasattr(model.config, "vocab_size"):
        yield "mask", masked[0][0], _mask_off_by_one
    blocks = named(model, lambda m: type(m).__name__.endswith(("Attention", "Layer", "Block")))
    if blocks:
        yield "off by one", blocks[0][0], _off_by_one


def _eps(module: Any) -> Any:
    return next((key for key in ("eps", "variance_epsilon") if hasattr(module, key)), None)


def _matrix(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    embedding = isinstance(module, torch.nn.Embedding)
    return isinstance(weight, torch.nn.Parameter) and weight.ndim > 1 and not embedding


def _takes_mask(module: Any) -> bool:
    return "attention_mask" in inspect.signature(module.forward).parameters


def _children(module: Any) -> bool:
    return any(True for _ in module.children())


def _other_activation(module: Any) -> None:
    silu = "SiLU" in type(module).__name__
    module.forward = torch.nn.functional.gelu if silu else torch.nn.functional.silu


def _off_by_one(module: Any) -> None:
    forward = module.forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (args[0].roll(1, 1 if args[0].ndim == 3 else -1), *args[1:])
        else:
            kwargs["hidden_states"] = kwargs["hidden_states"].roll(1, 1)
        return forward(*args, **kwargs)

    module.forward = shifted


def _mask_off_by_one(module: Any) -> None:
    """Hide the first token from all others, or let each see one that is to come."""
    forward = module.forward

    def shifted(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        seen = seen.tril(1) if getattr(module, "is_causal", False) else seen & (seen.cumsum(1) > 1)
        hidden = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, -1e9)
        return forward(*args, attention_mask=hidden[None, None], **kwargs)

    module.forward = shifted


def clean(model: Any, x: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield pairs between which nothing is but rounding."""
    try:
        eager = copy.deepcopy(model)
        eager.set_attn_implementation("eager")
    except (AttributeError, ValueError):
        eager = None
    if eager is not None and eager.config._attn_implementation != model.config._attn_implementation:
        yield "eager attention", model, eager
    yield "bfloat16", model, copy.deepcopy(model).bfloat16()
    if "mixtral" not in type(model).__name__.lower():  # its experts have no float64 kernel
        yield "float64", model, copy.deepcopy(model).double()
    yield "compiled", model, torch.compile(copy.deepcopy(model))
    twin = copy.deepcopy(model)
    yield "one of the batch", lambda x: model(x)[0][:1], lambda x: twin(x[:1])[0]

    def threads(x: Any) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(1 if before > 1 else 2)
        try:
            return twin(x)
        finally:
            torch.set_num_threads(before)

    yield "threads", model, threads


def in_flax() -> Iterator[tuple[str, str | None, Any, Any, Any]]:
    """Yield a PyTorch model, its port to flax, and what is wrong with the port."""
    import flax.linen as fnn
    import jax
    import jax.numpy as jnp

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(16)
            self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    class PortedBlock(fnn.Module):
        eps: float = 1e-5
        scale: float = 1.0
        near: bool = False
        shift: int = 0

        @fnn.compact
        def __call__(self, x: Any) -> Any:
            norm = fnn.LayerNorm(epsilon=self.eps, name="norm")
            h = fnn.Dense(64, name="up")(norm(jnp.roll(x, self.shift, 0)))
            h = fnn.gelu(h, approximate=self.near) * self.scale
            return x + fnn.Dense(16, name="down")(h)

    class Ported(fnn.Module):
        settings: Any = None

        @fnn.compact
        def __call__(self, x: Any) -> Any:
            for i in range(3):
                x = PortedBlock(**((self.settings or {}) if i == 1 else {}), name=f"{i}")(x)
            return x

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block() for _ in range(3)))
    params: dict[str, Any] = {}
    for i, block in enumerate(model):
        params[f"{i}"] = {}
        for name, part in block.named_children():
            weight = jnp.array(part.weight.data.T)
            kind = "scale" if name == "norm" else "kernel"
            params[f"{i}"][name] = {kind: weight, "bias": jnp.array(part.bias.data)}
    x = torch.randn(4, 16)

    def port(params: Any = params, **settings: Any) -> Any:
        return lambda x: Ported(settings).apply({"params": params}, x)

    turned = copy.deepcopy(params)
    turned["1"]["up"]["kernel"] = turned["1"]["up"]["kernel"][:, ::-1]
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    yield "eps", "1.norm", model, port(eps=1e-3), x
    yield "scale", "1", model, port(scale=1.01), x
    yield "activation", "1", model, port(near=True), x
    yield "rows", "1.up", model, port(turned), x
    yield "off by one", "1", model, port(shift=1), x
    yield "port", None, model, port(), x
    yield "the other way", None, port(), model, x
    yield "jit", None, model, jax.jit(port()), x
    yield "bfloat16", None, model, lambda x: port(half)(x.astype(jnp.bfloat16)), x
    yield "JAX alone", None, port(), jax.jit(port()), x


def in_keras() -> Iterator[tuple[str, str | None, Any, Any, Any]]:
    """Yield a Keras model of images, its port to PyTorch, and what is wrong with the port."""
    import os

    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    inputs = keras.Input((12, 12, 3))
    y = keras.layers.Conv2D(8, 3, name="conv")(inputs)
    y = keras.layers.BatchNormalization(name="norm")(y)
    y = keras.layers.Activation("gelu", name="act")(y)
    y = keras.layers.GlobalAveragePooling2D(name="pool")(y)
    model = keras.Model(inputs, keras.layers.Dense(5, name="head")(y))
    model(np.random.default_rng(1).standard_normal((16, 12, 12, 3)), training=True)
    conv, norm, head = (model.get_layer(name) for name in ("conv", "norm", "head"))

    def brought(x: Any) -> Any:
        return torch.tensor(np.array(x.numpy()))

    def port(eps: float = 1e-3, scale: float = 1.0, near: bool = False, shift: int = 0) -> Any:
        made = torch.nn.ModuleDict(
            {
                "conv": torch.nn.Conv2d(3, 8, 3),
                "norm": torch.nn.BatchNorm2d(8, eps=eps),
                "act": torch.nn.GELU("tanh" if near else "none"),
                "pool": torch.nn.AdaptiveAvgPool2d(1),
                "head": torch.nn.Linear(8, 5),
            }
        )
        made["conv"].weight.data = brought(conv.kernel).permute(3, 2, 0, 1).contiguous() * scale
        made["conv"].bias.data = brought(conv.bias)
        made["norm"].running_mean = brought(norm.moving_mean)
        made["norm"].running_var = brought(norm.moving_variance)
        made["head"].weight.data = brought(head.kernel).T.contiguous().roll(shift, 0)
        made["head"].bias.data = brought(head.bias)

        def forward(x: Any) -> Any:
            x = x.permute(0, 3, 1, 2)
            for name in ("conv", "norm", "act", "pool"):
                x = made[name](x)
            return made["head"](x.flatten(1))

        made.forward = forward
        return made.eval()

    x = np.random.default_rng(0).standard_normal((2, 12, 12, 3)).astype("float32")
    flipped = port()
    flipped["conv"].weight.data = flipped["conv"].weight.data.flip(2)
    twin = keras.models.clone_model(model)
    twin.set_weights(model.get_weights())
    yield "eps", "norm", model, port(eps=1e-5), x
    yield "scale", "conv", model, port(scale=1.01), x
    yield "activation", "act", model, port(near=True), x
    yield "rows", "conv", model, flipped, x
    yield "off by one", "head", model, port(shift=1), x
    yield "port", None, model, port(), x
    yield "the other way", None, port(), model, x
    yield "float64", None, model, port().double(), x
    yield "bfloat16", None, model, port().bfloat16(), x
    yield "Keras alone", None, model, twin, x


def in_transformers(name: str) -> Iterator[tuple[str, str | None, Any, Any, Any]]:
    """Yield a model, another, what is wrong with it and where: nowhere for a clean pair."""
    model, batch = tiny(name)
    x = batch()
    for what, path, break_it in bugs(model):
        broken = copy.deepcopy(model)
        break_it(broken.get_submodule(path))
        yield what, path, model, broken, x
    torch.compiler.reset()
    for what, a, b in clean(model, x):
        yield what, None, a, b, x


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    totals = [0, 0, 0, 0]
    misses = []
    print("| architecture | found in the right layer | false alarms | largest clean ratio |")
    print("| --- | --- | --- | --- |")
    for name in names or [*TEXT, *IMAGES, "port to flax", "port from Keras"]:
        made = {"port to flax": in_flax, "port from Keras": in_keras}.get(name)
        found = planted = wrong = pairs = 0
        worst = 0.0
        for what, path, a, b, x in in_transformers(name) if made is None else made():
            seen = anynan.compare(a, b, x)
            if path is not None:
                planted += 1
                right = seen.place is not None and seen.place.layer == path
                found += right
            else:
                pairs += 1
                worst = max(worst, seen.ratio)
                right = seen.place is None and all(turn.rounding for turn in seen.turns)
                wrong += not right
            if not right:
                where = f" in {path}" if path else ""
                misses.append(f"{name}, {what}{where}: {seen.sentence()}")
        print(f"| {name} | {found} of {planted} | {wrong} of {pairs} | {worst:.1f} |", flush=True)
        for i, count in enumerate((found, planted, wrong, pairs)):
            totals[i] += count
    print(f"| all | {totals[0]} of {totals[1]} | {totals[2]} of {totals[3]} | |")
    print()
    for miss in misses:
        print(f"- {miss}")


if __name__ == "__main__":
    main(sys.argv[1:])
