import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_sampler import SIZES, prompt, tiny_params

from jaxsp.sampler.programs import make_programs
from jaxsp.sampler.scheduler import make_slots
from jaxsp.sampler.weight_sync import to_sampler_layout
from jaxsp.trajectory import GenerateRequest

PROGRAMS = make_programs(SIZES, jnp.dtype(jnp.float32), 4, None)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_decoding_writes_the_cache_in_place(num_rows):
    params = jax.eval_shape(lambda: to_sampler_layout(tiny_params(), jnp.float32))
    cache = jax.eval_shape(lambda: PROGRAMS.new_cache(num_rows, 128))
    slots = make_slots(num_rows, [(GenerateRequest(prompt(0, 5), 0, 9), [1])])
    compiled = PROGRAMS.decode.lower(params, cache, slots, np.int32(0)).compile()
    shape = ",".join(map(str, cache[0][0].shape))
    assert re.findall(rf"= f32\[{shape}\]\S* dynamic-update-slice\(|= f32\[{shape}\]\S* scatter\(", compiled.as_text())
    assert not re.findall(rf"= f32\[{shape}\]\S* copy\(", compiled.as_text())


def test_rows_are_gathered_into_a_larger_or_smaller_cache():
    array = jnp.arange(3 * 2 * 4 * 8, dtype=jnp.float32).reshape(3, 2, 4, 8)
    grown = PROGRAMS.gather_rows(array, np.array([2, 0, 0, 0], np.int32), 6)
    assert grown.shape == (4, 2, 6, 8)
    np.testing.assert_array_equal(grown[:2, :, :4], array[jnp.array([2, 0])])
    assert not np.asarray(grown[:, :, 4:]).any()
    np.testing.assert_array_equal(PROGRAMS.gather_rows(array, np.array([1], np.int32), 3), array[1:2, :, :3])


def test_rows_are_copied_to_their_places_and_no_others():
    array, fresh = jnp.zeros((4, 2, 6, 8)), jnp.arange(2 * 2 * 5 * 8, dtype=jnp.float32).reshape(2, 2, 5, 8) + 1
    source, target = np.array([1, 0, 1, 0], np.int32), np.array([3, 0, 2, 1], np.int32)
    copied = PROGRAMS.copy_rows(array, fresh, source, target, np.int32(3))
    for row, origin in ((3, 1), (0, 0), (2, 1)):
        np.testing.assert_array_equal(copied[row, :, :5], fresh[origin])
    assert not np.asarray(copied[1]).any() and not np.asarray(copied[:, :, 5:]).any()
