"""How the documentation is built: ``make docs``."""

import anynan
from anynan._diagnosis import causes, vocabulary

project = "anynan"
author = "anynan contributors"
copyright = "2026, anynan contributors"  # noqa: A001
version = release = anynan.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = []
html_theme = "furo"
html_extra_path = ["pictures/report.html"]  # shown in a frame
html_static_path = ["style"]
html_css_files = ["wide.css"]
html_title = f"anynan {version}"

# No intersphinx: the build runs where there is no network, and may not depend on one. Names
# of other packages are therefore not links, and only they may stay unresolved.
nitpicky = True
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(torch|jax|mlx|numpy|np|os|transformers|collections|typing|types|contextlib|anynan\.\w+)\..*",
    ),
]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]  # the glossary

# The public names live in rooms of their own; to a reader they are anynan.Event and so on.
for _name in anynan.__all__:
    getattr(anynan, _name).__module__ = "anynan"


def fill_in(_app: object, docname: str, source: list[str]) -> None:
    """Write the tables of causes and of operations as the code has them."""
    if docname == "causes":
        for name, table in (("causes", causes.table), ("vocabulary", vocabulary.table)):
            source[0] = source[0].replace(f"<!-- anynan._diagnosis.{name}.table() -->", table())


def setup(app):  # noqa: ANN001, ANN201
    app.connect("source-read", fill_in)
