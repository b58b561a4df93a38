"""Fixtures of the unit tests that tests on a device use as well."""

from tests.parts.conftest import generator

__all__ = ["generator"]
