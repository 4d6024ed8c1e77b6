"""Eight CPU devices, exact matrix products, quick compilation, and caches apart from the user's."""

import gc
import os
from collections import Counter
from collections.abc import Generator, Iterator
from importlib.metadata import version

os.environ["JAX_NUM_CPU_DEVICES"] = "8"  # read when jax is imported; `cli.machine` leaves it alone
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # whose lines made an op: a tenth of tracing and compiling
os.environ["OMP_WAIT_POLICY"] = "passive"  # or torch's threads spin, up to ten times as long as they compute
# Most of the suite's time is compiling. What programs mean is not changed by this, only how fast they run.
os.environ["XLA_FLAGS"] = " ".join([
    "--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    # Only these versions have two ways to generate code, of which this compiles in half the time.
    *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []),
    # These versions know this, which saves a sixth of the compiling; others may refuse to start.
    *(["--xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE"] if version("jaxlib") in ("0.10.2", "0.12.0.1") else []),
    os.environ.get("XLA_FLAGS", ""),
])  # fmt: skip

import hypothesis  # noqa: F401  # before anything is frozen: it looks for the referrers of others' generators
import jax
import pytest

LONGEST = (
    "test_benchmarks.py", "test_docs.py", "test_encoders.py", "test_end_to_end.py", "test_every_model.py",
    "test_generation.py", "test_influence.py", "test_inspect.py", "test_processes.py", "test_slurm.py",
    "test_smollm2.py", "test_step.py", "test_story.py", "test_studies.py",
)  # fmt: skip
"""Files whose tests start processes or compile large programs: minutes, whatever their number."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this project's tests."""
    text = "configs per family that are compared with transformers, at most 200 (interop/test_configs.py)"
    parser.addoption("--config-draws", type=int, default=4, help=text)
    text = "try all instruments on all kinds of models (inspect/test_kinds.py)"
    parser.addoption("--all-kinds", action="store_true", help=text)
    text = "compare all variations of each family, and write the table of docs/interop.md (interop/test_families.py)"
    parser.addoption("--families-table", action="store_true", help=text)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the hook that leaves tests out by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Run files that take long first: a file belongs to one worker, and if a slow one came last, the other worker would
    idle."""
    yield
    slow = Counter(item.path for item in items if "slow" in item.keywords)
    items.sort(key=lambda item: (item.path.name not in LONGEST, -slow[item.path]))


def pytest_configure(config: pytest.Config) -> None:
    """Let the default run show that the package works where users forbid implicit axes, which are often a mistake."""
    if "not slow" in config.getoption("markexpr"):
        jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_finish() -> None:
    """Spare the garbage collector the modules that tests have imported."""
    gc.collect()
    gc.freeze()


# Tracing makes many objects that are no garbage, and looking at them takes a tenth of the suite's time.
gc.set_threshold(50_000, 10, 10)
jax.config.update("jax_default_matmul_precision", "highest")  # an accelerator would round float32 otherwise


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Iterator[None]:
    """Forget the programs of a file of tests after it. `CheckpointManager` collects garbage when it is closed, and
    looks through all that they hold: ten seconds a test at the end of the suite."""
    yield
    jax.clear_caches()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Read and write no cache of the user's; share compiled programs with the commands that tests start."""
    cache = tmp_path_factory.mktemp("cache")
    (cache / "compiled").mkdir(mode=0o700)
    jax.config.update("jax_compilation_cache_dir", str(cache / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXFORMER_CACHE", str(cache))
        yield
