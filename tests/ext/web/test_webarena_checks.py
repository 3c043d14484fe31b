"""WebArena's three kinds of checks: texts, addresses, contents of pages."""

from __future__ import annotations

from typing import Any

import pytest

from arealite.ext.web import webarena_checks as checks


async def equal(right: str, given: str) -> bool:
    return checks.words(right) == checks.words(given)


@pytest.mark.parametrize(
    ("answer", "references", "score"),
    [
        ("Quest Watch", {"exact_match": "quest watch"}, True),
        (' "Quest Watch" ', {"exact_match": "Quest Watch"}, True),
        ("the Quest Watch", {"exact_match": "Quest Watch"}, False),
        ("", {"exact_match": "Quest Watch"}, False),
        ("It costs 12 EUR and 30 ct", {"must_include": ["12 eur", "30 CT"]}, True),
        ("It costs 12 EUR", {"must_include": ["12 EUR", "30 ct"]}, False),
        ("there are 10", {"must_include": ["0"]}, False),
        ("there are 0.", {"must_include": ["0"]}, True),
        ("10 and 11", {"must_include": ["0", "1"]}, True),
        ("January, 2023!", {"fuzzy_match": ["january 2023"]}, True),
        ("Jan 2023", {"fuzzy_match": ["January 2023"]}, False),
        ("n/a", {"fuzzy_match": "N/A"}, True),
        ("12 EUR", {"must_include": ["12"], "exact_match": "12 EUR"}, True),
        ("12 USD", {"must_include": ["12"], "exact_match": "12 EUR"}, False),
        ("anything", {}, True),
    ],
)
async def test_answers_are_compared_by_each_rule(
    answer: str, references: dict[str, Any], score: bool
) -> None:
    assert await checks.string_match(answer, references, equal) is score


async def test_judge_is_asked_only_if_texts_differ() -> None:
    asked = []

    async def judge(right: str, given: str) -> bool:
        asked.append((right, given))
        return len(asked) < 2

    references = {"fuzzy_match": ["Monday", "Tuesday", "Friday"]}
    assert not await checks.string_match("tuesday", references, judge)
    assert asked == [("Monday", "tuesday"), ("Friday", "tuesday")]


SHOP = "http://shop.test:7770"


@pytest.mark.parametrize(
    ("url", "reference", "score"),
    [
        (f"{SHOP}/cart/", f"{SHOP}/cart", True),
        (f"{SHOP}/cart/item/1", f"{SHOP}/cart", True),
        (f"{SHOP}/", f"{SHOP}/cart", False),
        ("https://shop.test:7770/cart", f"{SHOP}/cart", True),
        ("http://other.test/cart", f"{SHOP}/cart", False),
        (f"{SHOP}/list?sort=price&page=2", f"{SHOP}/list?sort=price", True),
        (f"{SHOP}/list?sort=name", f"{SHOP}/list?sort=price", False),
        (f"{SHOP}/list", f"{SHOP}/list?sort=price", False),
        (f"{SHOP}/b", f"{SHOP}/a |OR| {SHOP}/b", True),
        (f"{SHOP}/c", f"{SHOP}/a |OR| {SHOP}/b", False),
        (f"{SHOP}/a?x=2", f"{SHOP}/a?x=1 |OR| {SHOP}/a?x=2", True),
    ],
)
def test_addresses_are_compared_with_their_parameters(
    url: str, reference: str, score: bool
) -> None:
    assert checks.url_match(url, reference) is score


@pytest.mark.parametrize(
    ("content", "required", "score"),
    [
        ("Shipped", {"exact_match": "shipped"}, True),
        ("Not shipped", {"exact_match": "shipped"}, False),
        ("<p>Bed &amp; Breakfast</p>", {"must_include": ["bed & breakfast"]}, True),
        ("pro account", {"must_include": ["basic |OR| pro", "account"]}, True),
        ("pro", {"must_include": ["basic |OR| pro", "account"]}, False),
        ("", {"must_include": ["a"]}, False),
        ("", {"exact_match": ""}, True),
    ],
)
def test_contents_of_pages_are_compared(
    content: str, required: dict[str, Any], score: bool
) -> None:
    assert checks.content_match(content, required) is score


def test_unsupported_checks_are_named() -> None:
    with pytest.raises(checks.UnsupportedCheck):
        checks.content_match("", {"fuzzy": "x"})
    call = {"url": "func:shopping_get_latest_order_url()", "locator": ""}
    assert checks.unsupported({"eval": {"eval_types": ["program_html"], "program_html": [call]}})
    assert checks.unsupported({"eval": {"eval_types": ["page_image"]}}) == "page_image"
    plain = {"url": "last", "locator": "document.title"}
    assert not checks.unsupported({"eval": {"eval_types": ["url_match"], "program_html": [plain]}})
