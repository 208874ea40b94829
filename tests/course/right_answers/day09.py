"""Day 9: right answers to `generate_tokens`, in several styles."""

import torch

from nanoserve.generate import next_logits
from nanoserve.sampling import Sample


def while_loop(model, prompt_ids, params, cache=None, eos_ids=()):
    ids, made = prompt_ids, 0
    while made < params.max_tokens and len(ids) <= model.config.context:
        token = next_logits(model, ids).argmax().item()
        made += 1
        yield Sample(token_id=token)
        if token in eos_ids:
            break
        ids = [*ids, token]


def the_whole_forward(model, prompt_ids, params, cache=None, eos_ids=()):
    """Runs the whole model and reads the last row itself."""
    ids = torch.tensor([prompt_ids])
    for _ in range(params.max_tokens):
        if ids.shape[1] > model.config.context:
            return
        token = int(model(ids)[:, -1].argmax())
        yield Sample(token)
        if token in eos_ids:
            return
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


class _Iterator:
    """An iterator written out, with no `yield`."""

    def __init__(self, model, ids, left, ends):
        self.model, self.ids, self.left, self.ends = model, ids, left, ends

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left or len(self.ids) > self.model.config.context:
            raise StopIteration
        logits = next_logits(self.model, self.ids).tolist()
        token = max(range(len(logits)), key=logits.__getitem__)
        self.ids.append(token)
        self.left = 0 if token in self.ends else self.left - 1
        return Sample(token)


def an_iterator(model, prompt_ids, params, cache=None, eos_ids=()):
    return _Iterator(model, list(prompt_ids), params.max_tokens, eos_ids)


def recursive(model, prompt_ids, params, cache=None, eos_ids=()):
    def go_on(ids, left):
        if left == 0 or len(ids) > model.config.context:
            return
        token = int(torch.topk(next_logits(model, ids), 1).indices)
        yield Sample(token)
        if token not in eos_ids:
            yield from go_on((*ids, token), left - 1)

    yield from go_on(prompt_ids, params.max_tokens)


RIGHT = {"generate_tokens": (while_loop, the_whole_forward, an_iterator, recursive)}
