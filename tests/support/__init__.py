"""What tests of several folders share. Imported in one way: `from tests.support.road import …`."""
