"""Settings and fixtures of all tests."""

import os

import pytest

# Tests run in parallel with one thread each: two threads on one core wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A test that needs a backend chooses it. The caller's environment must not choose another.
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
    """Each test gets an empty work folder, never the user's work/."""
    monkeypatch.setenv("NANOSERVE_WORK", str(tmp_path_factory.mktemp("work")))
