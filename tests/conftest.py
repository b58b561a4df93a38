"""How all tests run: drawn examples have no clock."""

from hypothesis import settings

settings.register_profile("flipmesh", deadline=None)
settings.load_profile("flipmesh")
