"""The documentation: pages in Markdown, and references made from the code. ``python -m dstl.docs`` builds the site."""
