from pathlib import Path

from isochunk.deployment.rules_page import with_rules

PAGE = Path(__file__).parents[2] / "docs" / "check.md"


def test_the_list_of_rules_in_the_docs_is_made_from_the_rules() -> None:
    text = PAGE.read_text()
    assert with_rules(text) == text, "python -m isochunk.deployment.rules_page docs/check.md"
