"""The site's settings for Sphinx: `make docs` builds it into docs/_build/html."""

from __future__ import annotations

from paragrad.version import __version__

project = "paragrad"
author = "The paragrad authors"
project_copyright = "The paragrad authors"
version = __version__
release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

# ---- Markdown -------------------------------------------------------------------------------
myst_heading_anchors = 4

smartquotes = False
# single backticks in docstrings are code
default_role = "code"

# ---- the reference of the API ---------------------------------------------------------------
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 80

# ---- the look -------------------------------------------------------------------------------
html_theme = "furo"
html_title = f"paragrad {__version__}"
html_static_path = ["_static"]
html_css_files = ["paragrad.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
