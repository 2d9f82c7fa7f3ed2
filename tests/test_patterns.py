"""Which layers a pattern chooses, and that a typo is never silent."""

from typing import Any

import pytest

from anynan._readings.patterns import choose

LAYERS: dict[str, Any] = {
    "": "Model",
    "embed": "Embedding",
    "encoder": "Encoder",
    "encoder.layers.0": "Block",
    "encoder.layers.0.attn": "Attention",
    "encoder.layers.0.norm": "Norm",
    "encoder.layers.1": "Block",
    "encoder.layers.10": "Block",
    "head": "Linear",
}


BLOCKS = ["encoder.layers.0", "encoder.layers.1", "encoder.layers.10"]


@pytest.mark.parametrize(
    ("keep", "exclude", "left"),
    [
        (None, [], list(LAYERS)),
        ("*.norm", None, ["encoder.layers.0.norm"]),  # a star crosses dots
        ("", None, [""]),
        (lambda path, layer: layer == "Block", None, BLOCKS),
        (["head", lambda path, _: path == "embed"], None, ["embed", "head"]),
        (BLOCKS, "encoder.layers.1", ["encoder.layers.0", "encoder.layers.10"]),
        ("encoder.layers.0*", "*.attn", ["encoder.layers.0", "encoder.layers.0.norm"]),
        (None, "", []),
        # What is inside a layer goes with it.
        (None, "encoder.layers.0", ["", "embed", "encoder", *BLOCKS[1:], "head"]),
    ],
)
def test_patterns_choose_in_the_models_order(keep: Any, exclude: Any, left: list[str]) -> None:
    assert list(choose(LAYERS, keep, exclude)) == left


@pytest.mark.parametrize("option", ["layers", "exclude"])
def test_a_typo_names_the_option_and_what_was_meant(option: str) -> None:
    pattern = "encoder.layers.0.atn"
    said = f"{option}='{pattern}' matches no layer.*did you mean 'encoder.layers.0.attn'"
    with pytest.raises(ValueError, match=said):
        choose(LAYERS, *((pattern, None) if option == "layers" else (None, pattern)))
    with pytest.raises(ValueError, match="'head' matches no layer: the model has no layers"):
        choose({"": "Model"}, "head", None)


@pytest.mark.parametrize(
    ("keep", "kind", "words"),
    [
        ([], ValueError, "layers= is empty, so nothing would be watched"),
        ("Encoder*", ValueError, "matches no layer"),  # case matters
        ("zzzzzz", ValueError, r"the layers are embed, encoder, .*\.\.\.$"),
        (["embed", "haed"], ValueError, "'haed'"),  # one typo among good patterns is not silent
        (lambda path, layer: False, ValueError, "matches no layer; the layers are"),
        (3, TypeError, "layers= takes globs or predicates, not int: 3"),
    ],
)
def test_what_chooses_nothing_or_is_no_pattern_is_refused(keep: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        choose(LAYERS, keep, None)
