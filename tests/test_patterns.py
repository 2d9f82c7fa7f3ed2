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


def chosen(keep: Any = None, exclude: Any = None) -> list[str]:
    return list(choose(LAYERS, keep, exclude))


def test_without_patterns_every_layer_is_kept_in_order() -> None:
    assert choose(LAYERS) == LAYERS
    assert chosen() == list(LAYERS)


def test_a_string_is_the_whole_path() -> None:
    assert chosen("encoder") == ["encoder"]


def test_a_star_crosses_dots() -> None:
    assert chosen("encoder*") == [path for path in LAYERS if path.startswith("encoder")]
    assert chosen("*.norm") == ["encoder.layers.0.norm"]


def test_the_empty_pattern_is_the_model_itself() -> None:
    assert chosen("") == [""]


def test_a_predicate_gets_path_and_layer() -> None:
    assert chosen(lambda path, layer: layer == "Block" and path.endswith("0")) == [
        "encoder.layers.0",
        "encoder.layers.10",
    ]


def test_several_patterns_add_up_in_the_models_order() -> None:
    assert chosen(["head", lambda path, _: path == "embed"]) == ["embed", "head"]
    assert chosen(iter(["head", "embed"])) == ["embed", "head"]


def test_exclude_covers_what_is_inside_the_layer() -> None:
    left = chosen(exclude="encoder.layers.0")
    assert "encoder.layers.0.attn" not in left
    assert "encoder.layers.0" not in left
    assert {"encoder", "encoder.layers.1", "encoder.layers.10"} <= set(left)


def test_exclude_does_not_cover_a_name_that_only_begins_alike() -> None:
    assert "encoder.layers.10" in chosen(exclude="encoder.layers.1")


def test_exclude_wins_over_keep() -> None:
    assert chosen("encoder*", "*.attn") == [
        path for path in LAYERS if path.startswith("encoder") and not path.endswith("attn")
    ]


def test_excluding_the_model_excludes_everything() -> None:
    assert chosen(exclude="") == []


def test_nothing_to_exclude_is_no_error() -> None:
    assert chosen(exclude=[]) == list(LAYERS)


@pytest.mark.parametrize("option", ["layers", "exclude"])
def test_a_typo_names_the_option_and_what_was_meant(option: str) -> None:
    pattern = "encoder.layers.0.atn"
    with pytest.raises(ValueError) as caught:
        chosen(pattern) if option == "layers" else chosen(exclude=pattern)
    message = str(caught.value)
    assert f"{option}='encoder.layers.0.atn' matches no layer" in message
    assert "did you mean 'encoder.layers.0.attn'" in message


def test_a_model_without_layers_is_said_to_be_one() -> None:
    with pytest.raises(ValueError, match="'head' matches no layer: the model has no layers"):
        choose({"": "Model"}, "head")


@pytest.mark.parametrize(
    ("keep", "kind", "words"),
    [
        ([], ValueError, "layers= is empty, so nothing would be watched"),
        ("Encoder*", ValueError, "matches no layer"),  # case matters
        ("zzzzzz", ValueError, r"the layers are embed, encoder, .*\.\.\.$"),
        (["embed", "haed"], ValueError, "'haed'"),  # one typo among good patterns is not silent
        (lambda path, layer: False, ValueError, "matches no layer; the layers are"),
        (3, TypeError, "layers= takes globs or predicates, not int: 3"),
        ([3], TypeError, "layers= takes globs or predicates, not int: 3"),
        ([["head"]], TypeError, r"layers= takes globs or predicates, not list: \['head'\]"),
        (b"head", TypeError, "layers= takes globs or predicates, not bytes: b'head'"),
    ],
)
def test_what_chooses_nothing_or_is_no_pattern_is_refused(keep: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        chosen(keep)
