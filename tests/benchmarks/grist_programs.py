"""The programs of GRIST, and what stands in the place of imports that a run does not need."""

import builtins
import functools
import gzip
import importlib
import importlib.abc
import importlib.machinery
import re
import shutil
import sys
import tempfile
import time
import types
import urllib.request
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np

TORCH = {
    "4": "test/nn/models/test_autoencoder", "5": "tests/test_losses", "12": "main",
    "13": "test/utils/test_softmax", "22": "My_pytorch1", "23": "ch5.3_softmax",
    "26": "0401_logistic_regression", "27": "0503_softmax_regression_cost",
    "32": "0504_softmax_regression", "33": "logistic_classification",
    "34": "softmax_classification", "37": "lab-05-1-logistic_regression", "38": "lab-09-1-xor",
    "46": "torch20_softmax", "47": "torch21_Softmax_Reg1", "51": "rbm", "53": "h02_20191644",
    "54": "h03_20191644", "56": "01_Logistic_Regression", "57": "03_softmax_cost",
    "62": "denoising_RBM", "63": "main",
}  # fmt: skip
# What has more endings was written several times by the benchmark, for each of its defects.
TENSORFLOW = {
    "1": "ghips1", "2": "command_line/run_logistic_regression", "3": "ghips9", "6": "soips1",
    "7": "soips2", "8": "soips6", "9": "soips7", "9b": "soips7_log2", "10": "soips14",
    "11": "nan_model_log", "11b": "nan_model_exp", "11c": "nan_model_truediv", "14": "v3/train",
    "15": "train", "16": "nan_model_log", "16b": "nan_model", "16c": "nan_model_truediv",
    "17": "test_toy", "18": "code_10_image", "19": "mnist", "20": "logistic_regression",
    "21": "mnist_softmax", "24": "Mnist", "25": "mnist", "28": "sc_train_l2reg",
    "28b": "sc_train_l2reg_div2", "28c": "sc_train_creg", "28d": "sc_train_creg_div2",
    "29": "temp", "30": "softmax", "31": "GAN_MNIST", "35": "ch10_04_01", "35b": "ch10_04_01_sqrt",
    "36": "ch10_04_03_Pic_10_05", "36b": "ch10_04_03_Pic_10_05_sqrt", "39": "ch10_04_04_Pic_10_06",
    "39b": "ch10_04_04_Pic_10_06_sqrt", "40": "src/ch5/bmi", "41": "src/ch5/tb-bmi",
    "42": "src/ch5/tb-bmi2", "43": "ch10_04_05_Pic_10_07", "43b": "ch10_04_05_Pic_10_07_sqrt",
    "45": "MNIST_Digit_classification_using_CNN", "45b": "MNIST_Digit_classification_using_CNN2",
    "48": "day01", "48b": "day01_2", "49": "ch10_04_06_Pic_10_08",
    "49b": "ch10_04_06_Pic_10_08_sqrt", "50": "DL_1L", "52": "5_mnist_full_connection",
    "55": "logistic_regression", "58": "test", "59": "code_06", "60": "simple_saveAndReloadModel",
    "61": "multi_layer_perceptron",
}  # fmt: skip
_IMAGES, _LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"
# What is imported, and not there: plots, and old libraries' extensions and parts.
_ABSENT = (
    "matplotlib", "seaborn", "torch_scatter", "torch_sparse", "torch_cluster", "torch_spline_conv",
    "torchvision", "torch_geometric", "sklearn", "tabulate", "tqdm", "rdflib", "plyfile", "h5py",
    "networkx", "dill", "nltk", "hyperopt", "googledrivedownloader", "google_drive_downloader",
    "PIL",
)  # fmt: skip


def path_of(grist: Path, number: str) -> Path:
    name = TORCH.get(number) or TENSORFLOW[number]
    return grist / "scripts/study_case" / f"ID_{number.rstrip('bcd')}" / f"{name}.py"


def arguments(path: Path) -> list[str]:
    """Give a program's own arguments: where its data is, if its default is a place elsewhere."""
    return ["--input", str(path.parent / "data/gridworld_8.mat")] if "ID_15" in path.parts else []


class _Stub:
    """Stand for a class or a function that is imported and not needed."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if args else None


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: object) -> Any:
        held = name.partition(".")[0] in _ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if held else None

    def create_module(self, spec: Any) -> Any:
        return MagicMock(name=spec.name, __path__=[], __spec__=spec, __name__=spec.name)

    def exec_module(self, module: Any) -> None:
        module.BaseEstimator = module.MessagePassing = _Stub


def images(grist: Path) -> tuple[np.ndarray, np.ndarray]:
    folder = grist / "scripts/study_case/data/MNIST/raw"
    raw = [gzip.decompress((folder / name).read_bytes()) for name in (_IMAGES, _LABELS)]
    pixels, labels = (np.frombuffer(x, np.uint8)[at:] for x, at in zip(raw, (16, 8), strict=True))
    return pixels.reshape(-1, 784).astype("float32") / 255, labels


def stand_in(grist: Path, *, iterations: int, seconds: float, silent: bool, torch: bool) -> None:
    """Put stubs in the place of what the programs import.

    Args:
        grist: The checkout.
        iterations: After these a program ends.
        seconds: After these as well.
        silent: Whether a bad loss ends nothing.
        torch: Whether it is a program of PyTorch; else of TensorFlow 1.
    """
    sys.path.insert(0, str(grist))
    if not torch:
        importlib.import_module("tensorflow")  # before its own imports meet a stub
    sys.meta_path.append(_Absent())
    _schedulers(grist, iterations, seconds, silent=silent)
    if torch:
        _torch(grist)
    else:
        _tensorflow(grist)


def _schedulers(grist: Path, iterations: int, seconds: float, *, silent: bool) -> None:
    """Load what the benchmark puts into the programs; it writes into a folder of its own."""
    common = importlib.import_module("scripts.utils.common_utils")

    ends, place = time.monotonic() + seconds, tempfile.mkdtemp()

    def check_time(self: Any) -> None:
        self.iter_count += 1
        self.checked = getattr(self, "checked", 0) + 1
        if self.checked >= iterations or time.monotonic() > ends:
            sys.exit(f"GRIST: ended after {self.checked} iterations")

    common.BaseScheduler.check_time = check_time
    for name in ("torch_utils", "tf_utils"):
        file = grist / "scripts/utils" / f"{name}.py"
        module: Any = types.ModuleType(f"scripts.utils.{name}")
        text = file.read_text(encoding="utf-8").replace("/data", place)
        exec(compile(text, str(file), "exec"), module.__dict__)
        kind = module.TorchScheduler if name == "torch_utils" else module.TensorFlowScheduler
        if silent:
            kind.loss_checker = kind.check_time = lambda *_, **__: None
        sys.modules[module.__name__] = module
        if name == "tf_utils":
            module.GradientSearcher.iterative_grist = functools.partial(_moved, module.CommonUtils)


def _moved(utils: Any, w: Any, dw: Any, switch_data: bool, **given: Any) -> tuple[Any, ...]:
    """Move a batch as the benchmark does, and count by array what it counts pixel by pixel."""
    kw = {"dw": dw, "change": given["change"], "delta": given["delta"], "type": given["delta_type"]}
    delta = utils.get_delta(kw)
    moved = w - delta
    if not switch_data:
        return moved, None, None, None
    assert given["update_stragety"] == "rate"  # what each program asks for
    pixels, low, high = moved[0].size, *(given["pixle_boundary"][k] for k in ("min", "max"))
    both = ((delta != 0, "update_list"), ((moved > high) | (moved < low), "clip_list"))
    shares = [((each.reshape(len(w), -1).sum(1) / pixels).tolist(), name) for each, name in both]
    counted = [[n + k for n, k in zip(x, given[name], strict=True)] for x, name in shares]
    return moved, *counted, given["useful_update_list"]


def _torch(grist: Path) -> None:
    import torch

    vision: Any = importlib.import_module("torchvision")

    class Images(torch.utils.data.Dataset[Any]):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.images, self.labels = images(grist)

        def __getitem__(self, i: int) -> tuple[Any, int]:
            return torch.from_numpy(self.images[i]).reshape(1, 28, 28), int(self.labels[i])

        def __len__(self) -> int:
            return len(self.labels)

    vision.datasets.MNIST = vision.datasets.FashionMNIST = Images

    def scatter_add(x: Any, index: Any, dim: int = 0, dim_size: int | None = None) -> Any:
        made = x.new_zeros(dim_size or int(index.max()) + 1, *x.shape[1:])
        return made.index_add(dim, index, x)

    scatter: Any = importlib.import_module("torch_scatter")
    scatter.scatter_add = scatter_add
    pixels, labels = images(grist)
    held = types.SimpleNamespace(data=pixels.astype("float64") * 255, target=labels.astype(str))
    data: Any = importlib.import_module("sklearn.datasets")
    data.fetch_openml = lambda *_, **__: held


class _Set:
    """Be a part of what TensorFlow's tutorials read."""

    def __init__(self, grist: Path, *, one_hot: bool, reshape: bool) -> None:
        self.images, labels = images(grist)
        self.images = self.images if reshape else self.images.reshape(-1, 28, 28, 1)
        self.labels = np.eye(10)[labels] if one_hot else labels
        self.num_examples, self._at = len(labels), 0

    def next_batch(self, size: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        self._at = 0 if self._at + size > self.num_examples else self._at
        rows = slice(self._at, self._at + size)
        self._at += size
        return self.images[rows].copy(), self.labels[rows].copy()


def _flatten(x: Any) -> Any:
    import tensorflow.compat.v1 as tf

    return tf.reshape(x, [-1, int(np.prod(x.shape[1:]))])


def _dense(x: Any, size: int, activation: Any = None, kernel_initializer: Any = None) -> Any:
    import tensorflow.compat.v1 as tf

    w = tf.Variable((kernel_initializer or tf.glorot_uniform_initializer())([x.shape[-1], size]))
    made = tf.matmul(x, w) + tf.Variable(tf.zeros([size]))
    return made if activation is None else activation(made)


def _tensorflow(grist: Path) -> None:
    """Have the programs import ``tensorflow.compat.v1`` as ``tensorflow``."""
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    tf.train.write_graph = lambda *_, **__: None

    def read_data_sets(*_: Any, one_hot: bool = False, reshape: bool = True, **__: Any) -> Any:
        parts = [_Set(grist, one_hot=one_hot, reshape=reshape) for _ in range(3)]
        return types.SimpleNamespace(train=parts[0], validation=parts[1], test=parts[2])

    def fetched(url: str, path: str) -> tuple[str, None]:
        name = _IMAGES if "images" in url else _LABELS
        shutil.copy(grist / "scripts/study_case/data/MNIST/raw" / name, path)
        return path, None

    def loaded(*_: Any) -> Any:
        pixels, labels = images(grist)
        return ((pixels.reshape(-1, 28, 28) * 255, labels),) * 2

    # What programs download is in the checkout, and what has gone since TensorFlow 1 is short.
    urllib.request.urlretrieve = fetched  # type: ignore[assignment]
    tf.keras.datasets.mnist.load_data = loaded
    shuffled: Any = importlib.import_module("sklearn.utils")
    shuffled.shuffle = lambda *arrays: arrays
    helpers: Any = importlib.import_module("scripts.study_case.ID_2.utils.utilities")
    helpers.gen_batches = lambda x, size: (x[i : i + size] for i in range(0, len(x), size))
    tf.layers = types.SimpleNamespace(flatten=_flatten, dense=_dense)
    tf.flatten, shrink = _flatten, lambda scale: lambda w: scale * tf.nn.l2_loss(w)
    tf.contrib = types.SimpleNamespace(layers=types.SimpleNamespace(l2_regularizer=shrink))
    data = types.SimpleNamespace(read_data_sets=read_data_sets)
    tutorials = types.SimpleNamespace(input_data=data)
    real = builtins.__import__

    def imported(name: str, scope: Any = None, *rest: Any, **named: Any) -> Any:
        file = str((scope or {}).get("__file__", ""))
        if not re.match(r"tensorflow(\.|$)", name) or not file.startswith(str(grist)):
            return real(name, scope, *rest, **named)
        if "input_data" in name:
            return data
        return tutorials if "mnist" in name else MagicMock() if "python" in name else tf

    builtins.__import__ = imported  # type: ignore[assignment]
