"""JSON bodies of requests, as the `tinker` SDK 0.38 sends them. Unknown fields are ignored."""

from typing import Annotated, Literal

import msgspec


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """A body."""


class SessionOnly(Body, frozen=True, kw_only=True):
    """A body with a client session."""

    session_id: str


class LoraOptions(Body, frozen=True, kw_only=True):
    """`lora_config` of `create_model`."""

    rank: int
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerChoice(Body, frozen=True, kw_only=True):
    """`optimizer_config` of a new model."""

    type: str = "adamw"


class CreateModel(SessionOnly, frozen=True, kw_only=True):
    """POST /create_model."""

    model_seq_id: int
    base_model: str
    lora_config: LoraOptions | None = None
    optimizer_config: OptimizerChoice = OptimizerChoice()


class ModelOnly(Body, frozen=True, kw_only=True):
    """A body with a model."""

    model_id: str


class AdamParams(Body, frozen=True, kw_only=True):
    """`adam_params` of `optim_step`."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(ModelOnly, frozen=True, kw_only=True):
    """POST /optim_step."""

    seq_id: int
    adam_params: AdamParams | None = None


class SaveWeights(ModelOnly, frozen=True, kw_only=True):
    """POST /save_weights."""

    seq_id: int
    path: str | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(ModelOnly, frozen=True, kw_only=True):
    """POST /save_weights_for_sampler."""

    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    user_metadata: dict[str, str] | None = None


class LoadWeights(Body, frozen=True, kw_only=True):
    """POST /load_weights: into a model, or into a new model of a session."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    optimizer_config: OptimizerChoice | None = None


class CreateSamplingSession(SessionOnly, frozen=True, kw_only=True):
    """POST /create_sampling_session."""

    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class SamplingSessionOnly(Body, frozen=True, kw_only=True):
    """POST /join_sampling_session."""

    sampling_session_id: str


class TextChunk(Body, frozen=True, kw_only=True):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = []


class PromptBody(Body, frozen=True, kw_only=True):
    """`prompt` of `asample`."""

    chunks: list[TextChunk]


class SampleOptions(Body, frozen=True, kw_only=True):
    """`sampling_params` of `asample`."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


TensorInt = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]


class TensorBody(Body, frozen=True, kw_only=True):
    """A tensor of token ids; a sparse one has the values and places of some cells."""

    data: list[TensorInt]
    shape: list[TensorInt]
    sparse_crow_indices: list[TensorInt] | None = None
    sparse_col_indices: list[TensorInt] = []


class SampleBody(SamplingSessionOnly, frozen=True, kw_only=True):
    """POST /asample."""

    seq_id: int
    prompt: PromptBody
    sampling_params: SampleOptions
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None


class RequestOnly(Body, frozen=True, kw_only=True):
    """POST /retrieve_future and /cancel_future."""

    request_id: str


class CheckpointOnly(Body, frozen=True, kw_only=True):
    """POST /weights_info."""

    tinker_path: str
