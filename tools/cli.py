"""`flipmesh`: the command line. Each command lives in a module of its own and registers itself here."""

import argparse
import sys

from services.core.errors import ConfigurationError, MeshError
from tools import budget, control, fetch, flips, status
from tools.acceptance import run as acceptance
from tools.bench import run as bench
from tools.mesh_client import NotRunningError
from tools.oracle import run as oracle

EX_UNAVAILABLE = 69


def main() -> int:
    """Runs one command; its exit code is the answer for scripts."""
    parser = argparse.ArgumentParser(
        prog="flipmesh", description="serve a model that changes its layout while it serves"
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (status, budget, fetch, control, flips, oracle, acceptance, bench):
        command.register(subparsers)
    arguments = parser.parse_args()
    try:
        code: int = arguments.run(arguments)
    except ConfigurationError as error:
        print(f"flipmesh: {error}", file=sys.stderr)
        return 78
    except (NotRunningError, MeshError) as error:
        print(f"flipmesh: {error}", file=sys.stderr)
        return EX_UNAVAILABLE
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
