"""Sphinx configuration."""

from importlib.metadata import version as installed_version

project = "quotient_nets"
author = "the quotient_nets contributors"
copyright = f"2026, {author}"
release = version = installed_version("quotient-nets")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinxcontrib.bibtex",
]
exclude_patterns = ["_build", "conf.py", "**/.ipynb_checkpoints"]
html_theme = "furo"
html_title = f"quotient_nets {release}"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# docs/tutorials links to ../tutorials: py:percent scripts, executed at every build. So is the code on pages whose front
# matter says `file_format: mystnb`; what it writes goes to a temporary folder.
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_merge_streams = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600

# A method that overrides another and adds nothing to its meaning has no docstring and is not
# listed again.
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Cost", "params_style"), ("Source", "params_style")]

bibtex_bibfiles = ["references.bib"]
bibtex_default_style = "unsrt"
