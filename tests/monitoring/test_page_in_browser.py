"""The page in a real browser: nothing breaks, nothing overflows, it lives by polling, and data never runs."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from dstl.monitoring.page import Page, assets
from dstl.monitoring.server import PageServer, Route
from worlds.overviews import SCENES

pytestmark = pytest.mark.browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
if BROWSER is None or DRIVER is None:
    pytest.skip("no Chromium with its driver is installed (Debian: chromium chromium-driver)", allow_module_level=True)


class Site:
    """Serves each scene, and a changing one."""

    def __init__(self) -> None:
        page = Page(0.2)
        self.now = "restoring"
        routes: dict[str, Route] = {
            f"/{name}": (lambda asked, scene=scene: page.render(scene, asked)) for name, scene in SCENES.items()
        }
        routes["/now"] = lambda asked: page.render(SCENES[self.now], asked)
        self.server = PageServer(routes | assets(), "127.0.0.1", 0)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.server.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = BROWSER or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    chrome = Chrome(options=options, service=Service(DRIVER))
    yield chrome
    chrome.quit()


def look(browser: Any, url: str, scheme: str = "light", width: int = 1280) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(url)


def wait_for(browser: Any, condition: str) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 20, 0.05).until(lambda b: b.execute_script(f"return {condition}"))


def test_every_scene_fits_and_breaks_nothing(site: Site, browser: Any) -> None:
    for name in SCENES:
        for width in (1280, 390):
            look(browser, f"{site.server.url}{name}", width=width)
            assert browser.title.startswith("DSTL · ")  # a name that ran as a script would have changed it
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width, (name, width)
            assert browser.execute_script("return document.querySelectorAll('main img').length") == 0
            assert browser.get_log("browser") == []


def test_colours_follow_the_system(site: Site, browser: Any) -> None:
    def brightness(of: str) -> int:
        colour = browser.execute_script(f"return getComputedStyle(document.body).{of}")
        return sum(int(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3])

    for scheme, is_dark in (("light", False), ("dark", True)):
        look(browser, f"{site.server.url}running", scheme)
        assert (brightness("backgroundColor") < brightness("color")) is is_dark
        assert abs(brightness("backgroundColor") - brightness("color")) > 450


def test_an_open_page_follows_the_job_and_says_when_it_is_cut_off(site: Site, browser: Any) -> None:
    site.now = "restoring"
    look(browser, f"{site.server.url}now")
    assert browser.execute_script("return document.querySelector('progress').value") == 412_000_000
    site.now = "failed"
    assert "batch 41 failed" in wait_for(browser, "document.querySelector('#failed h2')?.textContent")
    assert browser.execute_script("return document.querySelector('#restoring')") is None
    bar = "[...document.querySelectorAll('figure.tall g')].at(-2)"
    browser.execute_script(f"{bar}.dispatchEvent(new PointerEvent('pointermove', {{bubbles: true, clientX: 90}}))")
    tip = browser.execute_script("const tip = document.getElementById('tip'); return tip.hidden ? '' : tip.innerText")
    assert "requests" in tip or not tip  # a poll in between hides it
    other = Site()
    look(browser, f"{other.server.url}now")
    other.server.close()
    assert wait_for(browser, "document.getElementById('stale').hidden === false")
