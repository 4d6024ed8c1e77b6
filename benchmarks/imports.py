"""Time that importing parts of jaxformer takes, beside that of what they are built on.

    python benchmarks/imports.py

A part is imported with all modules in it, each time in a process of its own, and the processes of all imports take
turns. Times are processor time (user and system), which waits for nobody; the least of all turns counts.
"""

import argparse
import os
import resource
import subprocess
import sys
from importlib import import_module
from pkgutil import iter_modules

import record

PARTS = {
    "jaxformer.ops": ("jax", "jax.numpy"),
    "jaxformer.nn": ("flax.linen",),
    "jaxformer.decode.samplers": ("jax", "jax.numpy"),
}
"""Parts to reuse, and what each is compared with."""


def with_modules(part: str) -> list[str]:
    """Return a module and, if it is a package, all modules in it."""
    return [part, *(f"{part}.{module.name}" for module in iter_modules(getattr(import_module(part), "__path__", ())))]


def processor_seconds(modules: list[str]) -> float:
    """Return the processor time of a process that imports modules."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = f"import {', '.join(modules)}"
    env = {**os.environ, "PYTHONPATH": str(record.ROOT), "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(turns: int) -> None:
    """Measure, print and record."""
    compared = {part: (with_modules(part), list(base)) for part, base in PARTS.items()}
    seconds: dict[str, list[list[float]]] = {part: [] for part in PARTS}
    for _ in range(turns):
        for part, imports in compared.items():
            seconds[part].append([processor_seconds(modules) for modules in imports])
    figures = {}
    for part, times in seconds.items():
        ours, theirs = (min(column) for column in zip(*times, strict=True))
        base = ", ".join(PARTS[part])
        figures[part] = {"seconds": round(ours, 3), "compared_with": base, "its_seconds": round(theirs, 3),
                         "ratio": round(ours / theirs, 3)}  # fmt: skip
        print(f"import {part}: {ours:.3f} s; {base}: {theirs:.3f} s; ratio {ours / theirs:.3f}")
    record.write("imports", figures, record.versions("jax", "flax"), turns=turns)


if __name__ == "__main__":
    sys.path.insert(0, str(record.ROOT))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=9, help="processes per import")
    main(parser.parse_args().turns)
