"""``python -m dstl.cli``: the same as ``dstl``."""

from dstl.cli import main

main()
