"""The long forms of the API's tests: more of what fits its document, and a thousand sessions opened and left."""

from __future__ import annotations

import pytest

from tests.app.test_api_fuzz import api_in_thread, fuzz


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_whatever_fits_the_document_is_answered() -> None:
    with api_in_thread() as client:
        fuzz(client, 200)
