"""Pages in a real browser: descriptions as text, actions, and failures."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from arealite.ext.web.browser.actions import BadAction, parse
from arealite.ext.web.browser.chromium import Browser
from arealite.ext.web.config import BrowserConfig
from tests.ext.web.browser.sites import needs_chromium, serving

pytestmark = [needs_chromium, pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

SHORT_S = 2.0
FORM = """<title>Form</title><h1>Order</h1>
<label>Name <input name=name></label><label for=w>When</label><input id=w type=date>
<textarea aria-label=Note>old</textarea><input type=checkbox id=c><label for=c>Gift</label>
<select id=s><option>Red<option value=g selected>Green</select>
<input type=password value=abc><input type=hidden value=no><button disabled>Wait</button>
<a href=/next>Next</a><p style="display:none">hidden</p><p>Mixed <b>bold</b> text</p>
<script>var log = []; document.addEventListener('change', e => log.push(e.target.id))</script>"""

COVERED = """<title>Covered</title><button id=b style="position:absolute;left:10px;top:10px"
 onclick="document.title='clicked'">Under</button>
<div style="position:absolute;left:0;top:0;width:300px;height:300px;background:red"></div>"""

WIDGETS = """<title>Widgets</title><div id=d>Listening</div>
<span onclick="1" class="star on far" style="display:inline-block;width:9px;height:9px"></span>
<svg width=50 height=50><circle cx=20 cy=20 r=9 fill=red /></svg>
<div contenteditable>words</div><iframe srcdoc="<button onclick=&quot;parent.document.title='framed'
&quot;>Inner</button>" style="margin:30px"></iframe><div id=host></div>
<script>d.addEventListener('mousedown', () => document.title = 'down');
host.attachShadow({mode: 'open'}).innerHTML = '<button>Shadow</button>'</script>"""

PAGES = {
    "/form": FORM,
    "/covered": COVERED,
    "/widgets": WIDGETS,
    "/next": "<title>Next</title><p>You are here",
    "/long": "<title>Long</title>" + "".join(f"<p style='margin:0'>{n}" for n in range(500)),
    "/tall": "<title>Tall</title><p>top</p><div style='height:3000px'></div><p>bottom</p>",
    "/dialogs": "<script>setInterval(() => alert(document.title += 's'), 1)</script>",
    "/dialog": "<title>D</title><button onclick=\"document.title=confirm('Sure?')\">Ask</button>",
    "/tabs": "<title>T</title><a href=/next target=_blank>Link</a>"
    "<button onclick=\"window.open('/next')\">Open</button>",
    "/hang": "<title>H</title><button onclick='for(;;);'>Hang</button>",
    "/down": "<title>Down</title><a href=/file>Get</a><a href=/silent>Wait</a>"
    "<form action=/next><button>Go</button></form>",
    "/later": "<title>L</title><script>setTimeout(() => location.href = '/next', 0)</script>",
    "/bye": "<title>B</title><button onclick='1'>X</button><script>"
    "onbeforeunload = e => { e.preventDefault(); return 'stay' }</script>",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world():
    """A site and a browser."""

    async def silent(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def file(_: web.Request) -> web.Response:
        headers = {"Content-Disposition": "attachment; filename=x.bin"}
        return web.Response(body=b"x" * 100, headers=headers)

    async with serving({**PAGES, "/silent": silent, "/file": file}) as site:
        config = BrowserConfig(contexts=1, timeout_s=60.0, max_chars=1000)
        browser = Browser(config, [site.address])
        await browser.setup()
        yield site, browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(world):
    """A page and its site."""
    site, browser = world
    async with browser.page() as made:
        made.site = site
        yield made


@contextmanager
def impatient(page):
    """Let the next request to the page time out at once; later requests have the usual timeout."""
    patient = page.config
    page.config = Once(patient)
    try:
        yield
    finally:
        page.config = patient


class Once:
    """A config whose timeout is short at the first read and long afterwards."""

    def __init__(self, patient: BrowserConfig) -> None:
        self.patient = patient
        self.limits = [SHORT_S]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.patient, name)

    @property
    def timeout_s(self) -> float:
        return self.limits.pop() if self.limits else self.patient.timeout_s


async def see(page, path: str) -> list[str]:
    await page.open(page.site.address + path)
    return (await page.look()).text.split("\n")


async def do(page, text: str):
    await page.perform(parse(text))
    return await page.look()


def number(lines: list[str], words: str) -> str:
    """Return the id of the first element whose line contains the words."""
    return next(line for line in lines if words in line).split("]")[0][1:]


async def test_form_is_described_line_by_line(page) -> None:
    assert await see(page, "/form") == [
        '[1] h1 "Order"',
        '[2] textbox "Name"',
        '[3] date "When"',
        '[4] textbox "Note" = "old"',
        '[5] checkbox "Gift"',
        '[6] select = "Green" of "Red" | "Green"',
        '[7] password = "abc"',
        '[8] button "Wait" disabled',
        '[9] link "Next"',
        "Mixed",
        '[10] b "bold"',
        "text",
    ]


async def test_fields_are_filled(page) -> None:
    await see(page, "/form")
    await do(page, 'type [2] [Ann "A" Ö]')
    await do(page, "type [3] [2024-02-29]")
    await do(page, "type [4] [" + "new " * 100 + "]")
    await do(page, "click [5]")
    lines = (await do(page, "select [6] [red]")).text.split("\n")
    assert lines[1] == '[2] textbox "Name" = "Ann "A" Ö"'
    assert lines[2] == '[3] date "When" = "2024-02-29"'
    assert lines[3].startswith('[4] textbox "Note" = "new new')
    assert lines[4] == '[5] checkbox "Gift" checked focused'
    assert lines[5] == '[6] select = "Red" of "Red" | "Green"'
    assert {"w", "c", "s"} <= set(await page.evaluate("() => log"))
    assert (await do(page, "type [4] []")).text.split("\n")[3] == '[4] textbox "Note" focused'
    await do(page, "type [2] [x]")
    lines = (await do(page, "click [5]")).text.split("\n")
    assert lines[1] == '[2] textbox "Name" = "x"'
    assert "checked" not in lines[4]


@pytest.mark.parametrize(
    ("action", "why"),
    [
        ("click [99]", "no [99]"),
        ("click [0]", "no [0]"),
        ("type [5] [x]", "no text"),
        ("type [9] [x]", "no text"),
        ("type [3] [tomorrow]", "date"),
        ("select [6] [Blue]", "no option"),
        ("select [5] [Blue]", "no options"),
        ("press [Entr]", "no key"),
        ("goto [file:///etc/passwd]", "cannot go"),
        ("scroll [down] [99]", "no [99]"),
    ],
)
async def test_impossible_action_is_an_error_for_the_agent(page, action: str, why: str) -> None:
    before = await see(page, "/form")
    with pytest.raises(BadAction) as refused:
        await do(page, action)
    assert why in str(refused.value)
    assert len((await page.look()).text.split("\n")) == len(before)


async def test_covered_element_is_clicked_by_script(page) -> None:
    assert (await see(page, "/covered"))[0] == '[1] button "Under"'
    assert (await do(page, "click [1]")).title == "clicked"


async def test_listening_elements_frames_and_shadow_roots_are_described(page) -> None:
    lines = await see(page, "/widgets")
    assert lines[0] == '[1] div "Listening"'
    assert lines[1].startswith("[2] span .star .on at ")
    assert lines[2].startswith("[3] circle red at ")
    assert 'button "Shadow"' in lines[-1]
    assert (await do(page, "click [1]")).title == "down"
    assert (await do(page, f"click [{number(lines, 'Inner')}]")).title == "framed"
    view = await do(page, f"type [{number(lines, 'words')}] [new]")
    assert 'textbox "new" focused' in view.text


async def test_element_of_a_removed_frame_is_not_on_the_page(page) -> None:
    inner = number(await see(page, "/widgets"), "Inner")
    await page.tab.evaluate("() => document.querySelector('iframe').remove()")
    with pytest.raises(BadAction, match="there is no"):
        await page.perform(parse(f"click [{inner}]"))


async def test_error_of_the_pages_script_fails_the_episode(page) -> None:
    from arealite.ext.web.browser.page import PageError

    await see(page, "/widgets")
    await page.tab.evaluate("() => { d.scrollIntoView = () => { throw Error('no') } }")
    with pytest.raises(PageError, match="no"):
        await page.perform(parse("click [1]"))


async def test_long_page_is_cut_and_tall_page_is_scrolled(page) -> None:
    lines = await see(page, "/long")
    assert lines[-1] == "(the page is cut here: it is longer)" or "outside" in lines[-1]
    assert len("\n".join(lines)) < 1100
    assert await see(page, "/tall") == ['[1] p "top"', "(1 more outside the window: scroll)"]
    for _ in range(6):
        view = await do(page, "scroll [down]")
    assert view.text.split("\n")[0] == '[1] p "bottom"'
    for _ in range(6):
        view = await do(page, "scroll [up]")
    assert '"top"' in view.text


async def test_all_choices_are_possible_actions(page) -> None:
    await see(page, "/form")
    choices = (await page.look()).choices
    assert choices[:2] == ["click [1]", "click [2]"]
    assert "select [6] [Red]" in choices
    for choice in choices:
        await do(page, choice)
        await see(page, "/form")


async def test_notes_of_endless_dialogs_are_limited(world) -> None:
    site, browser = world
    async with browser.page({}) as page:
        await page.open(f"{site.address}/dialogs")
        while len((await page.look()).title) <= 10:
            pass
        assert len(page.notes) == 5


async def test_dialogs_are_dismissed_and_noted(page) -> None:
    await see(page, "/dialog")
    assert (await do(page, "click [1]")).title == "false"
    assert page.notes == ['the page said "Sure?"; it was dismissed']
    await see(page, "/bye")
    await do(page, "click [1]")
    assert (await do(page, "goto [/next]")).title == "Next"


async def test_new_windows_open_in_the_only_tab(page) -> None:
    for button in (1, 2):
        await see(page, "/tabs")
        assert (await do(page, f"click [{button}]")).title == "Next"
        assert len(page.tab.context.pages) == 1


async def test_look_after_an_action_waits_for_the_next_page(page) -> None:
    await see(page, "/form")
    assert (await do(page, "click [9]")).text == '[1] p "You are here"'
    await see(page, "/down")
    assert (await do(page, "click [3]")).title == "Next"
    await page.open(page.site.address + "/later")
    assert (await page.look()).title == "Next"
    await see(page, "/down")
    await page.tab.focus("button")
    assert (await do(page, "press [Enter]")).title == "Next"


async def test_downloads_are_refused(world) -> None:
    site, browser = world
    async with browser.page({}) as page:  # its second download may be noted late
        page.site = site
        await see(page, "/down")
        assert (await do(page, "click [1]")).title == "Down"
        assert (await do(page, "goto [/file]")).title == "Down"
        assert "a download was refused" in page.notes
        assert any("/file cannot be loaded" in note for note in page.notes)


async def test_page_that_never_loads_is_noted_if_the_agent_chose_it(page) -> None:
    await see(page, "/form")
    with impatient(page):
        assert (await do(page, "goto [/silent]")).title == "Form"
    assert "does not load" in page.notes[0]
    await see(page, "/down")
    await page.perform(parse("click [2]"))
    with impatient(page):
        assert (await page.look()).title == "Down"
    assert page.notes == ["the next page does not load; it was given up"]
    assert (await do(page, "click [3]")).title == "Next"


async def test_first_page_that_never_loads_fails_the_episode(world) -> None:
    from arealite.ext.web.browser.page import PageError, PageTimeout

    site, browser = world
    with pytest.raises(PageTimeout, match=f"within timeout_s={SHORT_S}"):
        async with browser.page() as page:
            with impatient(page):
                await page.open(site.address + "/silent")
    for url in ("http://elsewhere.test/", "file:///etc/passwd", "view-source:" + site.address):
        with pytest.raises(PageError, match="not on a site of this task"):
            async with browser.page() as page:
                await page.open(url)


async def test_hanging_page_fails_the_episode_and_frees_its_slot(world) -> None:
    from arealite.ext.web.browser.page import PageTimeout

    site, browser = world
    for _ in range(2):  # more episodes than slots
        with pytest.raises(PageTimeout):
            async with browser.page() as page:
                page.site = site
                await see(page, "/hang")
                with impatient(page):
                    await do(page, "click [1]")
    async with browser.page() as page:
        page.site = site
        assert await see(page, "/next") == ['[1] p "You are here"']


async def test_crashed_page_fails_the_episode(world) -> None:
    from arealite.ext.web.browser.page import BrowserCrash

    site, browser = world
    with pytest.raises(BrowserCrash):
        async with browser.page() as page:
            page.site = site
            await see(page, "/form")
            session = await page.tab.context.new_cdp_session(page.tab)
            crash = asyncio.create_task(session.send("Page.crash"))
            try:
                while True:
                    await page.look()
            finally:
                crash.cancel()
                await asyncio.gather(crash, return_exceptions=True)
    async with browser.page() as page:
        page.site = site
        assert await see(page, "/next") == ['[1] p "You are here"']


async def test_dead_driver_is_a_crash(page) -> None:
    from arealite.ext.web.browser.page import BrowserCrash

    with pytest.raises(BrowserCrash, match="driver died: the handler is closed"):
        async with page.asking("a page"):
            raise RuntimeError("the handler is closed")
    assert not page.is_alive


async def test_variables_of_the_page_are_read(page) -> None:
    await see(page, "/form")
    view = await page.look("h1, p", ["log", "none"])
    assert view.state == [[], None]
    assert "Order" not in view.text
