"""One pool of workers for all tests of this folder."""

from collections.abc import Iterator

import pytest
import workers


@pytest.fixture(scope="session")
def pool() -> Iterator[workers.Pool]:
    found = workers.Pool(4)
    yield found
    found.close()
