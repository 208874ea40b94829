"""What all tests share."""

import os

import pytest

# Tests run side by side, one thread each: two threads that share a core wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A test that needs a backend chooses it; the choice of whoever runs the tests is not theirs.
os.environ.pop("NANOSERVE_BACKEND", None)

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a machine that runs the kernels' tests alone
    pass
else:  # on a busy or slow machine an example takes seconds, and so does drawing one
    settings.register_profile(
        "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def no_learner(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the work/ folder of whoever runs it."""
    monkeypatch.setenv("NANOSERVE_WORK", str(tmp_path_factory.mktemp("work")))
