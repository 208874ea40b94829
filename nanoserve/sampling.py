"""From logits to the next token: penalties, temperature, top-k, top-p, min-p, one draw.

Logits are float32 [..., vocab]. A mask sets removed tokens to -inf and leaves the others unchanged.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch

HUGE = sys.float_info.max


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one sequence. A wrong type or range is a ValueError that names the field."""

    max_tokens: int = 16
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1 keeps all
    min_p: float = 0.0  # 0 keeps all
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | Sequence[str] = ()  # one string or several, kept as a tuple
    seed: int | None = None
    logprobs: int | None = None  # how many alternatives to report beside the token's own

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        _require(self, "max_tokens", Integral, 1, math.inf, "an integer of at least 1")
        _require(self, "temperature", Real, 0, HUGE, "a finite number of at least 0 (greedy)")
        _require(self, "top_k", Integral, 0, math.inf, "an integer of at least 0 (off)")
        _require(self, "top_p", Real, 0, 1, "a number from 0 to 1 (off)")
        _require(self, "min_p", Real, 0, 1, "a number from 0 (off) to 1")
        _require(self, "repetition_penalty", Real, math.ulp(0), HUGE, "a finite number above 0")
        _require(self, "presence_penalty", Real, -2, 2, "a number from -2 to 2")
        _require(self, "frequency_penalty", Real, -2, 2, "a number from -2 to 2")
        if not (isinstance(stop, list | tuple) and all(isinstance(s, str) and s for s in stop)):
            allowed = "a non-empty string, or a list or tuple of them"
            raise ValueError(f"stop must be {allowed}, got {self.stop!r}")
        if self.seed is not None:
            _require(self, "seed", Integral, 0, 2**64 - 1, "None or an integer from 0 to 2**64 - 1")
        if self.logprobs is not None:
            _require(self, "logprobs", Integral, 0, 20, "None or an integer from 0 to 20")
        object.__setattr__(self, "stop", tuple(stop))


@dataclass(frozen=True)
class Sample:
    """One chosen token. Logprobs are the model's: before penalties, temperature and masks.

    `logprob` and `top` are None unless SamplingParams.logprobs is set. `top` maps the ids of the
    most probable tokens to their logprobs, best first; the chosen token may be absent from it.
    """

    token_id: int
    logprob: float | None = None
    top: dict[int, float] | None = None


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    generator: torch.Generator | None = None,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
) -> Sample:
    """Choose the token after prompt_ids + output_ids, from the logits [vocab] of the last position.

    Temperature 0 takes the largest logit after penalties; the lowest id wins a tie. A seed needs
    one generator of make_generator(seed) for the whole sequence. Raises ValueError if the generator
    is missing, if logits has another shape, and if the largest logit is not finite.
    """
    if params.temperature > 0 and params.seed is not None and generator is None:
        raise ValueError(f"seed {params.seed} needs a generator: pass make_generator(seed)")
    if logits.ndim != 1:
        raise ValueError(f"logits must be [vocab], got shape {list(logits.shape)}")
    raw = logits.float()
    scores = apply_penalties(raw, prompt_ids, output_ids, params)
    peak, best = scores.max(dim=-1)
    if not math.isfinite(peak):
        raise ValueError(f"the largest logit is {peak.item()}: nothing to sample from")
    token = int(best) if params.temperature == 0 else draw(distribution(scores, params), generator)
    if params.logprobs is None:
        return Sample(token)
    logprobs = torch.log_softmax(raw, dim=-1)  # [vocab]
    top = logprobs.topk(min(params.logprobs, len(logprobs)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return Sample(token, logprobs[token].item(), dict(pairs))


def apply_penalties(
    logits: torch.Tensor,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    params: SamplingParams,
) -> torch.Tensor:
    """Make used tokens less likely: [..., vocab] -> [..., vocab].

    Repetition (Keskar et al. 2019, section 4.1) divides the positive logits of all tokens in the
    prompt or the output, and multiplies the negative ones. Presence is subtracted once from each
    token in the output, frequency once for each time that the token occurs there.
    """
    repetition, presence = params.repetition_penalty, params.presence_penalty
    if (repetition, presence, params.frequency_penalty) == (1, 0, 0):
        return logits
    uses = _count(output_ids, logits)  # [vocab]
    seen = uses + _count(prompt_ids, logits) > 0
    scaled = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(seen, scaled, logits)
    return logits - presence * (uses > 0) - params.frequency_penalty * uses


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The probabilities a draw uses, [..., vocab]: temperature, top-k, top-p, min-p, softmax."""
    logits = apply_temperature(logits, params.temperature)
    if params.top_k > 0:
        logits = mask_top_k(logits, params.top_k)
    if params.top_p < 1:
        logits = mask_top_p(logits, params.top_p)
    if params.min_p > 0:
        logits = mask_min_p(logits, params.min_p)
    return torch.softmax(logits, dim=-1)


def apply_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide logits [..., vocab] by a temperature above 0: below 1 sharpens, above 1 flattens.

    The largest logit is subtracted first: no probability changes, and nothing overflows to +inf.
    Computes in float64, because float32 would round a temperature of 1e-50 to 0.
    """
    shifted = logits.double() - logits.amax(-1, keepdim=True)
    return (shifted / temperature).float()


def mask_top_k(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Keep the top_k largest logits, and all that equal the smallest of these; 0 keeps all."""
    if top_k == 0:
        return logits
    last = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]  # [..., 1]
    return logits.masked_fill(logits < last, -torch.inf)


def mask_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest tokens whose probabilities reach top_p (Holtzman et al. 2020, section 3.1).

    Sums probabilities from the smallest up, and removes tokens while the sum is at most 1 - top_p.
    The most probable token always stays.
    """
    ascending, ids = logits.sort(dim=-1)
    tail = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    tail[..., -1] = False
    return logits.masked_fill(tail.scatter(-1, ids, tail), -torch.inf)


def mask_min_p(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    """Keep tokens at least min_p times as probable as the best (Nguyen et al. 2024, section 3)."""
    probs = torch.softmax(logits, dim=-1)
    return logits.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)


def draw(probs: torch.Tensor, generator: torch.Generator | None = None) -> int:
    """Draw one id from probs [vocab] with one uniform number: the first id whose running sum
    exceeds the number. Never draws an id of probability 0. Default: torch's global generator."""
    sums = probs.double().cumsum(dim=-1)  # [vocab]; in float32 the rounding would favour some ids
    device = probs.device if generator is None else generator.device
    uniform = torch.rand((), dtype=torch.float64, device=device, generator=generator)
    return int(torch.searchsorted(sums, uniform.to(sums.device) * sums[-1], right=True))


def make_generator(seed: int | None, device: str | torch.device = "cpu") -> torch.Generator | None:
    """A generator that starts from `seed`; None, for torch's global generator, if seed is None.

    A generator on the CPU draws the same numbers for logits on every device.
    """
    return None if seed is None else torch.Generator(device).manual_seed(seed)


def _count(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """How often each id of the vocabulary occurs in ids: int64 [vocab]."""
    ids = torch.as_tensor(ids, dtype=torch.long, device=logits.device)
    return torch.bincount(ids, minlength=logits.shape[-1])


def _require(
    params: SamplingParams, name: str, kind: type, low: float, high: float, allowed: str
) -> None:
    """Check that a field is an Integral or Real from low to high, and store it as int or float.

    NumPy's numbers pass; bool and NaN do not. Raises ValueError.
    """
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    if type(value) not in (int, float):
        plain = int(value) if isinstance(value, Integral) else float(value)
        object.__setattr__(params, name, plain)
