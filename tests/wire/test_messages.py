"""Every number of every message has a range, so that no peer can send one that breaks sums, curves or clocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from blocktrain.serve.chain import messages as between_stages
from blocktrain.wire import messages, people_messages, recipes
from blocktrain.wire.messages import EvaluationNotice, Message, UpdateNotice

MODELS = {
    f"{module.__name__}.{name}": model
    for module in (messages, people_messages, recipes, between_stages)
    for name, model in vars(module).items()
    if isinstance(model, type) and issubclass(model, BaseModel) and model not in (BaseModel, Message)
}


def unbounded(schema: Any, path: str = "") -> Iterator[str]:
    """Where a JSON schema allows a number without a smallest or largest value."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            for bound in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
                if "const" not in schema and not any(name in schema for name in bound):
                    yield f"{path} has no {bound[0]}"
        for key, value in schema.items():
            yield from unbounded(value, f"{path}.{key}")
    if isinstance(schema, list):
        for number, value in enumerate(schema):
            yield from unbounded(value, f"{path}.{number}")


@pytest.mark.parametrize("name", MODELS)
def test_every_number_has_a_range(name):
    assert list(unbounded(TypeAdapter(MODELS[name]).json_schema())) == []


def test_the_messages_are_found():
    assert {"UpdateNotice", "RecipeUpdate", "Advance", "Head"} <= {name.rpartition(".")[2] for name in MODELS}


def notice(**changes: object) -> dict[str, object]:
    blob = {"sha256": "a" * 64, "num_bytes": 7}
    return {"worker": "a" * 64, "lease": "1", "tensors": {"up": [2, 3]}, "payload": blob, "steps": 1, "tokens": 1,
            "loss": 2.5, **changes}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"loss": 1e308}, {"loss": -1}, {"steps": 2**53}, {"tensors": {"up": [1] * 65}}, {"tensors": {"up": [2**53]}}],
)
def test_a_number_beyond_belief_is_refused(changes):
    assert UpdateNotice.model_validate(notice())
    with pytest.raises(ValidationError):
        UpdateNotice.model_validate(notice(**changes))


@pytest.mark.parametrize("wrong", [{"scores": [1] * 10**5}, {"combine": {"stack": ["x"] * 10**5}}])
def test_a_message_of_many_wrong_numbers_is_refused_for_the_first_of_them(wrong):
    with pytest.raises(ValidationError) as refused:
        EvaluationNotice.model_validate({"lease": "1", "worker": "ab" * 32, "scores": [], "combine": {}, **wrong})
    assert len(refused.value.errors()) == 1
