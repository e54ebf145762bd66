"""The page in a real browser: nothing breaks, nothing overflows, it lives by polling, and data never runs."""

import base64
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dstl.monitoring.page import Page, assets
from dstl.monitoring.server import PageServer, Route
from worlds.overviews import SCENES

pytestmark = pytest.mark.browser

PICTURE = Path(__file__).parents[2] / ".github" / "page.webp"
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


def test_the_picture_in_the_documentation_is_of_this_page(site: Site, browser: Any) -> None:
    """With DSTL_PICTURES=1 it is made anew."""

    def seen(scene: str) -> bytes:
        look(browser, f"{site.server.url}{scene}")
        options = {"format": "webp", "quality": 70}
        return base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", options)["data"])

    this, other = seen("running"), seen("failed")
    if os.environ.get("DSTL_PICTURES"):
        PICTURE.write_bytes(this)
    browser.get("about:blank")  # the page itself lets no picture in

    def distance(one: bytes) -> float:
        urls = [f"data:image/webp;base64,{base64.b64encode(data).decode()}" for data in (one, PICTURE.read_bytes())]
        return float(browser.execute_async_script(COMPARE, *urls))

    # Other fonts move it a little; another page is far off.
    far = distance(this)
    assert far < 4 < distance(other), f"{far}: run this with DSTL_PICTURES=1, look at .github/page.webp, and commit it"


COMPARE = """
const [one, other, done] = arguments;
const pixels = async (url) => {
  const image = new Image();
  image.src = url;
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: 128, height: 90 });
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0, 128, 90);
  return context.getImageData(0, 0, 128, 90).data;
};
Promise.all([pixels(one), pixels(other)]).then(([a, b]) => {
  let sum = 0;
  a.forEach((value, at) => { sum += Math.abs(value - b[at]); });
  done(sum / a.length);
});
"""
