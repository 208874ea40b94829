"""A state machine: requests arrive, end and are aborted in any order, in pools of any size."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanoserve import SamplingParams
from nanoserve import cache as cache_module
from nanoserve.cache import KVPool, chained_hash
from nanoserve.engine import Engine
from nanoserve.engine import engine as module
from tests.engine.test_engine import alone, assert_same_tokens, check_blocks, prompt_of, tiny

SYSTEM = prompt_of(24, 77)


class Requests(RuleBasedStateMachine):
    """Adds, aborts and steps; at the end every request has the tokens that it gets alone.

    Prompts begin with equal tokens. `bits` keeps that many values of the hash of a block: with 0
    all hashes are equal.
    """

    @initialize(
        blocks=st.integers(1, 12),
        size=st.integers(1, 9),
        seqs=st.integers(1, 6),
        budget=st.sampled_from([1, 2, 5, 16, 200]),
        sharing=st.booleans(),
        bits=st.sampled_from([-1, -1, 1, 0]),
    )
    def start(self, blocks, size, seqs, budget, sharing, bits):
        cache_module.chained_hash = lambda *block: chained_hash(*block) & bits
        pool, module.KVPool = module.KVPool, lambda *args: KVPool(*args, poison=True)
        try:
            self.engine = Engine(tiny(), None, blocks, size, seqs, budget, sharing)
        finally:
            module.KVPool = pool
        self.slots = blocks * size
        self.requests, self.tokens, self.ended, self.aborted = {}, {}, {}, set()
        self.idle = 0

    @rule(
        length=st.integers(1, 40),
        seed=st.integers(0, 3),
        max_tokens=st.integers(1, 20),
        sampled=st.booleans(),
        prefix=st.sampled_from([0, 0, 3, 8, 9, 16, 24]),
    )
    def add(self, length, seed, max_tokens, sampled, prefix):
        prompt = (SYSTEM[:prefix] + prompt_of(40, seed))[:length]
        options = {"temperature": 0.8, "seed": seed, "frequency_penalty": 0.5} if sampled else {}
        params = SamplingParams(max_tokens=max_tokens, **options)
        if length + max_tokens > self.slots:
            try:
                self.engine.add(prompt, params)
            except ValueError:
                return
            raise AssertionError("a request larger than the pool was accepted")
        name = self.engine.add(prompt, params)
        self.requests[name], self.tokens[name] = (prompt, params), []

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 99))
    def abort(self, which):
        name = list(self.requests)[which % len(self.requests)]
        live = name not in self.ended and name not in self.aborted
        assert self.engine.abort(name) is live
        self.aborted |= {name} if live else set()

    @rule(times=st.integers(1, 5))
    def step(self, times):
        for _ in range(times):
            self.one_step()

    def one_step(self):
        before = sum(s.cache.seq_len for s in self.engine.scheduler.running)
        seen = set()
        for output in self.engine.step():
            name = output.request_id
            assert name not in self.ended and name not in seen
            seen.add(name)
            if output.finish_reason == "abort":
                assert name in self.aborted
            else:
                assert name not in self.aborted
                self.tokens[name].append(output.token_id)
            if output.finish_reason is not None:
                self.ended[name] = output.finish_reason
        check_blocks(self.engine)
        after = sum(s.cache.seq_len for s in self.engine.scheduler.running)
        return bool(seen) or after != before

    @invariant()
    def blocks_are_accounted_for(self):
        if hasattr(self, "engine"):
            check_blocks(self.engine)

    def teardown(self):
        try:
            self.to_the_end()
        finally:
            cache_module.chained_hash = chained_hash

    def to_the_end(self):
        if not hasattr(self, "engine"):
            return
        # each step computes a token or more; what is computed again is bounded too
        work = 40 + sum(
            (len(prompt) + params.max_tokens) * (params.max_tokens + 1)
            for prompt, params in self.requests.values()
        )
        for _ in range(work):
            if not self.engine.has_work:
                break
            self.one_step()
        assert not self.engine.has_work
        assert self.engine.num_free_blocks == self.engine.num_blocks
        assert self.ended.keys() == self.requests.keys()
        for name, (prompt, params) in self.requests.items():
            expected = known(tuple(prompt), params)
            if self.ended[name] == "abort":
                expected = expected[: len(self.tokens[name])]
            else:
                last = expected[-1] in tiny().config.eos_ids
                assert self.ended[name] == ("stop" if last else "length")
            assert_same_tokens(tiny(), prompt, self.tokens[name], expected)


def known(prompt, params, memory={}):  # noqa: B006  # one memory for all examples
    """The tokens of a request alone; each is computed once."""
    key = (prompt, params)
    if key not in memory:
        memory[key] = alone(tiny(), list(prompt), params)
    return memory[key]


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
