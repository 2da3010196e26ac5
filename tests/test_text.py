"""What users give as an address: readable, and somewhere a request could be sent."""

from __future__ import annotations

import pytest

from soulkit.text import web_address


@pytest.mark.parametrize(
    "text", ["http://localhost:8000/v1", "https://api.example.org", "http://[::1]:80", "HTTP://x"]
)
def test_addresses(text: str) -> None:
    parts = web_address(text)
    assert parts is not None and parts.hostname


@pytest.mark.parametrize(
    "text", ["", "localhost:8000", "ftp://x", "http://", "http://x:0", "http://x:99999", "http://["]
)
def test_what_no_request_could_be_sent_to(text: str) -> None:
    assert web_address(text) is None
