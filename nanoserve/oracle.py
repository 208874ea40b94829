"""The oracle: transformers on the same folder. Tests compare the engine with it."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from nanoserve.fetch import resolve


@dataclass(frozen=True)
class Activation:
    """The first input and the output of a module, captured by a hook."""

    input: torch.Tensor
    output: torch.Tensor


class Oracle:
    """A reference model: logits, greedy generation and activations."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model.eval()

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [batch, seq] -> logits [batch, seq, vocab]."""
        return self.model(ids, use_cache=False).logits

    @torch.no_grad()
    def generate(
        self,
        ids: Sequence[int],
        max_tokens: int = 16,
        use_cache: bool = True,
        on_token: Callable[[int], None] | None = None,
        stop: bool = True,
    ) -> list[int]:
        """Return the greedy continuation of a prompt: at most max_tokens ids, end token included.

        Calls on_token with each id. With stop=False, generation continues after an end token.
        """
        prompt = torch.tensor([list(ids)], device=self.model.device)
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            use_cache=use_cache,
            streamer=None if on_token is None else _Streamer(on_token),
            pad_token_id=0,  # only to avoid a warning: one sequence needs no padding
            **({} if stop else {"eos_token_id": self.model.config.vocab_size}),  # no such token
        )
        return out[0, prompt.shape[1] :].tolist()

    @torch.no_grad()
    def capture(self, ids: torch.Tensor, names: Iterable[str]) -> dict[str, Activation]:
        """Run ids [batch, seq] and return the activations of modules, by names such as
        "model.layers.0.mlp". Raises ValueError for a name that the model lacks."""
        modules = dict(self.model.named_modules())
        seen: dict[str, Activation] = {}
        with ExitStack() as hooks:
            for name in names:
                if name not in modules:
                    raise ValueError(f"the oracle has no module {name!r}")

                def record(module, args, kwargs, output, name=name) -> None:
                    x = args[0] if args else kwargs["hidden_states"]
                    y = output[0] if isinstance(output, tuple) else output
                    seen[name] = Activation(x, y)

                hook = modules[name].register_forward_hook(record, with_kwargs=True)
                hooks.callback(hook.remove)
            self.model(ids, use_cache=False)
        return seen

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every weight by its Hugging Face name."""
        return self.model.state_dict()


class _Streamer:
    """A streamer for transformers, which calls put() with the prompt, then with each token."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self._on_token, self._prompt_seen = on_token, False

    def put(self, ids: torch.Tensor) -> None:
        if self._prompt_seen:
            self._on_token(int(ids))
        self._prompt_seen = True

    def end(self) -> None:
        pass


def load_oracle(
    source: str | Path = "smollm2",
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Oracle:
    """Load a model with transformers; source, dtype and device as for load_model.

    Raises ValueError for an unknown source.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(resolve(source), dtype=dtype)
    return Oracle(model.to(device))
