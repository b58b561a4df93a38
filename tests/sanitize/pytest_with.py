"""`python -m tests.sanitize.pytest_with FILE ...`: pytest with FILE as the C extension."""

import sys
from pathlib import Path

import pytest

from tests.sanitize.__main__ import put_in_place


def main() -> None:
    """Runs it, and leaves with its code; the extension must be the one that was asked for."""
    module = Path(sys.argv[1])
    put_in_place(module)
    import kernels._native

    assert Path(kernels._native.__file__) == module, f"{kernels._native.__file__} was loaded, {module} expected"
    sys.exit(pytest.main(sys.argv[2:]))


if __name__ == "__main__":
    main()
