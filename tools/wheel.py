"""Makes brim-VERSION.tar.gz and a wheel for the installed torch, and tries the wheel out.

The wheel is built from the source distribution, so that a file missing there is noticed. Binaries
fit one minor version of torch: the wheel's version names it and its metadata requires it.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

TORCHS_LIBRARIES = ["libtorch*.so*", "libc10*.so*"]
NOT_IN_THE_ARCHIVE = re.compile(r"\.|Dockerfile$")  # as sdist.exclude of pyproject.toml says

# Without a CUDA device brim does not load the library. All of its symbols are looked up here.
LOAD_CUDA_LIBRARY = """
import ctypes, os
import brim, brim.cli.info
ctypes.CDLL(os.path.join(os.path.dirname(brim.__file__), "lib", "libbrim_cuda.so"), os.RTLD_NOW)
operators = brim.cli.info._kernels()["cuda"]
print("libbrim_cuda loads, and has kernels for", operators, "operators")
assert operators > 0
"""


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def run(*command: str | Path) -> None:
    if subprocess.run(command).returncode != 0:
        raise SystemExit(f"this command failed: {' '.join(map(str, command))}")


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def only(directory: Path, pattern: str) -> Path:
    (found,) = directory.glob(pattern)
    return found


def expect_same(what: str, found: set[str], expected: set[str]) -> None:
    if found != expected:
        raise SystemExit(
            f"{what}: {sorted(found - expected)} should not be there, "
            f"and {sorted(expected - found)} should"
        )


def source_distribution(work: Path, dist: Path) -> Path:
    """Makes the archive and returns the directory it is unpacked to."""
    say("Source distribution")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", work / "sdist", ".")
    archive = only(work / "sdist", "*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(work, filter="data")
    source = only(work, "brim-*")
    if Path(".git").exists():
        tracked = output("git", "ls-files").splitlines()
        found = {str(file.relative_to(source)) for file in source.rglob("*") if file.is_file()}
        expected = {file for file in tracked if not NOT_IN_THE_ARCHIVE.match(file)}
        expect_same("files of the archive", found, expected | {"PKG-INFO"})
    shutil.copy(archive, dist)
    return source


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


def build_wheel(source: Path, work: Path, cuda: bool) -> Path:
    """Builds it, and gives it the tag of the oldest Linux that it runs on."""
    say(f"Wheel, {'with' if cuda else 'without'} libbrim_cuda")
    os.environ.setdefault("CUDAARCHS", "all-major")  # not only the GPU that is here
    settings = {
        "build-dir": (work / "cmake").absolute(),  # the same for every run, for ccache's sake
        "cmake.define.BRIM_CUDA": "ON" if cuda else "OFF",
    }
    # No cache: pip would take the wheel of an earlier run.
    options = ["--no-build-isolation", "--no-cache-dir", "--no-deps", "--wheel-dir", work / "built"]
    options += [f"--config-settings={name}={value}" for name, value in settings.items()]
    run(sys.executable, "-m", "pip", "wheel", *options, source)
    built = only(work / "built", "*.whl")
    excluded = [f"--exclude={library}" for library in TORCHS_LIBRARIES]
    run(sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", work / "repaired", built)
    return only(work / "repaired", "*.whl")


def check_libraries(wheel: Path, work: Path, cuda: bool) -> None:
    """Only brim's own, which find others from where they lie and know no path of this machine."""
    content = work / "content"
    zipfile.ZipFile(wheel).extractall(content)
    found = {str(file.relative_to(content)) for file in content.rglob("*.so*")}
    expected = {f"brim/_C{sysconfig.get_config_var('EXT_SUFFIX')}", "brim/lib/libbrim.so"}
    expect_same("libraries", found, expected | ({"brim/lib/libbrim_cuda.so"} if cuda else set()))
    for library in sorted(found):
        path = output("patchelf", "--print-rpath", content / library)
        print(f"{library} looks in {path}")
        if not all(entry.startswith("$ORIGIN") for entry in path.split(":")):
            raise SystemExit(f"{library} looks for libraries outside of the environment: {path}")


def environment_with(wheel: Path, work: Path) -> Path:
    """Installs it into an environment of its own, whose interpreter is returned."""
    environment = work / "venv"
    venv.create(environment, with_pip=True)
    python = environment.absolute() / "bin" / "python"
    # torch and the other requirements lie beside the wheel as if installed there.
    packages = only(environment, "lib/python3*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not (packages / entry.name).exists() and not entry.name.startswith("brim"):
            (packages / entry.name).symlink_to(entry)
    begin = time.monotonic()
    run(python, "-m", "pip", "install", "--quiet", "--no-index", wheel)
    print(f"pip install took {time.monotonic() - begin:.1f} s")
    return python


def try_out(python: Path, work: Path, cuda: bool) -> None:
    """Uses the installed wheel from Python, from the command line and from a C++ program."""
    run(python, "-m", "brim", "--version")
    run(python.with_name("brim"), "info")
    if cuda:
        run(python, "-c", LOAD_CUDA_LIBRARY)
    where = output(python, "-m", "brim", "--cmake-dir")
    if not Path(where).is_relative_to(python.parents[1]):
        raise SystemExit(f"another brim was imported: {where}")
    consumer = work / "consumer"
    options = ["-G", "Ninja", f"-DCMAKE_PREFIX_PATH={where}", "-DCMAKE_BUILD_TYPE=Release"]
    run("cmake", "-S", "tests/package", "-B", consumer, *options)
    run("cmake", "--build", consumer)
    run(consumer / "consumer")


def try_wheels_of_other_torches(python: Path, wheel: Path, work: Path, dist: Path) -> None:
    """Those in `dist` from earlier runs say in one sentence that this torch is not theirs."""
    mine, tags = wheel.name.split("-", 2)[1:]
    for other in sorted(dist.glob(f"brim-*-{tags}")):
        if other.name.split("-")[1] == mine:
            continue
        say(f"Importing {other.name} with this torch")
        place = work / other.stem
        zipfile.ZipFile(other).extractall(place)
        environment = {**os.environ, "PYTHONPATH": str(place)}
        done = subprocess.run(
            [python, "-c", "import brim"], env=environment, capture_output=True, text=True
        )
        last = done.stderr.strip().splitlines()[-1:]
        if done.returncode == 0 or not last[0].startswith("ImportError: brim was built for torch"):
            raise SystemExit(f"{other} should have refused this torch, and said: {done.stderr}")
        print(*last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", action="store_true", help="with libbrim_cuda and its kernels")
    parser.add_argument("--dist", type=Path, default=Path("dist"), help="directory of the result")
    parser.add_argument("work", type=Path, help="directory for intermediate files, made anew")
    arguments = parser.parse_args()
    work, dist, cuda = arguments.work, arguments.dist, arguments.cuda
    shutil.rmtree(work, ignore_errors=True)
    dist.mkdir(exist_ok=True)
    os.environ.pop("PYTHONPATH", None)  # else another brim might be imported

    source = source_distribution(work, dist)
    tie_to_torch(source / "pyproject.toml", ".".join(version("torch").split(".")[:2]))
    wheel = build_wheel(source, work, cuda)
    say("Trying it out")
    run(sys.executable, "-m", "twine", "check", "--strict", *dist.glob("*.tar.gz"), wheel)
    check_libraries(wheel, work, cuda)
    python = environment_with(wheel, work)
    try_out(python, work, cuda)
    try_wheels_of_other_torches(python, wheel, work, dist)
    say(f"Made {shutil.copy(wheel, dist)}")


if __name__ == "__main__":
    main()
