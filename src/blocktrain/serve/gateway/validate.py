"""Validates a completion request: fills in defaults, checks ranges, makes one decoding request per text. Pure.
Next: completion.py, which has the texts written."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import get_args

from blocktrain.errors import ConfigError
from blocktrain.serve.decode.request import Mode, Request, check, denoises
from blocktrain.serve.gateway.openai import ApiError, CompletionRequest, ModeName
from blocktrain.serve.traversal import ModelInfo

DEFAULT_TOKENS = Request.max_tokens
SEEDS = 2**63


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for."""

    max_tokens: int = 4096  # of each text: bytes, unless the model has a tokenizer
    max_choices: int = 16  # texts: prompts × n


@dataclass(frozen=True)
class Text:
    """One of the texts of a completion."""

    index: int  # among the choices of the answer
    prompt: bytes
    request: Request | None  # None: the prompt is only scored


@dataclass(frozen=True)
class CompletionPlan:
    """A validated request."""

    texts: tuple[Text, ...]
    prompt_bytes: int
    prompt_tokens: int
    mode: Mode
    seed: int
    stops: tuple[str, ...]
    logprobs: int | None
    echo: bool
    stream: bool
    include_usage: bool
    simulated_rtt_s: float = 0.0


def validate(asked: CompletionRequest, info: ModelInfo, limits: Limits, fresh_seed: int) -> CompletionPlan:
    """Raises ApiError for everything that can be wrong with a request, before any work is done."""
    if asked.model not in (None, info.name):
        raise unknown_model(str(asked.model), info)
    _check_supported(asked)
    prompts = _prompts(asked)
    n = _num_choices(asked, len(prompts), limits)
    max_tokens = _max_tokens(asked, limits)
    mode = Mode(asked.mode or Mode.SPECULATIVE)
    stops = asked.stop if isinstance(asked.stop, list) else [asked.stop] if asked.stop else []
    seed = fresh_seed if asked.seed is None else asked.seed % SEEDS
    texts = tuple(
        Text(row * n + column, prompt, _request(asked, mode, prompt, max_tokens, derived_seed(seed, column), info))
        for row, prompt in enumerate(prompts)
        for column in range(n)
    )
    return CompletionPlan(
        texts=texts,
        prompt_bytes=sum(map(len, prompts)),
        prompt_tokens=sum(len(info.tokenizer.encode(prompt)) for prompt in prompts),
        mode=mode,
        seed=seed,
        stops=tuple(stops),
        logprobs=asked.logprobs,
        echo=bool(asked.echo),
        stream=bool(asked.stream),
        include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
        simulated_rtt_s=(asked.simulated_rtt_ms or 0) / 1000,
    )


def derived_seed(seed: int, column: int) -> int:
    """The first text of each prompt has the seed itself, so its text does not depend on n."""
    if column == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{column}".encode()).digest()[:8]) % SEEDS


def unknown_model(name: str, info: ModelInfo) -> ApiError:
    return ApiError(
        404, f'no model "{name[:80]}" is served here: ask for "{info.name}"', "model_not_found", param="model"
    )


def _check_supported(asked: CompletionRequest) -> None:
    """OpenAI's fields that have no meaning here. Clients send their defaults, which are accepted."""
    n = asked.n or 1
    defaults = {
        "suffix": (None, ""),
        "best_of": (None, n),
        "frequency_penalty": (None, 0),
        "presence_penalty": (None, 0),
        "logit_bias": (None, {}),
    }
    for field, accepted in defaults.items():
        if getattr(asked, field) not in accepted:
            message = f"{field} is not supported by this model: leave it out"
            raise ApiError(400, message, "unsupported_parameter", param=field)
    if asked.stream_options is not None and not asked.stream:
        message = "stream_options says how to stream: give it only with stream = true"
        raise ApiError(400, message, "invalid_value", param="stream_options")


def _prompts(asked: CompletionRequest) -> list[bytes]:
    """As they were given: of one that is longer than the model's context, the decoder reads the end."""
    given = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt or ""]
    if not given:
        raise ApiError(
            400, "prompt is an empty list: give a string or a list of strings", "invalid_value", param="prompt"
        )
    return [text.encode() for text in given]


def _num_choices(asked: CompletionRequest, num_prompts: int, limits: Limits) -> int:
    n = asked.n or 1
    if not n * num_prompts <= limits.max_choices:
        most = limits.max_choices // num_prompts
        message = f"n = {n} for {num_prompts} prompts is not accepted: give n from 1 to {most}"
        if most == 0:
            message = f"{num_prompts} prompts are not accepted in one request: give 1 to {limits.max_choices}"
        elif num_prompts == 1:
            message = f"n = {n} is not accepted: give 1 to {most}"
        raise ApiError(400, message, "invalid_value", param="prompt" if most == 0 else "n")
    return n


def _max_tokens(asked: CompletionRequest, limits: Limits) -> int:
    least, most = 0 if asked.echo else 1, limits.max_tokens
    given = min(DEFAULT_TOKENS, most) if asked.max_tokens is None else asked.max_tokens
    if not least <= given <= most:
        why = "" if asked.echo or given else " (0 only with echo)"
        message = f"max_tokens = {given} is not accepted: give {least} to {most}{why}"
        raise ApiError(400, message, "invalid_value", param="max_tokens")
    return given


def modes_of(info: ModelInfo) -> list[ModeName]:
    """The decoding modes that this model supports."""
    return [mode for mode in get_args(ModeName) if _possible(Request(prompt=b"a", max_tokens=1, mode=Mode(mode)), info)]


def _possible(request: Request, info: ModelInfo) -> bool:
    try:
        check(request, info)
    except ConfigError:
        return False
    return True


def _request(
    asked: CompletionRequest, mode: Mode, prompt: bytes, max_tokens: int, seed: int, info: ModelInfo
) -> Request | None:
    if max_tokens == 0:
        return None
    try:
        request = Request(
            prompt=prompt,
            max_tokens=max_tokens,
            mode=mode,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            seed=seed,
            candidates=asked.candidates,
        )
        check(request, info)
    except ConfigError as error:
        raise ApiError(400, str(error), "invalid_value", param=_field_named_in(str(error))) from None
    if asked.logprobs is not None and denoises(request, info):
        message = "a denoising sweep has no log-probabilities: leave logprobs out, or choose another mode"
        raise ApiError(400, message, "unsupported_parameter", param="logprobs")
    return request


def _field_named_in(message: str) -> str | None:
    return next((field for field in ("temperature", "candidates", "mode") if field in message), None)
