"""Builds the runtime distribution: the native kernels; pyproject.toml names its other parts."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import Extension, setup

KERNELS = Path("elasticdl", "kernels", "src")  # relative: setuptools wants it so
HEADERS = [str(path) for path in sorted(KERNELS.glob("*.hpp"))]

# Contraction to fused multiply-add would make the bits depend on the machine.  No code reads errno or traps after
# arithmetic, and without them sqrt and comparisons become vector instructions, of the same bits.
COMPILE = ["-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra"]


class BuildKernels(build_ext):
    """Says what is missing before a compiler fails with words of its own."""

    def build_extensions(self) -> None:
        compiler = getattr(self.compiler, "compiler_cxx", ["c++"])[0]
        if shutil.which(compiler) is None:
            sys.exit(
                f"elasticdl2: its native kernels need a C++17 compiler, and there is no '{compiler}' here.\n"
                "  Install one (Debian, Ubuntu: apt-get install g++), or install the wheel of elasticdl2."
            )
        include = Path(sysconfig.get_path("include"))
        if not (include / "Python.h").exists():
            sys.exit(
                f"elasticdl2: its native kernels need the headers of Python, and there is no {include / 'Python.h'}.\n"
                "  Install them (Debian, Ubuntu: apt-get install python3-dev), or install the wheel of elasticdl2."
            )
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        """An editable install takes what `build_ext --inplace` has made of the same sources."""
        made = self.get_ext_filename(ext.name)
        if self.editable_mode and not any(is_older(made, source) for source in ext.sources):
            target = self.get_ext_fullpath(ext.name)
            self.mkpath(os.path.dirname(target))
            self.copy_file(made, target)
        else:
            super().build_extension(ext)


def is_older(built: str, source: str) -> bool:
    """Whether a source or a header has changed since an object was built."""
    if not os.path.exists(built):
        return True
    return os.path.getmtime(built) < max(os.path.getmtime(path) for path in (source, "setup.py", *HEADERS))


ParallelCompile("ELASTICDL_BUILD_JOBS", needs_recompile=is_older).install()
setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Pybind11Extension(
            "elasticdl.kernels._native",
            [str(path) for path in sorted(KERNELS.glob("*.cpp"))],
            cxx_std=17,
            depends=[*HEADERS, "setup.py"],
            extra_compile_args=COMPILE,
            libraries=["dl"] if sys.platform == "linux" else [],  # of its own before glibc 2.34
            extra_link_args=["-Wl,--strip-all"] if sys.platform == "linux" else [],
        )
    ],
)
