import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_sampler import SIZES, prompt, tiny_params

from jaxsp.sampler.cpu_attention import complaint
from jaxsp.sampler.paged_attention import IMPLEMENTATIONS
from jaxsp.sampler.programs import make_programs
from jaxsp.sampler.scheduler import make_slots
from jaxsp.sampler.weight_sync import to_sampler_layout
from jaxsp.trajectory import GenerateRequest

PROGRAMS = {
    name: make_programs(SIZES, jnp.dtype(jnp.float32), 8, 4, None, IMPLEMENTATIONS[name]) for name in ("xla", "cpu")
}
PAGES = 40


def compiled(program, *arguments) -> str:
    return program.lower(*arguments).compile().as_text()


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("attention", PROGRAMS)
def test_nothing_copies_the_cache(attention, num_rows):
    assert attention == "xla" or complaint(SIZES.head_dim, jnp.dtype(jnp.float32)) is None
    own = PROGRAMS[attention]
    params = jax.eval_shape(lambda: to_sampler_layout(SIZES, tiny_params(), jnp.float32))
    cache = jax.eval_shape(lambda: own.new_cache(PAGES))
    slots = make_slots(num_rows, [(GenerateRequest(prompt(0, 5), 0, 9), [1])])
    table, rows = np.zeros((num_rows, 16), np.int32), np.zeros(num_rows, np.int32)
    programs = {
        "decode": compiled(own.decode, params, cache, table, slots, None, np.int32(0)),
        "prefill": compiled(own.prefill, params, cache, np.zeros((num_rows, 32), np.int32), rows, rows, table),
        "copy": compiled(own.copy_pages, cache, rows, rows),
    }
    for text in programs.values():
        shape = ",".join(map(str, cache[0][0].shape))
        updates = rf"= (?:f32\[{shape}\]\S* (?:dynamic-update-slice|scatter|fusion)\(|.*f32\[{shape}\].* custom-call\()"
        assert re.findall(updates, text)
        assert not re.findall(rf"= f32\[{shape}\]\S* copy\(", text)
    if num_rows > 1 and attention == "xla":  # and decoding writes each token into the rows that it gathered once
        shape = f"{num_rows},2,128,{SIZES.head_dim}"
        assert re.findall(rf"= f32\[{shape}\]\S* scatter\(", programs["decode"])
        assert not re.findall(rf"= f32\[{shape}\]\S* copy\(", programs["decode"])


def test_pages_are_copied_to_their_places_and_no_others():
    cache = [(jnp.arange(PAGES * 2 * 8 * 8, dtype=jnp.float32).reshape(PAGES, 2, 8, 8),) * 2]
    before = np.asarray(cache[0][0])
    keys, values = make_copies(cache, [(3, 5), (3, 7), (9, 0)])
    expected = before.copy()
    expected[[5, 7, 0]] = before[[3, 3, 9]]
    np.testing.assert_array_equal(keys, expected)
    np.testing.assert_array_equal(values, expected)


def make_copies(cache, copies):
    source, target = np.zeros(4, np.int32), np.full(4, PAGES, np.int32)
    source[: len(copies)], target[: len(copies)] = zip(*copies, strict=True)
    cache = [tuple(jnp.array(pages) for pages in layer) for layer in cache]
    return PROGRAMS["xla"].copy_pages(cache, source, target)[0]
