"""docs/settings.md and the settings classes agree."""

from __future__ import annotations

import pytest

from docs.settings_tables import CLASSES, PAGE, page, texts_of
from duplet_runtime.settings import SERVICE_NAMES, ServiceSettings


def test_the_page_is_the_codes() -> None:
    assert PAGE.read_text("utf-8") == page(), "run `make tables`"


def test_no_service_is_missing() -> None:
    assert {kind.role for kind in CLASSES} == set(SERVICE_NAMES)


@pytest.mark.parametrize("kind", CLASSES)
def test_every_setting_says_what_it_means(kind: type[ServiceSettings]) -> None:
    texts = texts_of(kind)
    assert [name for name in kind.model_fields if not texts.get(name)] == []
