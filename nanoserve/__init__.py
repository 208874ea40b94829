"""nanoserve: an LLM inference engine built day by day, and the course that builds it."""

from nanoserve import threads  # noqa: F401  # must come before torch: libgomp reads the setting
from nanoserve.generate import LLM, Completion
from nanoserve.model import load_model
from nanoserve.sampling import SamplingParams
from nanoserve.tokenizer import load_tokenizer

__all__ = ["LLM", "Completion", "SamplingParams", "load_model", "load_tokenizer"]
__version__ = "0.1.0"
