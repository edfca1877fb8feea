"""The default text: the source files of the running Python's standard library.

It is on every machine that can run this project, needs no network and is real text (about 10 MB), so that a
first run learns something. One document a file. Which files go to validation is decided by a hash of the
file's relative path, so the split does not change when other files come or go.
"""

import hashlib
import os
import sysconfig
from pathlib import Path

from datasets import Dataset

TRAIN = "train"
VALIDATION = "validation"
SPLITS = (TRAIN, VALIDATION)
VALIDATION_ONE_IN = 10
SHUFFLE_SEED = 0

# Tests are repetitive and large; encodings and pydoc_data are tables; the others are applications or packages.
_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "encodings", "pydoc_data"}
)


def _stable_hash(text: str) -> int:
    """The same number in each process and Python version (the built-in ``hash`` is salted)."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def stdlib_folder() -> Path:
    """The running Python's standard library; in a virtual environment the base interpreter's."""
    return Path(sysconfig.get_path("stdlib"))


def split_of(relative_path: str) -> str:
    """The split that a file belongs to: "validation" for about one in ten, else "train"."""
    return VALIDATION if _stable_hash(relative_path) % VALIDATION_ONE_IN == 0 else TRAIN


def corpus_files(split: str, root: str | Path | None = None) -> list[Path]:
    """The files of one split, sorted by relative path.

    Args:
        split: "train" or "validation".
        root: folder to search for ``*.py``; by default the running Python's standard library.

    Raises:
        ValueError: the split is unknown, the folder is missing or it gives no files for the split.
    """
    if split not in SPLITS:
        raise ValueError(f"the standard-library corpus has the splits {' and '.join(SPLITS)}, not {split!r}")
    root = stdlib_folder() if root is None else Path(root)
    if not root.is_dir():
        raise ValueError(f"no folder {str(root)!r} to read Python sources from; correct the path")
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED_FOLDERS]  # not walked at all
        names += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    names.sort()
    chosen = [root / name for name in names if split_of(name) == split and (root / name).is_file()]
    if not chosen:
        raise ValueError(
            f"{str(root)!r} holds no Python sources for the {split} split ({len(names)} files in all); "
            "point training.dataset at a folder of text instead"
        )
    return chosen


def load_corpus(split: str, root: str | Path | None = None) -> Dataset:
    """The documents of one split: a map-style dataset with the column "text", in a fixed shuffled order.

    The order is the same in each run and process; it lets the first steps see varied packages instead of one
    folder after another. Arguments and errors are those of :func:`corpus_files`. Bytes that are not UTF-8
    become U+FFFD; empty files are left out.
    """
    root = stdlib_folder() if root is None else Path(root)
    files = corpus_files(split, root)
    files.sort(key=lambda path: _stable_hash(f"{SHUFFLE_SEED}:{path.relative_to(root).as_posix()}"))
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in files)
    return Dataset.from_dict({"text": [text for text in texts if text.strip()]})
