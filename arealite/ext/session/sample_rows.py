"""Sampled answers, and the training rows that they become.

Shape letters: T = tokens of prompt and answer, N = sampled tokens, R = bytes of a token's experts.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from arealite.algo.advantages import group_advantages
from arealite.api.algorithm import AdvantageConfig, TokenAdvantage
from arealite.api.engine import Sequence
from arealite.api.llm import LLMResponse
from arealite.api.tokenizer import Tokenizer
from arealite.base.errors import UserError
from arealite.system.data.templates import tokenize

PromptInput = str | Seq[int] | Seq[dict[str, Any]]
"""A text, token ids, or chat messages for the model's chat template."""
NO_RECORD = 255
"""Every byte of the expert record of a token that has none."""


def _no_tokens() -> np.ndarray:
    return np.zeros((0, 0))


@dataclass(kw_only=True)
class SampleRow(Sequence):
    """The training row of a sample."""

    sample: "Sample"
    reward: float | None = None
    """The reward of the sample, if the row's advantage was computed from rewards."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer, with the exact tokens that a server sampled. The three lists have one length."""

    prompt: PromptInput
    """The prompt, as it was passed to `sample`."""
    prompt_ids: list[int] = field(repr=False)
    """Token ids of the prompt."""
    output_ids: list[int] = field(repr=False)
    """Sampled token ids, with the token that ended the answer."""
    logprobs: list[float] = field(repr=False)
    """Log-probability of each sampled token, at `temperature`, in nats."""
    versions: list[int] = field(repr=False)
    """Version of the weights that sampled each token. An answer that a `publish` interrupted has
    tokens of several versions."""
    stop_reason: str
    """"stop" (a stop token or string) or "length" (`max_tokens`)."""
    text: str
    """The answer without special tokens."""
    temperature: float
    group: str
    """Equal for the answers to one prompt of a call, and for no others."""
    adapter: str = ""
    """The adapter that sampled it, of which `versions` are versions; "": the default one."""
    trajectory_id: str = ""
    """Its name in the ledger; "": it is in none."""
    routing: bytes = field(default=b"", repr=False)
    """Experts of a mixture, for all tokens but the last one, uint8 [T - 1, R]; b"": no record."""

    top_ids: np.ndarray = field(default_factory=_no_tokens, repr=False, compare=False)
    """int32 [N, K], with `top_logprobs=K`: the most probable tokens at each sampled token, by
    falling probability; -1: no further one."""
    top_logprobs: np.ndarray = field(default_factory=_no_tokens, repr=False, compare=False)
    """float32 [N, K]: their log-probabilities; -inf: no further one."""

    def row(self, advantage: float = 1.0) -> SampleRow:
        """Return the training row of this answer, for `Session.forward_backward`.

        Its loss tokens are the sampled ones. Its fields, float32 [T] each, are `advantages`,
        `behav_logprobs` and `versions` (-1 for tokens of the prompt).

        Args:
            advantage: The advantage of every sampled token.
        """
        num_prompt = len(self.prompt_ids)
        tokens_T = np.array(self.prompt_ids + self.output_ids, np.int32)
        logprobs_T = np.zeros(len(tokens_T), np.float32)
        logprobs_T[num_prompt:] = self.logprobs
        versions_T = np.full(len(tokens_T), -1, np.float32)
        versions_T[num_prompt:] = self.versions
        routing_TR = None
        if self.routing:
            recorded = np.frombuffer(self.routing, np.uint8).reshape(len(tokens_T) - 1, -1)
            routing_TR = np.pad(recorded, ((0, 1), (0, 0)), constant_values=NO_RECORD)
        return SampleRow(
            sample=self,
            tokens=tokens_T,
            loss_mask=np.arange(len(tokens_T)) >= num_prompt,
            temperature=self.temperature,
            fields={
                "advantages": np.full(len(tokens_T), advantage, np.float32),
                "behav_logprobs": logprobs_T,
                "versions": versions_T,
            },
            routing=routing_TR,
            adapter=self.adapter,
        )


def make_rows(
    samples: Seq[Sample],
    rewards: Seq[float | None],
    config: AdvantageConfig,
) -> list[Sequence]:
    """Return the row of each sample, with its advantage relative to its group.

    Raises:
        UserError: The numbers of samples and rewards differ, or the advantage is not one number
            relative to a group.
    """
    if len(samples) != len(rewards):
        raise UserError(f"rows: {len(samples)} samples, but {len(rewards)} rewards. Pass one each.")
    compare = config.function
    if isinstance(compare, TokenAdvantage):
        raise UserError(
            f"rows: advantage {config.type!r} is not relative to a group. "
            "Use grpo, dr_grpo or rloo, or sample.row(advantage)."
        )
    groups = [sample.group for sample in samples]
    advantages = group_advantages(rewards, groups, compare, config)
    return [
        replace(sample.row(advantage), reward=reward)
        for sample, reward, advantage in zip(samples, rewards, advantages, strict=True)
        if reward is not None
    ]


@dataclass(frozen=True, kw_only=True)
class PromptScores:
    """Log-probabilities of the T tokens of a prompt but the first one, at temperature 1."""

    logprobs: np.ndarray
    """float32 [T - 1]"""
    top_ids: np.ndarray
    """int32 [T - 1, K]: the most probable tokens, by falling probability; -1: none."""
    top_logprobs: np.ndarray
    """float32 [T - 1, K]; -inf: none."""
    target_logprobs: np.ndarray
    """float32 [T - 1, M]: of the tokens that were named; -inf for -1."""

    @classmethod
    def of(cls, response: LLMResponse, *, num_top: int) -> "PromptScores":
        """Read the scores of a response; `num_top` is K."""
        num_scored = len(response.prompt_logprobs)
        top_ids = np.full((num_scored, num_top), -1, np.int32)
        top_logprobs = np.full((num_scored, num_top), -np.inf, np.float32)
        for place, tokens in enumerate(response.prompt_top_tokens[:num_scored]):
            pairs = [(logprob, token) for logprob, token, _ in tokens if logprob is not None]
            for rank, (logprob, token) in enumerate(sorted(pairs, reverse=True)[:num_top]):
                top_ids[place, rank] = token
                top_logprobs[place, rank] = logprob
        return cls(
            logprobs=np.array(response.prompt_logprobs, np.float32),
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            target_logprobs=top_tokens(response.target_logprobs, np.float32, num_scored),
        )


def check_targets(targets: Seq[Seq[int]], num_tokens: int, vocabulary: int) -> None:
    """Check the tokens to score at each place of a prompt.

    Raises:
        UserError: They are not M tokens for each place, or a token does not exist.
    """
    if not targets:
        return
    if len(targets) != num_tokens - 1 or {*map(len, targets)} != {max(1, len(targets[0]))}:
        raise UserError(
            f"targets: {len(targets)} rows for a prompt of {num_tokens} tokens. Pass as many ids "
            f"for each of its {num_tokens - 1} places after the first token; -1: none."
        )
    ids = [token for row in targets for token in row]
    if min(ids) < -1 or max(ids) >= vocabulary:
        raise UserError(f"targets: token ids must be -1 or in [0, {vocabulary}).")


def top_tokens(raw: bytes, dtype: type[np.int32 | np.float32], num_tokens: int) -> np.ndarray:
    """Return values of K tokens at each of a response's places, [N, K]."""
    values = np.frombuffer(raw, dtype)
    return values.reshape(num_tokens, len(values) // max(1, num_tokens))


class TokenizedPrompt(NamedTuple):
    """A prompt of the user, and its tokens."""

    prompt: PromptInput
    ids: list[int]


def tokenized(
    prompts: PromptInput | Seq[PromptInput],
    tokenizer: Tokenizer,
) -> list[TokenizedPrompt]:
    """Return each prompt with its tokens; one prompt, if `prompts` is one.

    Raises:
        UserError: There is no prompt, a prompt is of another type or has no token, or chat messages
            cannot be rendered.
    """
    if not len(prompts):
        raise UserError("sample: there are no prompts. Pass a text, token ids or chat messages.")
    is_one = isinstance(prompts, str) or isinstance(prompts[0], int | dict)
    list_of_prompts: Any = [prompts] if is_one else prompts
    tokenized_prompts = list[TokenizedPrompt]()
    for index, prompt in enumerate(list_of_prompts):
        ids = _ids_of(prompt, tokenizer)
        if not ids or not all(isinstance(token, int) for token in ids):
            raise UserError(
                f"sample: prompt {index} is {prompt!r:.60}. "
                "Pass a text, a list of token ids, or a list of chat messages; none may be empty."
            )
        tokenized_prompts.append(TokenizedPrompt(prompt, ids))
    return tokenized_prompts


def _ids_of(prompt: Any, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a prompt; [] of an object that is none."""
    if not isinstance(prompt, Seq) or not prompt:
        return []
    if isinstance(prompt, str) or isinstance(prompt[0], dict):
        return tokenize(tokenizer, prompt)
    return [*prompt]
