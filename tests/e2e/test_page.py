"""The page in a real browser against a real server: chat, stop, colours, widths, themes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.server_process import ServerProcess

selenium = pytest.importorskip(
    "selenium", reason="selenium is not installed (pip install '.[test]')"
)

from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM = shutil.which("chromium")
CHROMEDRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or CHROMEDRIVER is None,
    reason="no browser is installed (Debian: apt install chromium chromium-driver)",
)
WAIT_S = 100
LAPTOP, PHONE = (1280, 800), (390, 844)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Browser:
    """A browser on the page; `errors` gives the errors and warnings of its console."""

    def __init__(self, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM or ""
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
        self.driver.set_page_load_timeout(WAIT_S)
        self.driver.set_script_timeout(WAIT_S)

    def open(
        self,
        url: str,
        size: tuple[int, int] = LAPTOP,
        theme: str = "light",
        *,
        ready: bool = True,
    ) -> None:
        width, height = size
        metrics = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": width < 500,
        }
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get(url)
        if ready:
            self.until(lambda: self.script(READY))

    def script(self, code: str, *arguments: object) -> object:
        return self.driver.execute_script(f"return {code}", *arguments)

    def all(self, selector: str) -> list:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return "\n".join(one.text for one in self.all(selector))

    def until(self, condition: Callable[[], object]) -> None:
        WebDriverWait(self.driver, WAIT_S, poll_frequency=0.05).until(lambda _: condition())

    def say(self, text: str) -> None:
        self.one("#input").send_keys(text, Keys.ENTER)

    def wait_for_answer(self) -> str:
        self.until(
            lambda: self.script(
                "document.querySelector('.assistant:last-of-type .meta').textContent"
            )
        )
        return self.text(".assistant:last-of-type .body")

    def errors(self) -> list[str]:
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]


READY = "document.getElementById('dot').classList.contains('good')"
NO_SIDEWAYS = "document.documentElement.scrollWidth <= window.innerWidth"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.driver.quit()


@pytest.fixture
def page(server: ServerProcess, browser: Browser) -> Iterator[Browser]:
    browser.open(server.url)
    browser.errors()
    yield browser
    assert browser.errors() == []


def test_a_chat_streams(page: Browser) -> None:
    # `window.seen` collects every text that the body of the answer has had.
    page.driver.execute_script(
        "window.seen = new Set(); new MutationObserver(() => {"
        " const body = document.querySelector('.assistant .body');"
        " if (body) window.seen.add(body.textContent);"
        "}).observe(document.getElementById('messages'), {childList: true, subtree: true});"
    )
    page.one("#settings-toggle").click()
    page.one("#temperature").send_keys("0")
    page.say("What is an ostinato?")
    answer = page.wait_for_answer()
    assert answer.startswith("An ostinato is")
    seen = sorted(page.script("[...window.seen]"), key=len)
    assert len(seen) > 5
    assert all(answer.startswith(text.strip()) for text in seen)
    assert "tokens" in page.text(".assistant .meta")
    assert page.one("#send").is_displayed()
    page.say("And what is it good for?")
    page.until(lambda: len(page.all(".assistant .meta")) == 2)
    page.until(lambda: page.one("#send").is_displayed())
    assert len(page.all(".user")) == 2


def test_the_sampling_controls_reach_the_server(page: Browser) -> None:
    page.one("#settings-toggle").click()
    page.one("#max_tokens").send_keys("3")
    page.one("#temperature").send_keys("0")
    page.say("What is an ostinato?")
    page.wait_for_answer()
    assert page.text(".assistant .meta").startswith("3 tokens")
    page.one("#temperature").clear()
    page.one("#temperature").send_keys("9")
    page.say("Hello")
    page.until(lambda: page.text(".assistant .problem"))
    assert "temperature must be in [0, 2]" in page.text(".assistant .problem")
    page.until(page.errors)  # the browser itself reports the 400


def test_an_answer_is_stopped(server: ServerProcess, page: Browser) -> None:
    # A script in the page clicks: the model answers faster than the driver can click.
    page.driver.execute_script(
        "const stop = document.getElementById('stop');"
        "const watcher = new MutationObserver(() => {"
        "  if (stop.hidden || !document.querySelector('.token')) return;"
        "  watcher.disconnect(); stop.click();"
        "});"
        "watcher.observe(document.body, {childList: true, subtree: true, attributes: true});"
    )
    page.say("Tell me a short story about a cat.")
    assert page.wait_for_answer()
    assert page.text(".assistant .meta").startswith("stopped")
    page.until(lambda: server.metrics()["ostinato_requests_running"] == 0)


def test_tokens_say_how_likely_they_were(page: Browser) -> None:
    page.say("What is an ostinato?")
    page.wait_for_answer()
    tokens = page.all(".token")
    ActionChains(page.driver).move_to_element(tokens[0]).perform()
    page.until(lambda: page.one("#alternatives").is_displayed())
    assert len(page.all("#alternatives div")) in (5, 6)
    assert "%" in page.text("#alternatives h4")
    body = page.one(".assistant .body")
    body.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.script("document.querySelectorAll('.token.chosen').length") == 1
    body.send_keys(Keys.ESCAPE)
    assert not page.one("#alternatives").is_displayed()


def test_text_never_becomes_markup(page: Browser) -> None:
    hostile = "<img src=x onerror=window.hit=1><script>window.hit=1</script>"
    page.driver.execute_async_script(
        """
        const [hostile, done] = arguments;
        import("/page/tokens.js").then(({ TokenText }) => {
          const body = document.getElementById("messages");
          const bytes = [...new TextEncoder().encode(hostile)];
          const tokens = new TokenText(body);
          tokens.add(hostile, [{ token: hostile, logprob: -1, bytes, top_logprobs: [{ token: hostile, logprob: -1 }] }]);
          tokens.choose(body.querySelector(".token"));
          done();
        });
        """,
        hostile,
    )
    page.say(hostile)
    page.wait_for_answer()
    assert (
        page.script("document.querySelectorAll('main img, main script, #alternatives img').length")
        == 0
    )
    assert page.script("window.hit === undefined")
    assert hostile in page.text(".user")


def test_the_engine_is_shown_while_it_works(page: Browser) -> None:
    page.say("Tell me a short story about a cat.")
    page.wait_for_answer()
    page.until(lambda: page.text("#tile-ttft b") not in ("", "–"))
    page.until(lambda: "none yet" not in page.text("#step-now"))
    assert page.script("document.querySelectorAll('#steps rect').length") > 0
    assert "cached" in page.text("#count-cached")
    assert page.script("document.getElementById('blocks').getAttribute('aria-label')").startswith(
        "Block pool:"
    )
    # The canvas has more than one colour.
    assert (
        page.script(
            "new Set(new Uint32Array(document.getElementById('blocks').getContext('2d')"
            ".getImageData(0, 0, 200, 50).data.buffer)).size"
        )
        > 2
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_widths_and_themes(server: ServerProcess, browser: Browser, size, theme) -> None:
    browser.open(server.url, size, theme)
    ground = browser.script("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(21, 19, 18)") == (theme == "dark")
    browser.say("What is an ostinato?")
    browser.wait_for_answer()
    assert browser.script(NO_SIDEWAYS)
    if size == PHONE:
        assert not browser.one("#engine").is_displayed()
        browser.one("#tab-engine").click()
        assert not browser.one("#chat").is_displayed()
    assert browser.one("#tile-rate").is_displayed()
    assert browser.script(NO_SIDEWAYS)
    browser.one("#theme").click()
    changed = browser.script("getComputedStyle(document.body).backgroundColor")
    assert (changed == "rgb(21, 19, 18)") == (theme == "light")
    browser.driver.execute_script("localStorage.clear()")
    assert browser.errors() == []


def test_everything_has_a_name(page: Browser) -> None:
    page.one("#settings-toggle").click()
    nameless = page.script(
        "[...document.querySelectorAll('button, input, textarea, [role=img]')].filter((one) => !("
        "one.textContent.trim() || one.getAttribute('aria-label') || one.labels?.length"
        ")).map((one) => one.id)"
    )
    assert nameless == []
    assert page.script("document.title") == "Ostinato"


def test_a_server_with_keys(browser: Browser) -> None:
    with ServerProcess("server.api_keys=[sesame]") as locked:
        browser.open(locked.url, ready=False)
        browser.until(lambda: browser.one("#key-dialog").is_displayed())
        browser.one("#key-input").send_keys("wrong", Keys.ENTER)
        browser.until(lambda: "missing or wrong" in browser.text("#key-problem"))
        browser.one("#key-input").clear()
        browser.one("#key-input").send_keys("sesame", Keys.ENTER)
        browser.until(lambda: browser.script(READY))
        assert not browser.one("#key-dialog").is_displayed()
        browser.say("What is an ostinato?")
        assert browser.wait_for_answer()
        assert browser.script("document.cookie + JSON.stringify(localStorage)") == "{}"
        # The browser reports the refused requests only.
        assert all("401" in error for error in browser.errors())
