"""Pages of the report, opened: by an engine of JavaScript with as much of a document as they use, and by a browser.

Tests with a browser have the argument ``browser``, and are skipped on a machine without one. CI has one.
"""

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import quickjs

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DOM = """
const elements = {}, listeners = {};
function element(id) {
  return elements[id] ??= {
    id, innerHTML: "", textContent: "", style: {}, clientWidth: 1000,
    addEventListener(name, fn) { listeners[`${id} ${name}`] = fn; },
    getBoundingClientRect: () => ({left: 0, top: 0, width: 1000, height: 400}),
  };
}
const document = {getElementById: element};
const window = {innerWidth: 1280, addEventListener() {}};
class ResizeObserver { observe() {} }
"""
"""As much of a document as the page uses."""


class Tags(HTMLParser):
    """Checks that tags nest, and collects what they load, and scripts."""

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.scripts = [], [], []

    def handle_starttag(self, tag, attrs):
        self.loads += [(name, value) for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def opened(text):
    """An engine in which the script of the page has run, in a document without layout; and the page's tags."""
    tags = Tags()
    tags.feed(text)
    tags.close()
    assert tags.open == []
    data, script = tags.scripts
    context = quickjs.Context()
    context.set_time_limit(20)  # of a processor, in seconds
    context.eval(DOM + f"element('data').textContent = {json.dumps(data)};")
    context.eval(script)
    return context, tags


def html_of(context, name):
    return context.eval(f"element({json.dumps(name)}).innerHTML")


def fire(context, name, event, **fields):
    context.eval(f"listeners[{json.dumps(f'{name} {event}')}](Object.assign({{preventDefault() {{}}}}, {json.dumps(fields)}))")


@pytest.fixture
def browser(tmp_path):
    """A function that runs a headless browser on a page, with more options, and returns what the browser prints."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"this machine has no browser: none of {', '.join(BROWSERS)} is on the PATH")

    def run(page, *options):
        always = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000"]
        command = [found, *always, f"--user-data-dir={tmp_path / 'profile'}", *options, Path(page).as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout

    return run
