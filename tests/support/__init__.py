"""Helpers for tests of several folders. Import them as `from tests.support.road import …`."""
