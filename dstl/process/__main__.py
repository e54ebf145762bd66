"""``python -m dstl.process``: see :mod:`dstl.process.program`."""

import gc
import sys
from importlib import import_module

if __name__ == "__main__":
    # Imports make hardly any garbage, and looking for it is a tenth of what they take. The program enables it again.
    gc.disable()
    sys.exit(import_module("dstl.process.program").main())
