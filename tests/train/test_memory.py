"""What a compiled step needs, and whether there is as much."""

import jax
import jax.numpy as jnp
import pytest

from jaxformer.errors import UserError
from jaxformer.train import memory
from jaxformer.train.memory import capacity, check_memory, needed, size

N = 2**18
"""Numbers in an array of one MiB."""


@pytest.fixture(scope="module")
def program():
    """Two MiB in, one out."""
    return jax.jit(lambda x, y: x + y).lower(*2 * [jax.ShapeDtypeStruct((N,), jnp.float32)]).compile()


def test_what_is_needed_is_arguments_results_and_scratch(program):
    assert 3 * 2**20 <= needed(program) < 3.1 * 2**20  # the code itself is small


def test_a_donated_argument_is_counted_once():
    donated = jax.jit(lambda x: x + 1, donate_argnums=0).lower(jax.ShapeDtypeStruct((N,), jnp.float32)).compile()
    assert 2**20 <= needed(donated) < 1.1 * 2**20


def test_virtual_devices_share_the_machine():
    whole = capacity(jax.devices()[0])
    assert whole is not None and 2**20 < whole * jax.local_device_count() < 2**50


def test_what_does_not_fit_is_refused_with_remedies(program, monkeypatch):
    monkeypatch.setattr(memory, "capacity", lambda device: 2**20)
    with pytest.raises(UserError, match=r"needs 3.* MiB of memory a device, and there are 1 MiB; lower train.batch"):
        check_memory(program, jax.devices()[0])
    monkeypatch.setattr(memory, "capacity", lambda device: None)
    assert check_memory(program, jax.devices()[0]).startswith("memory 3")


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (1023, "1.02e+03 B"), (1024, "1 KiB"), (1.5 * 2**30, "1.5 GiB"), (2**42, "4.1e+03 GiB")]
)
def test_sizes_read_as_people_say_them(n, text):
    assert size(n) == text
