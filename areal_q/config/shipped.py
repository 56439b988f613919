"""The configurations that come with the program, found by name: `quickstart`, `papers/qurl`."""

from pathlib import Path

from areal_q.decode_errors import suggestion
from areal_q.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]


def directory() -> Path:
    """Returns the directory that holds them: in the package, where a wheel has them, or beside it in a
    clone."""
    packaged = _PACKAGE / "configs"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "configs"


def names() -> list[str]:
    files = directory().rglob("*.toml")
    return sorted(path.relative_to(directory()).with_suffix("").as_posix() for path in files)


def find(path: Path) -> Path:
    """Returns `path`, or the shipped configuration that is meant by it. Raises ConfigError with their names.

    Example: `quickstart` and `configs/quickstart.toml` are the same, unless files of these names are there.
    """
    if path.exists():
        return path
    if path.name == "config.toml":
        raise ConfigError(f"{path.parent}: there is no run: it has no config.toml")
    name = path.as_posix().removeprefix("configs/").removesuffix(".toml")
    if name in names():
        return directory() / f"{name}.toml"
    near = suggestion(name, names())
    raise ConfigError(
        f"{path}: no such file; {f'{near} ' if near else ''}Configurations that come with areal-q, by "
        f"name: {', '.join(names())} (in {directory()})"
    )
