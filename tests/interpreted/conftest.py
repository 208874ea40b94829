"""Triton's own runtimes: its interpreter if TRITON_INTERPRET=1 was set, else compiled on a GPU.

Nothing here is collected if neither can run. Triton reads the variable when it is imported, so the
interpreter has a process of its own: `TRITON_INTERPRET=1 python -m pytest tests/interpreted`.
"""

import os

import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = ["test_gpu*.py"]  # these tests need a GPU
elif not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
