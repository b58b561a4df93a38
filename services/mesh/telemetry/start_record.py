"""What a process was started with, written once, for a later comparison of two instances.

Values of environment variables that look like secrets are withheld; so is the key that clients present.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions

from services.mesh.identity import Identity
from services.mesh.settings.paths import StatePaths, write_atomically
from services.mesh.settings.tables import Settings

WITHHELD = "(withheld)"
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|_PROXY", re.IGNORECASE)


def write_start_record(paths: StatePaths, identity: Identity, settings: Settings, arguments: Sequence[str]) -> None:
    """Writes `log/<name>.start.json`, readable by its owner only; the record of the start before is replaced."""
    record = {
        "identity": dataclasses.asdict(identity),
        "arguments": list(arguments),
        "settings": _settings(settings),
        "environment": _environment(os.environ),
        "versions": {"python": platform.python_version(), "kernel": platform.release(), **_versions()},
        "executable": sys.executable,
        "directory": os.getcwd(),  # noqa: PTH109 (a string is wanted)
    }
    text = json.dumps(record, indent=1, sort_keys=True, default=str) + "\n"
    write_atomically(paths.start_record(identity.service, identity.rank), text)


def _settings(settings: Settings) -> dict[str, object]:
    values = dataclasses.asdict(settings)
    if settings.router.api_key is not None:
        values["router"]["api_key"] = WITHHELD
    return values


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: WITHHELD if SECRET_NAME.search(name) else value for name, value in environment.items()}


def _versions() -> dict[str, str]:
    return {found.name.lower(): found.version for found in distributions()}
