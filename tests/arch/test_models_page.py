"""docs/models.md lists the architectures that the registry has."""

from docs.list_models import PAGE, with_table

RENEW = "docs/models.md is out of date; renew it: python docs/list_models.py"


def test_the_page_is_what_the_registry_says():
    written = PAGE.read_text(encoding="utf-8")
    assert with_table(written) == written, RENEW
