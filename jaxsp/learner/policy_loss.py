"""The loss of a policy-gradient update, put together from the tables, and what is logged of it.

Legend: M micro-batches, R rows, T targets of a row.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsp.learner.batch import Batch
from jaxsp.learner.diagnostics import mismatch_metrics, policy_metrics
from jaxsp.learner.importance import IMPORTANCE, importance_log_ratios, importance_weights
from jaxsp.learner.kl import kl_sum
from jaxsp.learner.objectives import OBJECTIVES, surrogate
from jaxsp.learner.ratios import target_mean


class Anchors(NamedTuple):
    """What current log-probabilities are held against, float32 `[M, R, T]` or those of one micro-batch.

    Attributes:
        old: before the step's first update; None where the current ones are these.
        reference: the reference policy's; None where there is none.
        sequence_log_ratio: of each target's trajectory, for objectives of sequences; None where it is 0.
        importance_log_ratio: of learner to sampler, for importance weights of sequences; None for those of tokens.
    """

    old: jax.Array | None
    reference: jax.Array | None
    sequence_log_ratio: jax.Array | None
    importance_log_ratio: jax.Array | None


@dataclass(frozen=True)
class PolicyLoss:
    """`loss(logprobs, batch, (anchors, denominator))`: a sum over targets, divided.

    Attributes:
        objective: a name of `jaxsp.learner.objectives.OBJECTIVES`.
        clip_low, clip_high: the ratio's bounds are `1 - clip_low` and `1 + clip_high`.
        importance: a name of `jaxsp.learner.importance.IMPORTANCE`, the weights that correct sampler against learner.
        importance_cap: their upper bound, where they are truncated.
        importance_low, importance_high: bounds of the ratios that are not left out, where they are masked.
        kl_coef: of the divergence from the reference in the loss; 0: there is no such term.
        kl_estimator: a name of `jaxsp.learner.kl.KL_ESTIMATORS`.
    """

    clip_low: float
    clip_high: float
    importance_cap: float
    kl_coef: float
    objective: str = "clip"
    importance: str = "token"
    importance_low: float = 0.5
    importance_high: float = 5.0
    kl_estimator: str = "k3"

    @property
    def is_of_sequences(self) -> bool:
        """Whether `Anchors.sequence_log_ratio` is needed once the policy has moved."""
        return OBJECTIVES[self.objective].is_of_sequences

    @property
    def weighs_sequences(self) -> bool:
        """Whether `Anchors.importance_log_ratio` is needed."""
        return IMPORTANCE[self.importance].is_of_sequences

    def importance_log_ratio(self, old: jax.Array, batch: Batch) -> jax.Array:
        """Of learner to sampler at each target; for weights of sequences the batch must hold an update whole."""
        return importance_log_ratios(
            self.importance, old, batch.behaviour_logprobs, batch.target_sequence, batch.target_mask
        )

    def importance_weights(self, old: jax.Array, batch: Batch, anchors: Anchors) -> tuple[jax.Array, jax.Array]:
        """The weight of each target, and whether it was cut."""
        log_ratio = anchors.importance_log_ratio
        return importance_weights(
            self.importance,
            self.importance_log_ratio(old, batch) if log_ratio is None else log_ratio,
            batch.target_mask,
            cap=self.importance_cap,
            low=self.importance_low,
            high=self.importance_high,
        )

    def __call__(self, logprobs: jax.Array, batch: Batch, extras: tuple[Anchors, Any]) -> jax.Array:
        anchors, denominator = extras
        total = self.surrogate(logprobs, batch, anchors)
        if self.kl_coef and anchors.reference is not None:
            divergence = kl_sum(self.kl_estimator, logprobs, anchors.reference, batch.target_mask, batch.weights)
            total += self.kl_coef * divergence
        return total / denominator

    def surrogate(self, logprobs: jax.Array, batch: Batch, anchors: Anchors) -> jax.Array:
        """The objective's part of the loss, not divided."""
        old = jax.lax.stop_gradient(logprobs) if anchors.old is None else anchors.old
        return surrogate(
            self.objective,
            logprobs,
            old,
            batch.advantages * batch.weights,  # the surrogate is linear in the size of the advantage
            self.importance_weights(old, batch, anchors)[0],
            batch.target_mask,
            anchors.sequence_log_ratio,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )

    def metrics(self, logprobs: jax.Array, entropy: jax.Array, batch: Batch, anchors: Anchors) -> dict[str, jax.Array]:
        """What is logged of the targets of a whole update, whose `anchors.old` is given.

        Effective tokens are targets whose log-probability the objective pulls at: not clipped, not left out, and of an
        advantage that is not 0.
        """
        assert anchors.old is not None
        mask = batch.target_mask
        num_tokens = jnp.sum(mask).astype(jnp.float32)
        _, is_cut = self.importance_weights(anchors.old, batch, anchors)
        pulls = jax.grad(self.surrogate)(logprobs, batch, anchors)
        metrics = {
            "policy/num_tokens": num_tokens,
            "policy/effective_tokens": jnp.sum(pulls != 0).astype(jnp.float32),
            **policy_metrics(
                self.objective,
                logprobs,
                entropy,
                anchors.old,
                batch.advantages,
                mask,
                anchors.sequence_log_ratio,
                clip_low=self.clip_low,
                clip_high=self.clip_high,
            ),
            **mismatch_metrics(anchors.old, batch.behaviour_logprobs, mask),
            "policy/importance_capped_frac": target_mean(is_cut.astype(jnp.float32), mask),
        }
        if anchors.reference is not None:
            # k3 whatever the loss has: it is never negative and varies least.
            metrics["policy/kl"] = kl_sum("k3", logprobs, anchors.reference, mask) / jnp.maximum(num_tokens, 1.0)
        return metrics
