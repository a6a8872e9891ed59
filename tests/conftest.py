"""Fixtures of all tests: golden files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

collect_ignore = ["cases"]  # programs of their own, which import their neighbours
GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files instead of comparing")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture
def golden(update_golden: bool) -> Callable[[str, str], None]:
    """Compare a text with ``tests/golden/NAME``; ``--update-golden`` writes it."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if update_golden:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run pytest with --update-golden and read what it writes"
        assert text == path.read_text(encoding="utf-8"), f"{path.name} differs: run pytest with --update-golden"

    return check
