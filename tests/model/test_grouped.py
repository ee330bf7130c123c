import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.model.grouped import (
    IMPLEMENTATIONS,
    Blocks,
    block_rows,
    choose,
    group_choices,
    grouped_product,
    lay_out,
    num_rows,
    take_back,
)

MEGABLOX = IMPLEMENTATIONS["megablox"]
RUNNABLE = {
    "blocks": IMPLEMENTATIONS["blocks"],
    "megablox": dataclasses.replace(
        MEGABLOX,
        multiply=functools.partial(MEGABLOX.multiply, interpret=True),
        weigh=functools.partial(MEGABLOX.weigh, interpret=True),
    ),
}
NUM_EXPERTS, DIM, OUT = 5, 24, 40
CHOICES = {
    "even": np.random.default_rng(0).integers(0, NUM_EXPERTS, (33, 2)),
    "with empty experts": np.random.default_rng(1).choice([1, 3], (33, 2)),
    "all to one": np.full((33, 1), 2),
    "fewer tokens than experts": np.array([[4, 0]]),
    "some elsewhere": np.random.default_rng(2).integers(-4, NUM_EXPERTS + 4, (33, 2)),
}


def through_groups(implementation, blocks, x, weights, experts):
    groups = group_choices(jnp.asarray(experts, jnp.int32), NUM_EXPERTS, blocks.rows)
    rows = lay_out(x, groups)
    return take_back(grouped_product(implementation, blocks, rows, weights, groups.sizes), groups)


def one_by_one(x, weights, experts):
    zeros = jnp.zeros(OUT)
    products = [
        [x[token] @ weights[expert] if 0 <= expert < NUM_EXPERTS else zeros for expert in row]
        for token, row in enumerate(experts.tolist())
    ]
    return jnp.stack([jnp.stack(row) for row in products])


@pytest.mark.parametrize("may_be_unused", [False, True])
@pytest.mark.parametrize("case", CHOICES)
@pytest.mark.parametrize("name", RUNNABLE)
def test_values_and_gradients_are_those_of_one_product_for_each_choice(name, case, may_be_unused):
    experts, generator = CHOICES[case], np.random.default_rng(3)
    x = jnp.asarray(generator.normal(size=(len(experts), DIM)), jnp.float32)
    weights = jnp.asarray(generator.normal(size=(NUM_EXPERTS, DIM, OUT)), jnp.float32)
    weigh = jnp.asarray(generator.normal(size=(*experts.shape, OUT)), jnp.float32)
    run = functools.partial(through_groups, RUNNABLE[name], Blocks(8, may_be_unused))

    def loss(function, x, weights):
        out = function(x, weights, experts)
        return jnp.sum(out * weigh), out

    def value_and_gradients(function):
        return jax.value_and_grad(functools.partial(loss, function), argnums=(0, 1), has_aux=True)(x, weights)

    (_, expected), expected_gradients = value_and_gradients(one_by_one)
    (_, found), gradients = jax.jit(lambda: value_and_gradients(run))()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, other, atol=5e-5)


@pytest.mark.parametrize("case", CHOICES)
def test_each_choice_has_a_row_in_a_block_of_its_expert(case):
    experts, block = CHOICES[case], 8
    groups = group_choices(jnp.asarray(experts, jnp.int32), NUM_EXPERTS, block)
    row, choice, ends = np.asarray(groups.row), np.asarray(groups.choice), np.cumsum(groups.sizes)
    assert len(choice) == num_rows(experts.size, NUM_EXPERTS, block) >= ends[-1]
    assert (np.asarray(groups.sizes) % block == 0).all()
    is_here = (experts >= 0) & (experts < NUM_EXPERTS)
    assert (row[~is_here] == len(choice)).all()
    np.testing.assert_array_equal(np.searchsorted(ends, row[is_here], side="right"), experts[is_here])
    np.testing.assert_array_equal(choice[row[is_here]], np.flatnonzero(is_here))
    assert (choice < experts.size).sum() == is_here.sum()


@pytest.mark.parametrize(
    ("num_choices", "num_experts", "block", "most"),
    [(262_144, 128, 256, 1.13), (32_768, 128, 64, 1.25), (512, 128, 8, 2.75), (8, 128, 8, 8)],
)
def test_blocks_add_little_to_the_rows_of_many_tokens(num_choices, num_experts, block, most):
    assert block_rows(num_choices, num_experts) == block
    assert num_choices <= num_rows(num_choices, num_experts, block) <= most * num_choices


def test_compiled_products_are_those_of_the_rows_and_not_of_every_expert():
    num_experts, tokens, dim, out = 16, 256, 64, 32
    experts = jnp.asarray(np.random.default_rng(0).integers(0, num_experts, (tokens, 2)), jnp.int32)
    block = block_rows(experts.size, num_experts)
    weights = jnp.ones((num_experts, dim, out))

    def loss(x, weights):
        groups = group_choices(experts, num_experts, block)
        rows = lay_out(x, groups)
        return jnp.sum(grouped_product(IMPLEMENTATIONS["blocks"], Blocks(block), rows, weights, groups.sizes) ** 2)

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(jnp.ones((tokens, dim)), weights).compile().as_text()
    assert text is not None
    rows = num_rows(experts.size, num_experts, block)
    trips = [int(number) for number in re.findall(r'"known_trip_count":\{"n":"(\d+)"\}', text)]
    assert trips.count(rows // block) == 3  # forward, and towards both factors; each product is of one block:
    products = {tuple(map(int, found.split(","))) for found in re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text)}
    assert products == {(block, out), (block, dim), (dim, out)}
    assert rows <= 1.25 * experts.size


def test_tpus_have_a_kernel_and_other_devices_blocks():
    assert [choose(platform).name for platform in ("tpu", "cpu", "gpu")] == ["megablox", "blocks", "blocks"]
