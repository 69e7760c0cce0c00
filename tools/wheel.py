"""Makes dist/brim-VERSION.tar.gz and a wheel for the installed torch, and tries the wheel out.

Usage: tools/wheel.py WORK_DIRECTORY

The wheel is built from the source distribution, so that a file missing there is noticed. Binaries
fit one minor version of torch: the wheel's version names it and its metadata requires it.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from importlib.metadata import version
from pathlib import Path

DIST = Path("dist")
TORCHS_LIBRARIES = ["libtorch*.so*", "libc10*.so*"]


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


def only(directory: Path, pattern: str) -> Path:
    (found,) = directory.glob(pattern)
    return found


def source_distribution(work: Path) -> Path:
    """Makes the archive and returns the directory it is unpacked to."""
    say("Source distribution")
    archive = work / "sdist"
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", archive, ".")
    shutil.copy(only(archive, "*.tar.gz"), DIST)
    with tarfile.open(only(archive, "*.tar.gz")) as tar:
        tar.extractall(work, filter="data")
    return only(work, "brim-*")


def tie_to_torch(pyproject: Path, minor: str) -> None:
    """Writes the torch that the wheel is built with into its version and its requirements."""
    text = pyproject.read_text()
    for pattern, replacement in (
        (r'^version = "(.*)"$', rf'version = "\1+torch{minor}"'),
        (r'"torch>=[^"]*"', f'"torch=={minor}.*"'),
    ):
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if count != 1:
            raise SystemExit(f"{pyproject} has {count} lines like {pattern}, and must have one")
    pyproject.write_text(text)


def build_wheel(source: Path, work: Path) -> Path:
    """Builds it, gives it the tag of the oldest Linux that it runs on, and moves it to dist/."""
    say("Wheel")
    pip_wheel = ["wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", work / "built"]
    run(sys.executable, "-m", "pip", *pip_wheel, source)
    built = only(work / "built", "*.whl")
    excluded = [f"--exclude={library}" for library in TORCHS_LIBRARIES]
    run(sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", work / "repaired", built)
    return Path(shutil.copy(only(work / "repaired", "*.whl"), DIST))


def try_out(wheel: Path, work: Path) -> None:
    """Installs it into an environment of its own, and uses it from Python and from C++."""
    say("Trying it out")
    environment = work / "venv"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    # torch and the other requirements lie beside the wheel as if installed there.
    packages = only(environment, "lib/python3*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not (packages / entry.name).exists() and not entry.name.startswith("brim"):
            (packages / entry.name).symlink_to(entry)
    os.environ.pop("PYTHONPATH", None)
    run(python, "-m", "pip", "install", "--quiet", "--no-index", wheel)
    run(python, "-m", "brim", "--version")
    run(environment / "bin" / "brim", "info")
    where = subprocess.run(
        [python, "-m", "brim", "--cmake-dir"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(where).is_relative_to(packages.absolute()):
        raise SystemExit(f"another brim was imported: {where}")
    consumer = work / "consumer"
    options = ["-G", "Ninja", f"-DCMAKE_PREFIX_PATH={where}", "-DCMAKE_BUILD_TYPE=Release"]
    run("cmake", "-S", "tests/package", "-B", consumer, *options)
    run("cmake", "--build", consumer)
    run(consumer / "consumer")


def main() -> None:
    work = Path(sys.argv[1])
    shutil.rmtree(work, ignore_errors=True)
    DIST.mkdir(exist_ok=True)
    source = source_distribution(work)
    tie_to_torch(source / "pyproject.toml", ".".join(version("torch").split(".")[:2]))
    wheel = build_wheel(source, work)
    try_out(wheel, work)
    say(f"Made {wheel}")


if __name__ == "__main__":
    main()
