"""Files of weights: what is in them, whatever the format, and whatever is wrong with them."""

import json
import os
import pickle
import struct
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import anynan
from anynan._apps.scan.scan import File, scan
from anynan._files.formats import FORMATS, TARGETS
from anynan._files.gguf import _BLOCKS
from anynan._files.tally import tally
from tests.processes import python

ml_dtypes = pytest.importorskip("ml_dtypes")


def weights() -> dict[str, Any]:
    """Make weights of a training that went bad."""
    random = np.random.default_rng(0)
    w = random.normal(size=(70, 30)).astype(np.float32)
    w[3, 7], w[3, 8], w[60, 1] = np.nan, np.inf, -np.inf
    return {
        "w": w,
        "half": random.normal(size=(5, 4, 3)).astype(np.float16),
        "ids": np.arange(6),
        "negative": -np.abs(random.normal(size=9)).astype(np.float32) - 1,
    }


def as_npz(folder: Path, held: dict[str, Any]) -> None:
    np.savez(folder / "x.npz", **held)


def as_big_endian(folder: Path, held: dict[str, Any]) -> None:
    as_npz(folder, {k: v.astype(v.dtype.newbyteorder(">")) for k, v in held.items()})


def as_safetensors(folder: Path, held: dict[str, Any]) -> None:
    pytest.importorskip("safetensors.numpy").save_file(held, folder / "x.safetensors")


def as_torch(folder: Path, held: dict[str, Any], file: str = "x.pt", **options: Any) -> None:
    torch = pytest.importorskip("torch")
    tensors = {key: torch.from_numpy(value) for key, value in held.items()}
    torch.save(tensors, folder / file, **options)


def as_older_torch(folder: Path, held: dict[str, Any]) -> None:
    as_torch(folder, held, "x.bin", _use_new_zipfile_serialization=False)


def as_hdf5(folder: Path, held: dict[str, Any], **options: Any) -> None:
    with pytest.importorskip("h5py").File(folder / "x.h5", "w") as file:
        for key, value in held.items():
            chunks = {"chunks": (2,) * value.ndim} if options else {}
            file.create_dataset(key, data=value, **chunks, **options)


def as_chunked_hdf5(folder: Path, held: dict[str, Any]) -> None:
    as_hdf5(folder, held, compression="gzip")


def as_gguf(folder: Path, held: dict[str, Any]) -> None:
    (folder / "x.gguf").write_bytes(gguf({key: (kind(v), v) for key, v in held.items()}))


def as_orbax(folder: Path, held: dict[str, Any]) -> None:
    with pytest.importorskip("orbax.checkpoint").StandardCheckpointer() as file:
        file.save(folder / "x", held)


FORMS = {write.__name__: write for write in (
    as_npz, as_big_endian, as_safetensors, as_torch, as_older_torch, as_hdf5, as_chunked_hdf5,
    as_gguf, as_orbax,
)}  # fmt: skip


def written(form: str, folder: Path) -> Path:
    """Write the weights, and give the path of the file."""
    folder.mkdir(exist_ok=True)
    FORMS[form](folder, weights())
    (path,) = folder.iterdir()
    return path


def kind(value: Any) -> int:
    return {"float32": 0, "float16": 1, "int64": 27}[value.dtype.name]


def gguf(held: dict[str, tuple[int, Any]]) -> bytes:
    """Write GGUF as its specification has it."""

    def text(words: str) -> bytes:
        return struct.pack("<Q", len(words)) + words.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, len(held), 3)
    head += text("general.name") + struct.pack("<I", 8) + text("model")
    head += text("general.alignment") + struct.pack("<II", 4, 64)
    head += text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    body = b""
    for name, (number, value) in held.items():
        body += b"\0" * (-len(body) % 64)
        shape = value.shape if number in (0, 1, 27) else (len(value) * _BLOCKS[number][1],)
        head += text(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *shape[::-1]) + struct.pack("<IQ", number, len(body))
        body += value.tobytes()
    return head + b"\0" * (-len(head) % 64) + body


def only(path: Path, target: str | None = None) -> File:
    (file,) = scan([str(path)], None if target is None else TARGETS[target])
    return file


def first_bad(path: Path) -> dict[str, Any]:
    """Give the tensors of a file by name, each with the index of its first bad number."""
    return {each.tensor.name: each.first for each in only(path).tensors}


@pytest.mark.parametrize("form", FORMS)
def test_every_format_gives_what_is_in_the_arrays(form: str, tmp_path: Path) -> None:
    held = weights()
    file = only(written(form, tmp_path), target="float16")
    assert (file.error, file.unread, file.bad) == ("", False, 3)
    assert {found.tensor.name for found in file.tensors} == set(held)
    for found in file.tensors:
        wanted, counts = anynan.summarize(held[found.tensor.name]), found.tally
        assert (found.tensor.dtype, found.tensor.shape) == (wanted.dtype, wanted.shape)
        if found.tensor.name == "ids":
            assert counts is None
            continue
        for count in ("nan", "posinf", "neginf", "min", "max"):
            assert getattr(counts, count) == getattr(wanted, count)
        assert found.first == wanted.first_bad
        assert found.headroom == pytest.approx(wanted.headroom)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_model_that_keras_saved(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")])
    kernel, bias = model.layers[0].get_weights()
    kernel[1, 0] = np.nan
    model.layers[0].set_weights([kernel, bias])
    model.save(tmp_path / "x.keras")
    file = only(tmp_path / "x.keras")
    assert (file.format, file.bad) == ("keras", 1)
    assert [*filter(None, first_bad(tmp_path / "x.keras").values())] == [(1, 0)]


def test_a_checkpoint_of_pytorch_with_everything_in_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        (model(torch.ones(2, 3)).sum() * torch.inf).backward()
        optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(saved, tmp_path / "x.pt")
    file = only(tmp_path / "x.pt")
    bad = {found.tensor.name for found in file.tensors if found.tally and found.tally.bad}
    assert {"model.0.weight", "optimizer.state.0.exp_avg"} <= bad
    assert "optimizer.state.0.step" not in bad
    torch.save(model, tmp_path / "whole.pt")
    assert only(tmp_path / "whole.pt").error == (
        "PyTorch does not load it with weights_only=True: it needs "
        "torch.nn.modules.container.Sequential"
    )


def test_views_shared_storages_and_small_types_of_pytorch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    whole[1, 2] = torch.nan
    held = {
        "rows": whole[1:],
        "turned": whole.T,
        "spread": torch.tensor([torch.inf]).expand(1000, 1000),
        "bf": torch.tensor([1.0, torch.nan]).bfloat16(),
        "e5": torch.tensor([torch.inf, 1.0]).to(torch.float8_e5m2),
        "e4": torch.tensor([448.0, torch.nan]).to(torch.float8_e4m3fn),
        "pair": torch.tensor([1 + 1j, complex(0.0, torch.nan)]),
        "scalar": torch.tensor(-torch.inf),
        "none": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.tensor([torch.nan])),
        "sparse": torch.tensor([0.0, torch.nan]).to_sparse(),
    }
    torch.save(held, tmp_path / "x.pt")
    found = {each.tensor.name: each for each in only(tmp_path / "x.pt").tensors}
    firsts = {"rows": (0, 2), "bf": (1,), "e5": (0,), "e4": (1,), "pair": (1,), "scalar": ()}
    firsts |= {"parameter": (0,), "sparse.values": (0,)}
    assert {name: found[name].first for name in firsts} == firsts
    assert [found[name].tally.bad for name in ("turned", "spread", "none")] == [1, 1, 0]
    assert "its whole storage" in found["turned"].tensor.note


def test_the_scales_of_quantised_blocks_are_looked_at(tmp_path: Path) -> None:
    held = {}
    for number, (name, _, width, places) in _BLOCKS.items():
        blocks = np.random.default_rng(number).integers(0, 256, (5, width), np.uint8)
        for place in places:
            blocks[:, place : place + 2] = np.asarray([0.5], "<f2").view(np.uint8)
        blocks[3, places[-1] : places[-1] + 2] = np.asarray([np.nan], "<f2").view(np.uint8)
        held[name] = number, blocks
    (tmp_path / "x.gguf").write_bytes(gguf(held))
    file = only(tmp_path / "x.gguf")
    assert not file.unread
    assert {(each.first and each.first[0], each.tally.bad) for each in file.tensors} == {(3, 1)}


def test_gguf_is_read_as_its_own_library_writes_it(tmp_path: Path) -> None:
    library = pytest.importorskip("gguf")
    sizes = library.GGML_QUANT_SIZES
    for number, (_, numbers, width, _) in _BLOCKS.items():
        assert sizes[library.GGMLQuantizationType(number)] == (numbers, width)
    writer = library.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("w", weights()["w"])
    kind = library.GGMLQuantizationType.Q8_0
    blocks = library.quants.quantize(np.ones((4, 64), np.float32), kind)
    writer.add_tensor("q", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert first_bad(tmp_path / "x.gguf") == {"w": (3, 7), "q": None}


@cache
def numbers(name: str) -> Any:
    """Give every pattern of a small format, and many of a large one, as its own dtype."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    width = dtype.itemsize * 8
    if width <= 16:
        return np.arange(2**width, dtype=f"u{dtype.itemsize}").view(dtype)
    bits = np.random.default_rng(0).integers(0, 2**63, 20_000, dtype=np.uint64)
    bits = np.concatenate([bits, ~bits]) >> np.uint64(64 - width)
    near = np.asarray(
        [65504, 65519.99, 65520, 65520.01, 2**-25, 2**-25 * 1.001, 2**-26, 0.0, -0.0, 464, 465,
         3.3895313892515355e38, 3.3961775292304957e38, 2**-134, 1e-40, 61440, 61439, np.inf],
    ).astype(dtype)  # fmt: skip
    return np.concatenate([bits.astype(f"u{dtype.itemsize}").view(dtype), near, -near])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("target", [None, "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_bits_give_what_the_dtype_gives(name: str, target: str | None) -> None:
    held = numbers(name)
    bits = np.array_split(held.view(f"u{held.dtype.itemsize}"), 7)
    found = tally(bits, name, None if target is None else TARGETS[target])
    with np.errstate(all="ignore"):  # all of these are numbers of float64 too
        wide = held.astype(np.float64)
    finite = np.isfinite(wide)
    assert (found.nan, found.posinf, found.neginf) == (
        np.isnan(wide).sum(), (wide == np.inf).sum(), (wide == -np.inf).sum(),
    )  # fmt: skip
    assert (found.min, found.max) == (wide[finite].min(), wide[finite].max())
    assert found.first == (None if finite.all() else int((~finite).argmax()))
    if target is not None:
        with np.errstate(all="ignore"):
            there = wide.astype(getattr(ml_dtypes, target, target)).astype(np.float64)
        assert found.overflow == (finite & ~np.isfinite(there)).sum()
        assert found.flushed == (finite & (wide != 0) & (there == 0)).sum()


@cache
def good(form: str) -> tuple[str, bytes]:
    """Give the name and the bytes of a good file."""
    with tempfile.TemporaryDirectory() as folder:
        path = written(form, Path(folder))
        return path.name, path.read_bytes()


@pytest.mark.parametrize("form", [form for form in FORMS if form != "as_orbax"])
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damage_is_a_line_and_never_an_exception(form: str, data: Any, tmp_path: Path) -> None:
    name, whole = good(form)
    held = bytearray(whole)
    if data.draw(st.booleans()):
        del held[data.draw(st.integers(0, len(held) - 1)) :]
    for _ in range(data.draw(st.integers(0, 4)) if held else 0):
        held[data.draw(st.integers(0, min(len(held), 4000) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / name).write_bytes(held)
    file = only(tmp_path / name)
    if len(held) < len(whole) // 2:
        assert file.unread
    json.dumps([found.to_dict() for found in file.tensors], default=str)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"hello world, this is no file of weights", "of no known format"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"PK\x03\x04" + b"\0" * 99, "BadZipFile"),
        (b"\xff" * 8 + b"{" + b"x" * 30, "header would be"),
        (struct.pack("<Q", 30) + b'{"a": 1}', "ends inside of its header"),
        (pickle.dumps({"a": 1}), "not made of tensors"),
        (b"GGUF" + struct.pack("<IQQ", 9, 1, 1), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 1) + b"\xff" * 20, "longer than the file"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_the_rest_is_read(
    content: bytes, says: str, tmp_path: Path, command: Any
) -> None:
    if says == "not made of tensors":
        pytest.importorskip("torch")  # which reads pickles
    (tmp_path / "a.bin").write_bytes(content)
    np.save(tmp_path / "b.npy", np.asarray([1.0, np.nan]))
    status, out, _ = command("scan", tmp_path)
    first, *rest = out.splitlines()
    assert status == 2
    assert first.startswith(f"{tmp_path / 'a.bin'}: not read: ")
    assert says in first
    assert "b.npy: npy, 1 tensor of floats, 2 numbers, 1 not finite" in rest[0]


class Trap:
    """Make a pickle that would run code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    trap = tmp_path / "trapped"
    held = {"w": torch.tensor([1.0, torch.nan]), "trap": Trap(trap)}
    torch.save(held, tmp_path / "x.pt")
    torch.save(held, tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    (tmp_path / "y.bin").write_bytes(pickle.dumps(Trap(trap)))
    np.save(tmp_path / "x.npy", np.asarray([Trap(trap)]), allow_pickle=True)
    files = {os.path.basename(file.path): file for file in scan([str(tmp_path)])}
    assert not trap.exists()
    for name in ("x.pt", "x.bin", "y.bin"):
        assert "PyTorch does not load it with weights_only=True" in files[name].error
    assert files["x.pt"].error.endswith("it needs posix.mkdir")
    assert "type object are not read" in files["x.npy"].tensors[0].tensor.note


def test_a_tensor_that_lies_about_its_place_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.zeros(1000)}, tmp_path / "x.pt")
    told = tmp_path / "y.pt"
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(told, "w") as new:
        for info in old.infolist():
            held = old.read(info)
            if info.filename.endswith("data.pkl"):
                held = held.replace(b"M\xe8\x03\x85", b"M\xe8\x7f\x85")  # the shape (1000,)
            new.writestr(info, held)
    assert "resize storage" in only(told).error


def test_a_truncated_file_keeps_what_is_whole(tmp_path: Path) -> None:
    _, whole = good("as_safetensors")
    (tmp_path / "x.safetensors").write_bytes(whole[:-60])
    file = only(tmp_path / "x.safetensors")
    states = {bool(found.error) for found in file.tensors if found.tensor.name != "ids"}
    assert states == {True, False}


def test_clean_files_give_0_and_bad_ones_1(tmp_path: Path, command: Any) -> None:
    np.save(tmp_path / "clean.npy", np.ones((3, 4), np.float16))
    status, out, _ = command("scan", tmp_path / "clean.npy")
    head, columns, row = out.splitlines()
    assert status == 0
    assert head == f"{tmp_path / 'clean.npy'}: npy, 1 tensor of floats, 12 numbers, all finite"
    assert " ".join(columns.split()) == "tensor dtype shape nan inf first min max headroom"
    assert row.split() == ["clean", "float16", "3x4", "0", "0", "1", "1", "16.0", "bits"]
    np.save(tmp_path / "bad.npy", np.asarray([1e5, 1e-9, 1.0, -np.inf]))
    status, out, _ = command("scan", tmp_path, "--as", "float16")
    assert (status, out.splitlines()[2].split()[-2:]) == (1, ["1", "1"])
    assert "beyond float16  0 in float16" in out


def test_json_is_strict_and_complete(tmp_path: Path, command: Any) -> None:
    np.save(tmp_path / "x.npy", np.asarray([[1.0, np.nan]]))
    status, out, _ = command("scan", "--json", tmp_path / "x.npy", tmp_path / "none")
    found, missing = map(json.loads, out.splitlines())
    assert found["tensors"][0]["first_bad"] == [0, 1]
    assert (status, found["tensors"][0]["nan"], found["error"]) == (2, 1, "")
    assert missing["error"] == "No such file or directory"


def test_names_from_a_file_cannot_move_the_cursor(tmp_path: Path, command: Any) -> None:
    arrays: dict[str, Any] = {"\x1b[2Ja": np.asarray([np.nan])}
    np.savez(tmp_path / "x.npz", **arrays)
    assert "\x1b" not in command("scan", tmp_path)[1]


def test_a_missing_reader_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    for form, package, extra in (("as_hdf5", "h5py", "scan"), ("as_torch", "torch", "torch")):
        path = written(form, tmp_path / form)
        monkeypatch.setitem(sys.modules, package, None)
        status, out, _ = command("scan", path)
        assert status == 2
        assert f'{package} is needed to read it: pip install "anynan[{extra}]"' in out


MEMORY = """
import resource, sys
from anynan._cli.commands import main
import anynan._apps.scan.scan, anynan._diagnosis.rules.evidence, anynan._base.escaping
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert main(["scan", sys.argv[1]]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.tier(2)
@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in KiB on Linux")
def test_a_file_larger_than_its_memory(tmp_path: Path) -> None:
    size = 1 << 29
    said = {"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    head = json.dumps(said).encode()
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + size)
    done = python("-c", MEMORY, "x.safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 50 * 1024
