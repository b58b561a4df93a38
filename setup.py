"""What pyproject.toml cannot say: the generated protos and the one C extension, both built at install."""

import shutil
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build import build

ROOT = Path(__file__).parent
PROTO_ROOT = ROOT / "protos"


class BuildProtos(Command):
    """Compiles protos/**/*.proto beside their sources; an editable install imports them from there."""

    description = "compile the protos"
    user_options: ClassVar[list[tuple[str, str, str]]] = []
    editable_mode = False
    build_lib: str | None = None

    def initialize_options(self) -> None:
        """Nothing to set."""

    def finalize_options(self) -> None:
        """Takes the build folder of the enclosing build."""
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        """Runs protoc in process."""
        from grpc_tools import protoc

        sources = sorted(str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.rglob("*.proto"))
        # The plugins stand beside the interpreter, which an isolated build does not put on PATH.
        plugins = [
            f"--plugin={name}={found}"
            for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
            if (found := shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent)))
        ]
        out = str(PROTO_ROOT)
        arguments = ["protoc", f"-I{out}", *plugins, f"--python_out={out}", f"--grpc_python_out={out}"]
        if len(plugins) == 2:
            arguments += [f"--mypy_out=quiet:{out}", f"--mypy_grpc_out=quiet:{out}"]
        if protoc.main([*arguments, *sources]) != 0:
            raise SystemExit("the protos did not compile; see the message above")

    def get_source_files(self) -> list[str]:
        """The protos, for the source distribution."""
        return [str(path.relative_to(ROOT)) for path in PROTO_ROOT.rglob("*.proto")]

    def get_outputs(self) -> list[str]:
        """Nothing outside the source tree."""
        return []

    def get_output_mapping(self) -> dict[str, str]:
        """Nothing outside the source tree."""
        return {}


class Build(build):
    """The standard build with the protos first."""

    sub_commands: ClassVar = [("build_protos", None), *build.sub_commands]


setup(
    cmdclass={"build": Build, "build_protos": BuildProtos},
    ext_modules=[
        Extension(
            "kernels._native",
            sources=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "kernels" / "cpu" / "native").glob("*.c")),
            depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "kernels" / "cpu" / "native").glob("*.h")),
            # -g0: following variables through the unrolled kernels would double the time an installation takes.
            extra_compile_args=[
                "-std=gnu11",
                "-O3",
                "-g0",
                "-fno-math-errno",
                "-Wall",
                "-Wextra",
                "-Wno-psabi",
                "-pthread",
            ],
            extra_link_args=["-pthread", "-lm"],
        )
    ],
)
