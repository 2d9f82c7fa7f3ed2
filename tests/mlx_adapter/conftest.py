"""Nothing is collected here where MLX is not installed."""

from importlib.util import find_spec

if find_spec("mlx") is None:
    collect_ignore_glob = ["*"]
