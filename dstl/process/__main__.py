"""``python -m dstl.process``: see :mod:`dstl.process.program`.

Imports are most of what a start costs: what a process has no use for is turned off before the first of them.
"""

import gc
import os
import sys
from importlib import import_module


class _WithoutPandas:
    """Finds no pandas. Arrow imports it, where it is installed, before it makes its first array."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("this process does without pandas", name=fullname)


if __name__ == "__main__":
    # Imports make hardly any garbage, and looking for it is a tenth of what they take. The program enables it again.
    gc.disable()
    sys.meta_path.insert(0, _WithoutPandas())
    # A process multiplies no matrices: numpy's threads for them spin for a while, a fifth of what the imports take.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Pydantic looks for plugins in every distribution that is installed.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    sys.exit(import_module("dstl.process.program").main())
