"""Days 7 to 13: answers that a reader tried, and what the check says about each."""

import pytest
import torch

from nanoserve.course import check
from nanoserve.course.exercises import exercises_of


def told(number, name, answer):
    """The messages of the failed cases."""
    exercise = next(each for each in exercises_of(number) if each.name == name)
    return [row.message for row in check.run(exercise, answer).rows if not row.passed]


def test_append_that_grows_in_every_step_is_not_told_that_it_copies():
    def append(self, layer, k, v):
        if len(k) != 1:
            raise ValueError
        start, end = self.seq_len, self.seq_len + k.shape[2]
        if layer == 0:
            self._grow(end, k)
        self._k[layer, :, start:end], self._v[layer, :, start:end] = k[0], v[0]
        if layer == self._config.num_layers - 1:
            self.seq_len = end
        return self._k[layer : layer + 1, :, :end], self._v[layer : layer + 1, :, :end]

    (message,) = told(11, "append", append)
    assert "grows in every step" in message


def test_wrong_names_of_a_layer_are_not_told_that_biases_are_missing():
    def _layer(weights, i):
        return {n.split(".")[-2]: w for n, w in weights.items() if f"layers.{i}." in n}

    messages = told(8, "_layer", _layer)
    assert len(messages) == 5
    assert all("is missing" in message for message in messages)


def test_rounding_before_the_division_is_not_told_only_of_a_larger_temperature():
    def apply_temperature(logits, temperature):
        return logits.log_softmax(-1) / temperature

    (message,) = told(10, "apply_temperature", apply_temperature)
    assert "log_softmax" in message


def test_the_usual_shifted_mask_of_top_p_is_told_where_it_differs():
    def mask_top_p(logits, top_p):
        if top_p == 1:
            return logits
        descending, ids = logits.sort(descending=True)
        gone = descending.softmax(-1).cumsum(-1) > top_p
        gone[..., 1:], gone[..., 0] = gone[..., :-1].clone(), False
        return logits.masked_fill(gone.scatter(-1, ids, gone), -torch.inf)

    (message,) = told(10, "mask_top_p", mask_top_p)
    assert "the sum before a token equals top_p" in message


def test_stop_strings_messages_name_the_call():
    class StopStrings:
        found = False

        def __init__(self, stops):
            self.stops, self.held = stops, ""

        def add(self, piece):
            self.held += piece
            return ""

        def finish(self):
            return self.held.upper()

    assert any(message.startswith("'add 1'") for message in told(12, "StopStrings", StopStrings))


@pytest.mark.parametrize("rows", ["embedding", "row", "own token"])
def test_bytes_per_token_diagnoses_a_wrong_count(rows):
    from nanoserve.bench.decode import bytes_per_token as right

    def bytes_per_token(config, context, dtype):
        row = config.hidden_size * dtype.itemsize
        extra = {"embedding": -config.vocab_size * row, "row": row, "own token": 0}[rows]
        return right(config, context + (rows == "own token"), dtype) + extra

    part = {"embedding": "head is left out", "row": "one row", "own token": "own key"}[rows]
    assert all(part in message for message in told(13, "bytes_per_token", bytes_per_token))
