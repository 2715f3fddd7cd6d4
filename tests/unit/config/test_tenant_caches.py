"""Whether tenants share what a model's caches have."""

from __future__ import annotations

import pytest

from nerite.config.model_config import ModelConfig, ModelParameter
from nerite.config.model_parameters import check_tenants_share_cache, tenants_share_cache


def config(text: str) -> ModelConfig:
    return ModelConfig(name="m", parameters={"TENANTS_SHARE_CACHE": ModelParameter(string_value=text)})


def test_they_do_not_unless_the_model_says_so() -> None:
    assert not tenants_share_cache(ModelConfig())
    assert not tenants_share_cache(config("false"))
    assert tenants_share_cache(config("true"))
    assert [*check_tenants_share_cache(ModelConfig())] == []
    assert [mistake for text in ("true", "false") for mistake in check_tenants_share_cache(config(text))] == []


@pytest.mark.parametrize("text", ["", "True", "1", "yes"])
def test_what_is_neither(text: str) -> None:
    (mistake,) = check_tenants_share_cache(config(text))
    assert mistake.message == (f"parameter 'TENANTS_SHARE_CACHE' of model 'm' is '{text}'; it must be true or false")
