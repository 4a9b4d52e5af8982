"""Programs that run by path, ``python examples/train_cnn.py``, or by name, ``python -m examples.train_cnn``."""

import sys

sys.path.append(__path__[0])  # programs import their neighbours as by path
