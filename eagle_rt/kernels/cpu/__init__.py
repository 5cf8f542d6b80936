"""Kernels for CPUs, compiled by numba."""

import hashlib
from pathlib import Path


def drop_stale_code(folder: Path) -> None:
    """Remove the compiled code that numba keeps beside the sources of a folder, if any of these has changed since this was last
    asked. numba itself looks at a function's own file only, though its code holds that of all functions that it calls."""
    sources = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    digest, kept = hashlib.sha256(sources).hexdigest(), folder / "__pycache__" / "sources.sha256"
    try:
        if kept.exists() and kept.read_text() == digest:
            return
        for file in kept.parent.glob("*.nb[ic]"):
            file.unlink(missing_ok=True)
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(digest)
    except OSError:  # not ours to write in: numba keeps it elsewhere
        pass


drop_stale_code(Path(__file__).parent)
