"""What all tests share."""

import pytest


@pytest.fixture(autouse=True)
def no_learner(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the work/ folder of whoever runs it."""
    monkeypatch.setenv("NANOSERVE_WORK", str(tmp_path_factory.mktemp("work")))
