"""Tests. Without a GPU TransformerEngine is installed without its compiled modules, and PEFT fails if it finds it so."""

import sys

import torch

if not torch.cuda.is_available():
    sys.modules.setdefault("transformer_engine", None)  # not to be found; tests.te_cpu loads it all the same
