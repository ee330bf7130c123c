import jax.numpy as jnp
import numpy as np

from jaxsp.model.rope import inverse_frequencies, rotate, rotation_angles
from jaxsp.model.sizes import Llama3Scaling, Rope


def test_frequencies_are_powers_of_theta():
    np.testing.assert_allclose(inverse_frequencies(Rope(10_000.0), 8), [1.0, 0.1, 0.01, 0.001], rtol=1e-6)


def test_llama3_scaling_keeps_short_wavelengths_divides_long_ones_and_is_linear_between():
    # theta 1e4, 8 dimensions: frequencies 1, 0.1, 0.01, 0.001. Over 400 positions they turn 63.66, 6.366, 0.6366 and
    # 0.06366 times: the first lies above high = 8, the second between 4 and 8 at (6.366 - 4) / 4, the others below.
    scaling = Llama3Scaling(factor=10.0, low_freq_factor=4.0, high_freq_factor=8.0, original_max_positions=400)
    smooth = (400 * 0.1 / (2 * np.pi) - 4) / 4
    second = (1 - smooth) * 0.01 + smooth * 0.1
    found = inverse_frequencies(Rope(10_000.0, scaling), 8)
    np.testing.assert_allclose(found, [1.0, second, 0.001, 0.0001], rtol=1e-6)


def test_a_plane_turns_by_position_times_frequency():
    # One plane (0, 1) at frequency 1 and position 2: (1, 0) turns to (cos 2, sin 2).
    cos, sin = rotation_angles(Rope(10_000.0), 2, jnp.array([[2]]))
    found = rotate(jnp.array([[[[1.0, 0.0]]]]), cos, sin)
    np.testing.assert_allclose(found[0, 0, 0], [np.cos(2.0), np.sin(2.0)], atol=1e-6)


def test_products_depend_on_the_distance_alone():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def product(q_position, k_position):
        rope = Rope(1e6)
        turned = [
            rotate(x, *rotation_angles(rope, 16, jnp.array([[position]])))
            for x, position in ((q, q_position), (k, k_position))
        ]
        return float((turned[0] * turned[1]).sum())

    np.testing.assert_allclose(product(17, 5), product(112, 100), atol=1e-4)
