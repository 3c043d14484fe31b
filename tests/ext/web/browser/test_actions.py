"""The language of actions: parsing, refusals and their texts, allowed addresses."""

from __future__ import annotations

import pytest

from arealite.ext.web.browser.actions import BadAction, PageAction, destination, origin, parse


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("click [12]", PageAction(verb="click", element=12)),
        ("click 12", PageAction(verb="click", element=12)),
        ("  Click [3]  ", PageAction(verb="click", element=3)),
        ("```\nclick [3]\n```", PageAction(verb="click", element=3)),
        ("`click [3]`", PageAction(verb="click", element=3)),
        ("The OK button is right.\nclick [1]", PageAction(verb="click", element=1)),
        ("click [1]\nno, rather:\nclick [2]", PageAction(verb="click", element=2)),
        ("type [3] [hello world]", PageAction(verb="type", element=3, argument="hello world")),
        ("type 3 hello", PageAction(verb="type", element=3, argument="hello")),
        ("type [3] []", PageAction(verb="type", element=3, argument="")),
        ("type [3] [a [b] c]", PageAction(verb="type", element=3, argument="a [b] c")),
        ("select [4] [New York]", PageAction(verb="select", element=4, argument="New York")),
        ("press [Enter]", PageAction(verb="press", element=None, argument="Enter")),
        ("press Control+a", PageAction(verb="press", element=None, argument="Control+a")),
        ("scroll [down]", PageAction(verb="scroll", element=None, argument="down")),
        ("scroll UP [7]", PageAction(verb="scroll", element=7, argument="up")),
        ("goto [/cart?id=1]", PageAction(verb="goto", element=None, argument="/cart?id=1")),
        ("stop [42 EUR]", PageAction(verb="stop", element=None, argument="42 EUR")),
        ("stop", PageAction(verb="stop", element=None, argument="")),
    ],
)
def test_actions_are_parsed_in_the_forms_that_models_write(text: str, command: PageAction) -> None:
    assert parse(text) == command


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "no action"),
        ("I would click the button", "no action"),
        ("clicking [3]", "no action"),
        ("click", "click [3]"),
        ("click [OK]", "click [3]"),
        ("select [3]", "select [3] [option]"),
        ("type hello", "type [3] [text]"),
        ("scroll sideways", "scroll [up]"),
        ("press []", "Enter"),
        ("goto", "url"),
        ("type [1] [" + "x" * 3000 + "]", "at most 2000"),
    ],
)
def test_invalid_action_is_refused_with_the_right_form(text: str, hint: str) -> None:
    with pytest.raises(BadAction) as refused:
        parse(text)
    assert hint in str(refused.value)


ALLOWED = {"127.0.0.1:8000", "shop.test:80"}


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("/b?c=1", "http://127.0.0.1:8000/b?c=1"),
        ("b", "http://127.0.0.1:8000/b"),
        ("http://shop.test", "http://shop.test"),
        ("HTTP://SHOP.test:80/x#y", "http://SHOP.test:80/x#y"),
        ("//shop.test/x", "http://shop.test/x"),
    ],
)
def test_addresses_on_the_tasks_sites_are_allowed(url: str, whole: str) -> None:
    assert destination(url, base="http://127.0.0.1:8000/a", allowed=ALLOWED) == whole


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "FILE:/etc/passwd",
        "view-source:http://shop.test/",
        "chrome://version",
        "about:blank",
        "data:text/html,<p>hi",
        "javascript:core.endEpisode(1)",
        "blob:http://127.0.0.1:8000/1",
        "ftp://shop.test/",
        "https://shop.test/",
        "http://shop.test.evil.org/",
        "http://shop.test@evil.org/",
        "http://me@shop.test/",
        "http://127.0.0.1:8001/",
        "http://127.0.0.1/",
        "http://localhost:8000/",
        "http://[::1]:8000/",
        "http://[broken/",
        "http://shop.test:99999/",
        "//evil.org/",
    ],
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(BadAction):
        destination(url, base="http://127.0.0.1:8000/a", allowed=ALLOWED)


def test_origin_is_host_and_port() -> None:
    assert origin("https://a.test/x") == "a.test:443"
    assert origin("http://A.test:81") == "a.test:81"
    assert origin("file:///x") == origin("nonsense") == ""
