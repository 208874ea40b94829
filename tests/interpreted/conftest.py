"""Triton's runtimes: its interpreter if TRITON_INTERPRET=1 was set, else compiled on a GPU.

If neither can run, no test here is collected. Triton reads the variable when it is imported, so the
interpreter needs a separate process: `TRITON_INTERPRET=1 python -m pytest tests/interpreted`.
"""

import os

import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = ["test_card*.py"]  # tests that need a GPU
elif not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
