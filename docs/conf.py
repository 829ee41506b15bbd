"""Sphinx configuration."""

from importlib.metadata import version as _version

project = "gradflow"
author = "The gradflow developers"
copyright = "The gradflow developers"
version = release = _version("gradflow")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["amsmath", "dollarmath", "colon_fence"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "gradflow"

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Guarantees", "returns_style")]
