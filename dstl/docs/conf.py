"""Configuration of Sphinx, which builds the site."""

from __future__ import annotations

from importlib.metadata import version as version_of

project = "DSTL for PySpark"
author = "the authors of DSTL"
release = version_of("dstl-pyspark")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "dstl.docs.references"]
exclude_patterns = ["site"]

# Pages.
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3  # as deep as links of pages lead into others
html_theme = "furo"
html_title = f"DSTL {release}"
html_show_copyright = False
html_copy_source = False

# API: what a module says of itself, in its own order.
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
